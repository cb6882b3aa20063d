// The last step's batch as the model saw it: packed rows, each sequence its last token and its drafts.

import { colour, MONO, prepare, setText } from "./dom.js";
import { counted, whole } from "./format.js";

const CELL = { width: 11, height: 20 };
const GAP = 10; // between sequences
const LINE = CELL.height + 18; // with the number of the sequence below it
const MAX_LINES = 6;
const HEIGHT = LINE * 3;

export class Batch {
  #canvas;
  #readout;
  #empty;

  constructor(canvas, readout, empty) {
    this.#canvas = canvas;
    this.#readout = readout;
    this.#empty = empty;
  }

  /** `step` as in the feed, or null before the first. */
  paint(step) {
    const sequences = step?.seqs ?? [];
    this.#empty.hidden = step !== null;
    const width = this.#canvas.parentElement.clientWidth;
    const places = lay(sequences, width);
    const lines = places.length ? places.at(-1).line + 1 : 1;
    const context = prepare(this.#canvas, width, Math.max(HEIGHT, Math.min(lines, MAX_LINES) * LINE + 4));
    for (const place of places) if (place.line < MAX_LINES) drawSequence(context, place);
    if (step) this.#say(step);
  }

  #say(step) {
    const sum = (place) => step.seqs.reduce((all, sequence) => all + sequence[place], 0);
    const drafted = sum(2);
    const others = step.rows - step.seqs.length - drafted;
    const parts = [counted(step.seqs.length, "sequence"), `${counted(drafted, "draft")} (${whole(sum(3))} accepted)`];
    if (others > 0) parts.push(`${whole(others)} of prompts`);
    const queue = step.waiting ? `${whole(step.waiting)} waiting` : "nobody waits";
    const text = `step ${whole(step.n)}: ${counted(step.rows, "row")} = ${parts.join(" + ")} · ${queue}`;
    setText(this.#readout, text);
    this.#canvas.setAttribute("aria-label", `Batch. ${text}`);
  }
}

/** Where each sequence stands: side by side, on the next line where the width is used up. */
function lay(sequences, width) {
  let [x, line] = [0, 0];
  return sequences.map(([key, , drafted, accepted]) => {
    const wide = (1 + drafted) * CELL.width;
    if (x > 0 && x + wide > width) [x, line] = [0, line + 1];
    const place = { key, drafted, accepted, x, line };
    x += Math.max(wide, 22) + GAP;
    return place;
  });
}

/** Its last token filled, accepted drafts in their colour, rejected ones crossed out. */
function drawSequence(context, { key, drafted, accepted, x, line }) {
  const y = line * LINE + 2;
  const [w, h] = [CELL.width - 2, CELL.height];
  context.fillStyle = colour("--draft");
  context.fillRect(x, y, w, h);
  for (let i = 1; i <= drafted; i++) {
    const left = x + i * CELL.width;
    if (i <= accepted) {
      context.fillStyle = colour("--verify");
      context.fillRect(left, y, w, h);
      continue;
    }
    context.strokeStyle = colour("--line-strong");
    context.lineWidth = 1;
    context.strokeRect(left + 0.5, y + 0.5, w - 1, h - 1);
    context.beginPath();
    context.moveTo(left + 1, y + h - 1);
    context.lineTo(left + w - 1, y + 1);
    context.stroke();
  }
  context.fillStyle = colour("--muted");
  context.font = `10px ${MONO}`;
  context.textAlign = "left";
  context.textBaseline = "top";
  context.fillText(`#${key}`, x, y + h + 3);
}
