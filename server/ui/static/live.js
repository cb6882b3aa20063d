// Keeps the store up to date: the state every two seconds, the feed in between, again and again when it breaks.

import { ApiFailure } from "./client.js";

const STATE_MS = 2000;
const RETRY_MS = [500, 1000, 2000, 4000, 8000];

export class Live {
  #client;
  #store;
  #onStatus;
  #abort = null;
  #wanted = false;

  /** `onStatus(kind, text)`: kind is live, waiting, broken, key or idle. */
  constructor(client, store, onStatus) {
    this.#client = client;
    this.#store = store;
    this.#onStatus = onStatus;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#rest() : this.#wake()));
  }

  start() {
    this.#wanted = true;
    this.#wake();
  }

  stop() {
    this.#wanted = false;
    this.#rest();
  }

  #wake() {
    if (this.#abort || !this.#wanted || document.hidden) return;
    this.#abort = new AbortController();
    this.#run(this.#abort.signal);
  }

  /** A page that nobody sees costs the server nothing. */
  #rest() {
    this.#abort?.abort();
    this.#abort = null;
    if (this.#wanted) this.#onStatus("idle", "resting");
  }

  async #run(signal) {
    let failures = 0;
    while (!signal.aborted) {
      const round = new AbortController();
      const end = () => round.abort();
      signal.addEventListener("abort", end);
      try {
        this.#onStatus("waiting", failures ? "connecting again" : "connecting");
        await this.#follow(round.signal, () => (failures = 0));
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof ApiFailure && error.status === 401) {
          this.stop();
          this.#onStatus("key", "no valid key");
          return;
        }
        this.#onStatus("broken", said(error));
      } finally {
        round.abort();
        signal.removeEventListener("abort", end);
      }
      await pause(RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)], signal);
    }
  }

  /** Until the feed ends or either of the two fails. */
  async #follow(signal, onConnected) {
    const state = await this.#client.json("ui/state", { signal });
    if (this.#store.isAnotherStart(state)) this.#store.forget();
    this.#store.setState(state);
    // From what is shown on, so that nothing is missing; at the first time with what the server still has.
    const after = this.#store.last?.n ?? 0;
    await Promise.race([this.#readFeed(after, signal, onConnected), this.#poll(signal)]);
  }

  async #readFeed(after, signal, onConnected) {
    let first = true;
    for await (const { event, data } of this.#client.events(`ui/feed?after=${after}`, { signal })) {
      if (event === "steps") {
        onConnected();
        this.#onStatus("live", "live");
        this.#store.addSteps(data, first);
        first = false;
      } else if (event === "requests") this.#store.addRequests(data.requests);
      else if (event === "blocks") this.#store.setBlocks(data);
    }
  }

  async #poll(signal) {
    for (;;) {
      await pause(STATE_MS, signal);
      if (signal.aborted) return;
      this.#store.setState(await this.#client.json("ui/state", { signal }));
    }
  }
}

function said(error) {
  if (error instanceof ApiFailure) return error.status === 503 ? "busy, trying again" : error.message;
  return "no connection";
}

/** Ends early, and without an error, when `signal` is aborted. */
function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    if (signal.aborted) return resolve();
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, milliseconds);
    signal.addEventListener("abort", end);
  });
}
