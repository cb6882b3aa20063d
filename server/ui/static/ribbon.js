// The token ribbon: an answer's tokens in the groups that steps emitted, each by where it came from.

import { element } from "./dom.js";
import { quoted, visible } from "./format.js";

const MARKS = { bonus: "+", recovered: "≠", plain: "·", rejected: "×", untold: "" };

/** Where emitted token `i` of a step came from: accepted, bonus, recovered or plain; untold, if the server says nothing. */
export function origin(step, i) {
  if (!step.drafted) return "untold";
  if (i < step.accepted) return "accepted";
  if (!step.drafted.length) return "plain";
  return step.accepted === step.drafted.length ? "bonus" : "recovered";
}

export class Ribbon {
  #box;
  #onChoose;
  #steps = [];
  #chosen = -1;
  #longest = 1; // draft that the colours have to tell apart

  /** `box` is a listbox, a step of the answer an option of it; `onChoose(step, number)` when one is pointed at. */
  constructor(box, onChoose) {
    this.#box = box;
    this.#onChoose = onChoose;
    box.addEventListener("keydown", (event) => this.#key(event));
    box.addEventListener("focus", () => this.#choose(this.#chosen < 0 ? 0 : this.#chosen));
    for (const type of ["pointerover", "click"]) {
      box.addEventListener(type, (event) => {
        const option = event.target.closest("[role=option]");
        if (option) this.#choose(Number(option.dataset.step));
      });
    }
  }

  clear(longest) {
    this.#steps = [];
    this.#chosen = -1;
    this.#longest = Math.max(longest, 1);
    this.#box.replaceChildren();
    this.#box.removeAttribute("aria-activedescendant");
  }

  add(steps) {
    const box = this.#box;
    const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
    for (const step of steps) {
      this.#box.append(this.#option(step, this.#steps.length));
      this.#steps.push(step);
    }
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  /** Marks the token where the two answers part. */
  mark(token) {
    this.#box.querySelectorAll(".token")[token]?.classList.add("differs");
  }

  #option(step, number) {
    const option = element("span", {
      role: "option",
      class: "step",
      id: `${this.#box.parentElement.id}-step-${number}`,
      "aria-selected": "false",
      "aria-label": spoken(step, number),
      "data-step": number,
    });
    step.texts.forEach((text, i) => {
      const kind = origin(step, i);
      const token = tokenOf(text, kind, i);
      if (kind === "accepted") token.style.setProperty("--depth", Math.min(i / Math.max(Math.min(this.#longest, 8) - 1, 1), 1));
      option.append(token);
      if (text.includes("\n")) option.append(element("br"));
    });
    return option;
  }

  #key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || !this.#steps.length) return;
    event.preventDefault();
    this.#choose(Math.max(0, Math.min(this.#steps.length - 1, this.#chosen + move)));
  }

  #choose(number) {
    const option = this.#box.querySelector(`[data-step="${number}"]`);
    if (!option) return;
    this.#box.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    option.setAttribute("aria-selected", "true");
    this.#box.setAttribute("aria-activedescendant", option.id);
    this.#chosen = number;
    if (document.activeElement === this.#box) option.scrollIntoView({ block: "nearest" });
    this.#onChoose(this.#steps[number], number);
  }
}

/** A step in full, for the line below the ribbons. */
export function detail(step, number) {
  const emitted = step.texts.map((text, i) => {
    const kind = origin(step, i);
    return element("li", {}, tokenOf(text, kind, i), element("small", { text: kind }));
  });
  const rejected = (step.rejected_texts ?? []).map((text) =>
    element("li", {}, tokenOf(text, "rejected", 0), element("small", { text: "rejected" })),
  );
  return [
    element("p", { class: "detail-head", text: headline(step, number) }),
    element("ul", { class: "detail-tokens" }, ...emitted, ...rejected),
  ];
}

/** Marked by its kind, an accepted draft by its place. */
function tokenOf(text, kind, i) {
  const untold = kind === "untold"; // its text may stand with the first of its chunk
  const title = text === "" && !untold && "no text of its own: a part of a character, or a special token";
  const shown = untold && text === "" ? "" : visible(text);
  return element("span", { class: `token ${kind}`, text: shown, title, "data-mark": MARKS[kind] ?? i + 1 });
}

function headline(step, number) {
  if (!step.drafted) return `Step ${number + 1}`;
  const drafted = step.drafted.length;
  if (!drafted) return `Step ${number + 1}: nothing drafted`;
  return `Step ${number + 1}: ${step.drafter || "drafter"} drafted ${drafted}, ${Math.min(step.accepted, drafted)} accepted`;
}

function spoken(step, number) {
  const emitted = step.texts.map((text, i) => `${quoted(text)} ${origin(step, i)}`);
  const rejected = (step.rejected_texts ?? []).map((text) => `${quoted(text)} rejected`);
  return `${headline(step, number)}. ${[...emitted, ...rejected].join(", ")}`;
}
