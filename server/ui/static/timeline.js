// The step timeline: a bar a step, drafting, verifying and all else on top of each other; dots are gaps between tokens.

import { colour, MONO, prepare, setText } from "./dom.js";
import { counted, ms, quantile, whole } from "./format.js";
import { parts } from "./store.js";

const BAR = 5;
const GAP = 1;
const MARGIN = { left: 54, right: 4, top: 10, bottom: 4 };
const NICE = [1, 2, 2.5, 5, 10];

export class Timeline {
  #canvas;
  #readout;
  #empty;
  #store;
  #cursor = null; // number of the step that the reader points at
  #shown = [];

  constructor(canvas, readout, empty, store) {
    this.#canvas = canvas;
    this.#readout = readout;
    this.#empty = empty;
    this.#store = store;
    canvas.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    canvas.addEventListener("pointerdown", (event) => this.#point(event.offsetX));
    canvas.addEventListener("pointerleave", () => this.#choose(null));
    canvas.addEventListener("blur", () => this.#choose(null));
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  paint() {
    const width = this.#canvas.parentElement.clientWidth;
    const height = width < 480 ? 170 : 200;
    const context = prepare(this.#canvas, width, height);
    const room = Math.floor((width - MARGIN.left - MARGIN.right) / (BAR + GAP));
    this.#shown = this.#store.steps.slice(-room);
    this.#empty.hidden = this.#shown.length > 0;
    const top = scale(this.#shown);
    const base = height - MARGIN.bottom;
    const y = (seconds) => base - (Math.min(seconds, top) / top) * (base - MARGIN.top);
    drawGrid(context, top, y, width);
    this.#shown.forEach((step, i) => {
      const x = this.#x(i, room);
      drawBar(context, step, x, y);
      context.fillStyle = colour("--itl");
      for (const gap of step.itl.slice(0, 64)) drawDot(context, x + BAR / 2, gap > top ? null : y(gap));
      if (step.n === this.#cursor) {
        context.strokeStyle = colour("--ink");
        context.lineWidth = 1;
        context.strokeRect(x - 1.5, MARGIN.top - 4.5, BAR + 3, base - MARGIN.top + 5);
      }
    });
    this.#say();
  }

  #x(i, room) {
    // The newest at the right, and bars at their places from the right so that they do not shift by half a bar.
    return MARGIN.left + (room - this.#shown.length + i) * (BAR + GAP);
  }

  #point(offset) {
    const width = this.#canvas.parentElement.clientWidth;
    const room = Math.floor((width - MARGIN.left - MARGIN.right) / (BAR + GAP));
    const i = Math.floor((offset - MARGIN.left) / (BAR + GAP)) - (room - this.#shown.length);
    this.#choose(this.#shown[i]?.n ?? null);
  }

  #key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || !this.#shown.length) return;
    event.preventDefault();
    const last = this.#shown.length - 1;
    const at = this.#shown.findIndex((step) => step.n === this.#cursor);
    const from = at < 0 ? last + 1 : at;
    this.#choose(this.#shown[Math.max(0, Math.min(last, from + move))].n);
  }

  #choose(number) {
    if (number === this.#cursor) return;
    this.#cursor = number;
    this.paint();
  }

  #say() {
    const chosen = this.#shown.find((step) => step.n === this.#cursor);
    const text = chosen ? describe(chosen) : this.#shown.length ? summary(this.#shown) : "\u00a0";
    setText(this.#readout, text);
    const label = this.#shown.length ? `Step timeline. ${text}` : "Step timeline: no steps yet";
    if (this.#canvas.getAttribute("aria-label") !== label) this.#canvas.setAttribute("aria-label", label);
  }
}

function drawGrid(context, top, y, width) {
  context.font = `11px ${MONO}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let i = 0; i <= 4; i++) {
    const seconds = (top * i) / 4;
    const at = Math.round(y(seconds)) + 0.5;
    context.strokeStyle = i === 0 ? colour("--line-strong") : colour("--line");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(MARGIN.left, at);
    context.lineTo(width - MARGIN.right, at);
    context.stroke();
    if (i % 2 === 0) {
      context.fillStyle = colour("--muted");
      context.fillText(i === 0 ? "0" : label(seconds), MARGIN.left - 6, at);
    }
  }
}

/** Of at most seven characters, which the margin has room for. */
function label(seconds) {
  return seconds < 1 ? `${Number((seconds * 1000).toPrecision(3))} ms` : `${Number(seconds.toPrecision(3))} s`;
}

/** Draft dark at the foot, verify in the middle, the rest light on top: told apart by lightness and place. */
function drawBar(context, step, x, y) {
  const { draft, verify, other } = parts(step);
  let foot = 0;
  for (const [seconds, name] of [[draft, "--draft"], [verify, "--verify"], [other, "--other"]]) {
    if (seconds <= 0) continue;
    const upper = y(foot + seconds);
    context.fillStyle = colour(name);
    context.fillRect(x, upper, BAR, Math.max(y(foot) - upper, 0.75));
    foot += seconds;
  }
}

/** `at` null: beyond the scale, drawn as a small triangle at its top. */
function drawDot(context, x, at) {
  context.beginPath();
  if (at === null) {
    context.moveTo(x - 3, MARGIN.top - 2);
    context.lineTo(x + 3, MARGIN.top - 2);
    context.lineTo(x, MARGIN.top - 7);
  } else {
    context.arc(x, at, 1.9, 0, 2 * Math.PI);
  }
  context.fill();
}

/** Seconds at the top: a round number above nearly all of what is shown. */
function scale(steps) {
  const values = steps.flatMap((step) => [total(step), ...step.itl]);
  const most = Math.max(quantile(values, 0.97) ?? 0, 1e-3) * 1.1;
  const power = 10 ** Math.floor(Math.log10(most));
  return power * NICE.find((nice) => nice * power >= most);
}

function total(step) {
  const { draft, verify, other } = parts(step);
  return draft + verify + other;
}

function summary(steps) {
  const middle = (pick) => ms(quantile(steps.map(pick), 0.5));
  const gaps = steps.flatMap((step) => step.itl);
  const itl = gaps.length ? `ITL ${ms(quantile(gaps, 0.5))}, p99 ${ms(quantile(gaps, 0.99))}` : "no ITL yet";
  return (
    `last ${counted(steps.length, "step")}, medians in ms: step ${middle(total)}, draft ${middle((s) => parts(s).draft)}, ` +
    `verify ${middle((s) => parts(s).verify)}, other ${middle((s) => parts(s).other)} · ${itl}`
  );
}

function describe(step) {
  const { draft, verify, other } = parts(step);
  const sum = (place) => step.seqs.reduce((all, sequence) => all + sequence[place], 0);
  return (
    `step ${whole(step.n)}: ${ms(total(step))} ms = draft ${ms(draft)} + verify ${ms(verify)} + other ${ms(other)} · ` +
    `${counted(step.seqs.length, "sequence")}, ${counted(sum(1), "token")}; ${sum(2)} drafted, ${sum(3)} accepted`
  );
}
