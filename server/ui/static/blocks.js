// The KV cache, block by block. Each state has a colour and a shape of its own.

import { colour, prepare, setText } from "./dom.js";
import { percent, whole } from "./format.js";

const MAX_HEIGHT = 190;
const SHAPED = 7; // pixels from which on shapes can be seen
const NAMES = { u: "used", p: "partly filled", s: "shared", c: "cached", ".": "free" };
const COLOURS = { u: "--kv-used", p: "--kv-used", s: "--kv-shared", c: "--kv-cached", ".": "--kv-free" };
// Which state a cell shows that stands for several blocks: the one that says most.
const WEIGHT = { s: 4, p: 3, u: 2, c: 1, ".": 0 };

export class BlockMap {
  #canvas;
  #readout;
  #empty;

  constructor(canvas, readout, empty) {
    this.#canvas = canvas;
    this.#readout = readout;
    this.#empty = empty;
  }

  /** `blocks`: a character a block, or null; `fragmentation` as in the state. */
  paint(blocks, fragmentation, blockSize) {
    this.#empty.hidden = blocks !== null;
    const width = this.#canvas.parentElement.clientWidth;
    if (blocks === null) {
      prepare(this.#canvas, width, 120);
      return;
    }
    const { size, columns, each } = fit(blocks.length, width);
    const cells = each === 1 ? blocks : merge(blocks, each);
    const context = prepare(this.#canvas, width, Math.ceil(cells.length / columns) * size);
    for (let i = 0; i < cells.length; i++) {
      drawCell(context, cells[i], (i % columns) * size, Math.floor(i / columns) * size, size);
    }
    this.#say(blocks, each, fragmentation, blockSize);
  }

  #say(blocks, each, fragmentation, blockSize) {
    const counts = {};
    for (const state of blocks) counts[state] = (counts[state] ?? 0) + 1;
    const parts = Object.entries(NAMES).map(([state, name]) => `${whole(counts[state] ?? 0)} ${name}`);
    const text =
      `${whole(blocks.length)} blocks of ${blockSize} tokens: ${parts.join(", ")} · fragmentation ${percent(fragmentation)}` +
      (each > 1 ? ` · a cell is ${each} blocks` : "");
    setText(this.#readout, text);
    const label = `Block map. ${text}`;
    if (this.#canvas.getAttribute("aria-label") !== label) this.#canvas.setAttribute("aria-label", label);
  }
}

/** The largest cells that fit; if even small ones do not, a cell stands for several blocks. */
function fit(count, width) {
  for (let size = 14; size >= 4; size--) {
    const columns = Math.max(1, Math.floor(width / size));
    if (Math.ceil(count / columns) * size <= MAX_HEIGHT) return { size, columns, each: 1 };
  }
  const columns = Math.max(1, Math.floor(width / 4));
  return { size: 4, columns, each: Math.ceil(count / (columns * Math.floor(MAX_HEIGHT / 4))) };
}

function merge(blocks, each) {
  let cells = "";
  for (let i = 0; i < blocks.length; i += each) {
    let shown = ".";
    for (const state of blocks.slice(i, i + each)) if (WEIGHT[state] > WEIGHT[shown]) shown = state;
    cells += shown;
  }
  return cells;
}

function drawCell(context, state, x, y, size) {
  const inner = size - (size >= SHAPED ? 2 : 1);
  const filled = colour(COLOURS[state]);
  context.fillStyle = filled;
  if (state === "." || size < SHAPED) {
    context.fillRect(x, y, inner, inner);
    return;
  }
  if (state === "p") {
    context.fillStyle = colour("--kv-free");
    context.fillRect(x, y, inner, inner);
    context.fillStyle = filled;
    context.fillRect(x, y + Math.ceil(inner / 2), inner, Math.floor(inner / 2));
  } else if (state === "c") {
    context.strokeStyle = filled;
    context.lineWidth = 1.5;
    context.strokeRect(x + 0.75, y + 0.75, inner - 1.5, inner - 1.5);
    context.fillRect(x + inner / 2 - 1, y + inner / 2 - 1, 2, 2);
  } else {
    context.fillRect(x, y, inner, inner);
    if (state === "s") {
      context.fillStyle = colour("--card");
      context.beginPath();
      context.arc(x + inner / 2, y + inner / 2, Math.max(inner / 5, 1.4), 0, 2 * Math.PI);
      context.fill();
    }
  }
}
