// One of the two runs of a prompt: what has come so far, and its side of the page.

import { element } from "./dom.js";
import { fixed, isNumber, whole } from "./format.js";
import { Ribbon } from "./ribbon.js";

export class Lane {
  ids = [];
  texts = []; // of each token
  chunks = []; // {at, steps}: seconds from the start, to replay
  metrics = null; // the server's own, once it has ended
  finish = null;
  elapsed = 0; // seconds until the last chunk, seen from here
  ribbon;

  #box;
  #facts;
  #bar;
  #limit = 1;

  constructor(box, onChoose) {
    this.#box = box;
    this.#facts = box.querySelector(".facts");
    this.#bar = box.querySelector(".race-bar");
    this.ribbon = new Ribbon(box.querySelector(".ribbon"), onChoose);
  }

  reset(limit, longest) {
    this.ids = [];
    this.texts = [];
    this.chunks = [];
    this.metrics = null;
    this.finish = null;
    this.elapsed = 0;
    this.#limit = limit;
    this.ribbon.clear(longest);
    this.#box.dataset.state = "waiting";
    this.progress(0);
    this.#tell();
  }

  /** A chunk of the stream, `at` seconds after the request. */
  take(chunk, at) {
    if (chunk.metrics) this.metrics = chunk.metrics;
    for (const choice of chunk.choices) {
      const steps = choice.speculation?.steps ?? untraced(choice);
      this.ids.push(...(choice.token_ids ?? []));
      for (const step of steps) this.texts.push(...step.texts);
      this.finish = choice.finish_reason ?? this.finish;
      this.elapsed = at;
      this.chunks.push({ at, steps });
      this.ribbon.add(steps);
      this.progress(this.ids.length / this.#limit);
    }
    this.#box.dataset.state = "running";
    this.#tell();
  }

  end() {
    this.#box.dataset.state = "done";
    this.#tell();
  }

  progress(share) {
    this.#bar.style.setProperty("--share", Math.min(share, 1));
  }

  get steps() {
    return this.chunks.flatMap((chunk) => chunk.steps);
  }

  /** Seconds of the whole answer: the server's figure, or what was seen from here. */
  get seconds() {
    const known = this.metrics?.generation_time_ms;
    return isNumber(known) ? known / 1000 : this.elapsed;
  }

  #tell() {
    const { metrics, steps } = this;
    const speculation = metrics?.speculative_decoding;
    const rate = metrics?.tokens_per_second ?? (this.elapsed ? this.ids.length / this.elapsed : null);
    const facts = [
      ["tokens", whole(this.ids.length)],
      ["steps", whole(steps.length)],
      ["tokens / s", fixed(rate, 1)],
      ["TTFT", isNumber(metrics?.time_to_first_token_ms) ? `${fixed(metrics.time_to_first_token_ms, 0)} ms` : "–"],
      ["whole answer", this.elapsed ? `${fixed(this.seconds, 2)} s` : "–"],
    ];
    if (speculation) {
      facts.push(["accepted", `${speculation.num_accepted_draft_tokens} of ${speculation.num_draft_tokens}`]);
      facts.push(["acceptance length", fixed(speculation.mean_acceptance_length, 2)]);
    }
    this.#facts.replaceChildren(
      ...facts.map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: value }))),
    );
  }
}

/** What is known of the step of a chunk where the server does not say more: its tokens, the text with the first. */
function untraced({ token_ids: ids, text }) {
  if (!ids?.length) return [];
  return [{ drafted: null, emitted: ids, texts: ids.map((_, i) => (i ? "" : text)) }];
}
