// The page: who is asked, what is shown, when it is painted.

import { AcceptanceChart } from "./acceptance.js";
import { Batch } from "./batch.js";
import { BlockMap } from "./blocks.js";
import { Client } from "./client.js";
import { byId, reducedMotion, setText } from "./dom.js";
import { duration } from "./format.js";
import { Live } from "./live.js";
import { Now } from "./now.js";
import { Playground } from "./playground.js";
import { RecentTable } from "./recent.js";
import { Store } from "./store.js";
import { Timeline } from "./timeline.js";

const PAINT_MS = 100;
const CALM_MS = 1000; // for who wants less motion
const STALE = -1; // whatever is shown has to be painted again

const client = new Client();
const store = new Store();
const live = new Live(client, store, showStatus);
const playground = new Playground(client, () => askForKey("The server did not take this key."));
const now = new Now(store);
const timeline = new Timeline(byId("timeline-canvas"), byId("timeline-readout"), byId("timeline-empty"), store);
const acceptance = new AcceptanceChart(byId("acceptance-chart"), byId("acceptance-readout"), byId("acceptance-empty"));
const batch = new Batch(byId("batch-canvas"), byId("batch-readout"), byId("batch-empty"));
const blocks = new BlockMap(byId("kv-canvas"), byId("kv-readout"), byId("kv-empty"));
const recent = new RecentTable(byId("recent-head"), byId("recent-rows"), byId("recent-empty"));

let paused = false;
let painted = STALE; // the version of the store that is shown
let lastPaint = 0;

function loop(time) {
  requestAnimationFrame(loop);
  const due = store.version !== painted && time - lastPaint >= (reducedMotion.matches ? CALM_MS : PAINT_MS);
  if (!due && painted !== STALE) return;
  lastPaint = time;
  paint();
}

function paint() {
  painted = store.version;
  if (!byId("timeline").clientWidth) return; // not laid out yet, and observed until it is
  timeline.paint();
  batch.paint(store.last);
  const { state } = store;
  if (!state) return;
  const { server } = state;
  identify(server);
  playground.know(server);
  now.paint();
  acceptance.paint(state.acceptance);
  blocks.paint(store.blocks, store.last ? store.last.kv[4] : state.now.kv.fragmentation, server.block_size);
  recent.paint(store.requests, server.uptime_s);
}

function identify(server) {
  const show = (name, text) => setText(document.querySelector(`[data-id=${name}]`), text);
  show("model", server.model);
  show("level", server.level);
  document.querySelector("[data-id=level]").dataset.level = server.level;
  show("fingerprint", server.fingerprint);
  show("version", server.version);
  show("uptime", duration(server.uptime_s));
  document.title = `${server.model} · Truedraft`;
}

function showStatus(kind, text) {
  const link = byId("link");
  link.dataset.state = kind;
  const unready = kind === "live" ? store.state?.server.unready : null;
  if (unready) link.dataset.state = "broken";
  setText(link, unready || (kind === "live" && store.dropped ? `live, ${store.dropped} steps not shown` : text));
  if (kind === "key") askForKey(client.hasKey ? "The server did not take this key." : "");
}

function askForKey(problem) {
  live.stop();
  client.forgetKey();
  byId("key-card").hidden = false;
  setText(byId("key-problem"), problem);
  byId("key").value = "";
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    setText(byId("key-problem"), "A key has printable ASCII characters only, and no spaces.");
    return;
  }
  client.useKey(key);
  byId("key-card").hidden = true;
  setText(byId("key-problem"), "");
  byId("prompt").focus();
  if (!paused) live.start();
});

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Go on" : "Pause");
  if (!paused) live.start();
  else {
    live.stop(); // and not only the painting: the server has nothing to send to who does not look
    showStatus("idle", "paused");
  }
});

const repaint = () => (painted = STALE);
document.addEventListener("themechange", repaint);
const sizes = new ResizeObserver(repaint);
for (const chart of document.querySelectorAll(".chart")) sizes.observe(chart);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

// A server with keys is not even asked before there is one.
if (document.documentElement.dataset.keys === "yes" && !client.hasKey) showStatus("key", "waits for a key");
else live.start();
requestAnimationFrame(loop);
