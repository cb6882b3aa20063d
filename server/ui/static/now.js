// The tiles: how the server stands now, with the last two minutes behind what changes fast.

import { setText, svg } from "./dom.js";
import { fixed, isNumber, ms, percent, whole } from "./format.js";

const POINTS = 60;
const WIDTH = 96;
const HEIGHT = 24;

export class Now {
  #store;
  #series = { running: [], waiting: [], tokens_per_s: [], kv_used: [] };
  #sampled = null; // when a point was added last, on the server's clock
  #seen = 0; // the last step that went into one

  constructor(store) {
    this.#store = store;
  }

  paint() {
    const { state } = this.#store;
    const { server } = state;
    const last = this.#store.last?.n > state.seq ? this.#store.last : null; // whichever is newer
    const kv = last ? last.kv : [state.now.kv.free, state.now.kv.used, state.now.kv.cached];
    const values = {
      running: last?.running ?? state.now.running,
      waiting: last?.waiting ?? state.now.waiting,
      tokens_per_s: state.now.tokens_per_s,
      kv_used: share(kv),
    };
    show("running", whole(values.running));
    show("max_running", `of ${whole(server.max_running)}`);
    show("waiting", whole(values.waiting));
    show("tokens_per_s", fixed(values.tokens_per_s, values.tokens_per_s < 10 ? 1 : 0));
    show("itl", ms(this.#store.medianItl));
    show("acceptance_length", fixed(state.now.acceptance_length, 2));
    show("expected_speedup", fixed(state.now.expected_speedup, 2));
    show("kv_used", percent(values.kv_used));
    show("kv_total", `${whole(kv[1])} of ${whole(server.num_blocks)}`);
    this.#sample(values, server.uptime_s);
  }

  #sample(values, time) {
    if (time === this.#sampled) return; // one point a state, so that the line is even in time
    this.#sampled = time;
    const newest = this.#store.last?.n ?? 0;
    const steps = newest < this.#seen ? [] : this.#store.steps.filter((step) => step.n > this.#seen); // started again
    this.#seen = newest;
    // The most of it between two points, or short requests would fall through.
    const peaks = { ...values };
    for (const step of steps) {
      peaks.running = Math.max(peaks.running, step.running);
      peaks.waiting = Math.max(peaks.waiting, step.waiting);
      peaks.kv_used = Math.max(peaks.kv_used, share(step.kv));
    }
    for (const [name, points] of Object.entries(this.#series)) {
      points.push(isNumber(peaks[name]) ? peaks[name] : 0);
      if (points.length > POINTS) points.shift();
      draw(document.querySelector(`[data-spark=${name}]`), points, name === "kv_used" ? 1 : null);
    }
  }
}

function share([free, used, cached]) {
  return used / Math.max(free + used + cached, 1);
}

function show(name, text) {
  setText(document.querySelector(`[data-now=${name}]`), text);
}

function draw(spark, points, top) {
  const most = Math.max(top ?? 0, ...points, 1e-9);
  const pitch = WIDTH / (POINTS - 1);
  const at = points.map((value, i) => [WIDTH - (points.length - 1 - i) * pitch, HEIGHT - 1 - (value / most) * (HEIGHT - 3)]);
  const line = at.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  spark.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  spark.setAttribute("preserveAspectRatio", "none");
  spark.replaceChildren(
    svg("polygon", { class: "spark-area", points: `${at[0][0].toFixed(1)},${HEIGHT} ${line} ${WIDTH},${HEIGHT}` }),
    svg("polyline", { class: "spark-line", points: line, "vector-effect": "non-scaling-stroke" }),
  );
}
