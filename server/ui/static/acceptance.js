// Acceptance by position: a bar a place of the draft, against the share from which one more draft token pays.

import { setText, svg } from "./dom.js";
import { isNumber, percent } from "./format.js";

const MARGIN = { left: 34, right: 8, top: 16, bottom: 24 };

export class AcceptanceChart {
  #chart;
  #readout;
  #empty;

  constructor(chart, readout, empty) {
    this.#chart = chart;
    this.#readout = readout;
    this.#empty = empty;
  }

  /** `by_position` are shares of drafts whose first i tokens were accepted; `break_even` is null where not known. */
  paint({ by_position: shares, break_even: even }) {
    const width = this.#chart.parentElement.clientWidth;
    const height = width < 480 ? 170 : 200;
    this.#empty.hidden = shares.length > 0;
    this.#chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.#chart.setAttribute("height", height);
    const base = height - MARGIN.bottom;
    const y = (share) => base - Math.min(share, 1) * (base - MARGIN.top);
    const pitch = Math.max(width - MARGIN.left - MARGIN.right, 0) / Math.max(shares.length, 4);
    const drawn = [...grid(width, y)];
    shares.forEach((share, i) => drawn.push(...bar(share, even?.[i], i, pitch, y, shares.length)));
    if (even) drawn.push(...breakEven(even.slice(0, shares.length), pitch, y));
    this.#chart.replaceChildren(...drawn);
    this.#say(shares, even);
  }

  #say(shares, even) {
    const paying = shares.filter((share, i) => isNumber(even?.[i]) && share > even[i]).length;
    let text = "\u00a0";
    if (shares.length) {
      text = even ? `${paying} of ${shares.length} positions pay: the bar is above the line` : "break-even is not known: there is no cost model";
    }
    setText(this.#readout, text);
    const all = shares.map((share, i) => `${i + 1}: ${percent(share)}${isNumber(even?.[i]) ? `, pays from ${percent(even[i])}` : ""}`);
    const label = `Acceptance by position: ${all.join("; ") || "nothing drafted yet"}`;
    if (this.#chart.getAttribute("aria-label") !== label) this.#chart.setAttribute("aria-label", label);
  }
}

function grid(width, y) {
  return [0, 0.5, 1].flatMap((share) => [
    svg("line", { class: share ? "grid-line" : "grid-base", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(share), y2: y(share) }),
    svg("text", { class: "axis", x: MARGIN.left - 6, y: y(share) + 4, "text-anchor": "end", text: `${share * 100}%` }),
  ]);
}

function bar(share, even, i, pitch, y, count) {
  const wide = Math.min(pitch * 0.72, 44);
  const x = MARGIN.left + pitch * i + (pitch - wide) / 2;
  const middle = x + wide / 2;
  const pays = !isNumber(even) || share > even;
  const drawn = [
    svg("rect", { class: pays ? "bar" : "bar bar-idle", x, y: y(share), width: wide, height: Math.max(y(0) - y(share), 1), rx: 2 }),
  ];
  if (pitch >= 26) drawn.push(svg("text", { class: "value", x: middle, y: y(share) - 4, "text-anchor": "middle", text: `${Math.round(share * 100)}` }));
  const every = pitch >= 16 ? 1 : 4;
  if ((i + 1) % every === 0 || i === 0 || i === count - 1) {
    drawn.push(svg("text", { class: "axis", x: middle, y: y(0) + 16, "text-anchor": "middle", text: `${i + 1}` }));
  }
  return drawn;
}

/** A level across each position, since each has its own. */
function breakEven(even, pitch, y) {
  return even.flatMap((share, i) => {
    if (!isNumber(share)) return [];
    const x = MARGIN.left + pitch * i;
    return [svg("line", { class: "even", x1: x + 1, x2: x + pitch - 1, y1: y(share), y2: y(share) })];
  });
}
