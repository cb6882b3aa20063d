// Runs a prompt without and with speculation, one after the other, and shows that and how fast they are the same.

import { ApiFailure } from "./client.js";
import { byId, element, setText } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { quoted } from "./format.js";
import { Lane } from "./lane.js";
import { detail } from "./ribbon.js";

export class Playground {
  #client;
  #onUnauthorized;
  #server = null;
  #off = new Lane(byId("lane-off"), (step, number) => this.#show(step, number));
  #on = new Lane(byId("lane-on"), (step, number) => this.#show(step, number));
  #hint = byId("step-detail").firstElementChild;
  #abort = null; // of the run that goes on
  #replaying = 0; // the frame that is asked for

  constructor(client, onUnauthorized) {
    this.#client = client;
    this.#onUnauthorized = onUnauthorized;
    const example = byId("example");
    EXAMPLES.forEach(({ name }, i) => example.append(element("option", { value: i, text: name })));
    byId("prompt").value = EXAMPLES[0].prompt;
    example.addEventListener("change", () => (byId("prompt").value = EXAMPLES[Number(example.value)].prompt));
    byId("run-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run();
    });
    byId("run-form").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("run-form").requestSubmit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#abort?.abort();
    });
    byId("stop").addEventListener("click", () => this.#abort?.abort());
    byId("replay").addEventListener("click", () => this.#replay());
  }

  /** What the state says of the server: its model, drafters and limits. */
  know(server) {
    const first = this.#server === null;
    this.#server = server;
    if (!first) return;
    byId("run").setAttribute("aria-disabled", "false");
    const drafter = byId("drafter");
    const known = server.num_speculative_tokens > 0;
    drafter.replaceChildren(element("option", { value: "", text: "the server's" }));
    for (const name of server.drafters) drafter.append(element("option", { value: name, text: name }));
    drafter.disabled = !known;
    byId("drafts").disabled = !known;
    if (known) byId("drafts").max = server.num_speculative_tokens;
    else setText(byId("run-problem"), "Speculation is off on this server: both runs decode plainly.");
    if (known && !server.trace) setText(byId("run-problem"), "This server does not tell where tokens come from: they are shown without it.");
  }

  async #run() {
    if (this.#abort || !this.#server) return;
    cancelAnimationFrame(this.#replaying);
    const { off, on } = this.#bodies();
    this.#abort = new AbortController();
    this.#setRunning(true);
    try {
      await this.#stream(this.#off, off);
      await this.#stream(this.#on, on);
      this.#conclude(off.seed);
    } catch (error) {
      this.#fail(error);
    } finally {
      this.#abort = null;
      this.#setRunning(false);
    }
  }

  #bodies() {
    const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
    const base = {
      model: this.#server.model,
      prompt: byId("prompt").value,
      max_tokens: number("max-tokens"),
      temperature: number("temperature"),
      seed: number("seed") ?? randomSeed(),
      stream: true,
      stream_options: { include_usage: true },
      return_token_ids: true,
    };
    const trace = this.#server.trace;
    const wanted = { trace };
    if (byId("drafter").value) wanted.drafter = byId("drafter").value;
    if (number("drafts") !== null) wanted.num_speculative_tokens = number("drafts");
    // A salt for each run: the second may find neither blocks nor past outputs of the first.
    return {
      off: { ...base, cache_salt: salt(), speculation: { num_speculative_tokens: 0, trace } },
      on: { ...base, cache_salt: salt(), speculation: wanted },
    };
  }

  async #stream(lane, body) {
    const { signal } = this.#abort;
    const began = performance.now();
    for await (const { data } of this.#client.events("v1/completions", { body, signal })) {
      if (data.error) throw new ApiFailure(200, data.error.message, data.error.code);
      lane.take(data, (performance.now() - began) / 1000);
    }
    signal.throwIfAborted();
    lane.end();
  }

  #setRunning(running) {
    byId("run").setAttribute("aria-disabled", String(running)); // and not disabled, which would lose the focus
    byId("stop").hidden = !running;
    byId("outcome").setAttribute("aria-busy", String(running));
    if (!running) return;
    byId("outcome").hidden = false;
    byId("replay").hidden = true;
    setText(byId("run-problem"), "");
    setText(byId("speedup"), "–");
    setText(byId("announce"), "Running without speculation, then with it.");
    this.#verdict("", "running: first without speculation, then with it");
    const limit = Number(byId("max-tokens").value);
    for (const lane of [this.#off, this.#on]) lane.reset(limit, this.#server.num_speculative_tokens);
    byId("step-detail").replaceChildren(this.#hint);
  }

  #conclude(seed) {
    const [off, on] = [this.#off, this.#on];
    const factor = off.seconds / on.seconds;
    setText(byId("speedup"), `${factor.toFixed(2)}×`);
    const slowest = Math.max(off.seconds, on.seconds);
    for (const lane of [off, on]) lane.progress(lane.seconds / slowest);
    const at = firstDifference(off.ids, on.ids);
    const withSeed = `seed ${seed}`;
    if (at === null) this.#verdict("yes", `No difference: all ${off.ids.length} tokens are identical (${withSeed}).`);
    else {
      this.#verdict("no", this.#differs(at, withSeed));
      for (const lane of [off, on]) lane.ribbon.mark(at);
    }
    byId("replay").hidden = false;
    setText(byId("announce"), `Done. ${byId("difference").textContent} Speed-up ${factor.toFixed(2)} times.`);
  }

  #differs(at, withSeed) {
    const said = (lane) => (at < lane.texts.length ? quoted(lane.texts[at]) : "nothing");
    const promise = this.#server.level === "L0" ? "This must not happen: please report it." : `The server promises ${this.#server.level} here.`;
    return `Different from token ${at + 1} on: ${said(this.#off)} without, ${said(this.#on)} with speculation (${withSeed}). ${promise}`;
  }

  #verdict(equal, text) {
    byId("difference").dataset.equal = equal;
    setText(byId("difference"), text);
  }

  #fail(error) {
    const stopped = error.name === "AbortError";
    this.#verdict("", stopped ? "stopped" : "failed");
    setText(byId("announce"), stopped ? "Stopped." : "");
    if (stopped) return;
    if (error instanceof ApiFailure && error.status === 401) this.#onUnauthorized();
    else setText(byId("run-problem"), error instanceof ApiFailure ? error.message : "The server could not be reached.");
  }

  /** Both runs again at the speed at which they came, at the same time. */
  #replay() {
    cancelAnimationFrame(this.#replaying);
    const lanes = [this.#off, this.#on].map((lane) => ({ lane, next: 0 }));
    for (const { lane } of lanes) {
      lane.ribbon.clear(this.#server.num_speculative_tokens);
      lane.progress(0);
    }
    const slowest = Math.max(this.#off.elapsed, this.#on.elapsed);
    const began = performance.now();
    const frame = (now) => {
      const at = (now - began) / 1000;
      for (const each of lanes) {
        const { lane } = each;
        while (each.next < lane.chunks.length && lane.chunks[each.next].at <= at) {
          lane.ribbon.add(lane.chunks[each.next++].steps);
        }
        lane.progress(Math.min(at, lane.elapsed) / slowest);
      }
      if (at < slowest) this.#replaying = requestAnimationFrame(frame);
    };
    this.#replaying = requestAnimationFrame(frame);
  }

  #show(step, number) {
    byId("step-detail").replaceChildren(...detail(step, number));
  }
}

/** The first place where they differ, or null if they are the same. */
export function firstDifference(a, b) {
  const longest = Math.max(a.length, b.length);
  for (let i = 0; i < longest; i++) if (a[i] !== b[i]) return i;
  return null;
}

function randomSeed() {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return (high % 2 ** 21) * 2 ** 32 + low; // 53 bits, all that a number holds
}

function salt() {
  // randomUUID is missing where a page is served without TLS from another machine.
  return [...crypto.getRandomValues(new Uint32Array(4))].map((word) => word.toString(16).padStart(8, "0")).join("");
}
