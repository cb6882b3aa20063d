// What the page knows of the server: the newest steps, finished requests, the block map. Bounded like the server's own.

import { quantile } from "./format.js";

const MAX_STEPS = 600;
const MAX_REQUESTS = 50;
const MAX_SEQUENCES = 4096; // whose last step is remembered for the next gap
const LATER_START_SECONDS = 10; // more than an answer is late, or a clock is set

export class Store {
  state = null; // of /ui/state
  steps = []; // oldest first; each with `itl`, the gaps of its sequences in seconds
  requests = []; // newest first
  blocks = null; // one character a block
  dropped = 0;
  version = 0; // counts changes: a painter that has seen this one has nothing to do

  #lastTime = new Map(); // when a sequence got its last tokens
  #stateTime = 0; // when the state came, in milliseconds

  setState(state, now = Date.now()) {
    this.state = state;
    this.#stateTime = now;
    if (!this.requests.length) this.addRequests([...state.recent].reverse());
    this.version++;
  }

  /** `first`: of a feed that has just been opened; what was before it is not missing. */
  addSteps({ dropped, steps }, first = false) {
    if (!first) this.dropped += dropped;
    if (dropped) this.#lastTime.clear(); // a gap across steps that are missing is none
    for (const step of steps) {
      const itl = [];
      for (const [key, emitted] of step.seqs) {
        if (!emitted) continue;
        const before = this.#lastTime.get(key);
        if (before !== undefined) itl.push(step.t - before);
        this.#lastTime.delete(key); // so that the map's order is that of the last steps
        this.#lastTime.set(key, step.t);
      }
      this.steps.push({ ...step, itl });
    }
    while (this.#lastTime.size > MAX_SEQUENCES) this.#lastTime.delete(this.#lastTime.keys().next().value);
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
    if (steps.length) this.version++;
  }

  /** Oldest first, as they come. */
  addRequests(requests) {
    const known = new Set(this.requests.map(({ key, choice }) => `${key}/${choice}`));
    for (const request of requests) {
      if (!known.has(`${request.key}/${request.choice}`)) this.requests.unshift(request);
      this.#lastTime.delete(request.key);
    }
    this.requests.length = Math.min(this.requests.length, MAX_REQUESTS);
    this.version++;
  }

  setBlocks({ map, rle }) {
    this.blocks = rle ? unpack(map) : map;
    this.version++;
  }

  /** Whether `state` is of a server that was started after the one that is shown: `now` in milliseconds. */
  isAnotherStart(state, now = Date.now()) {
    if (!this.state) return false;
    if (state.seq < (this.last?.n ?? 0)) return true;
    return began(state, now) - began(this.state, this.#stateTime) > LATER_START_SECONDS;
  }

  /** Steps may have been numbered anew: the server was started again. */
  forget() {
    this.steps = [];
    this.requests = [];
    this.blocks = null;
    this.#lastTime.clear();
    this.version++;
  }

  get last() {
    return this.steps.at(-1) ?? null;
  }

  /** Median gap of the newest steps, in seconds; null without one. */
  get medianItl() {
    return quantile(this.steps.slice(-200).flatMap((step) => step.itl), 0.5);
  }
}

/** When the server of a state that came at `now` (milliseconds) was started, in seconds. */
function began(state, now) {
  return now / 1000 - state.server.uptime_s;
}

/** "12.3u1c" as "............uuuc". */
export function unpack(runs) {
  return runs.replace(/(\d+)(\D)/g, (_, count, state) => state.repeat(Number(count)));
}

/** Seconds of a step by what the timeline shows: drafting, verifying, all else. */
export function parts(step) {
  let other = 0;
  for (const [stage, seconds] of Object.entries(step.s)) {
    if (stage !== "draft" && stage !== "verify") other += seconds;
  }
  return { draft: step.s.draft ?? 0, verify: step.s.verify ?? 0, other };
}
