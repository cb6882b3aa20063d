// The table of finished requests: numbers only, as the server tells no more.

import { element } from "./dom.js";
import { duration, fixed, ms, whole } from "./format.js";

// Heading, what it means, the cell's text, and whether it is a number.
const COLUMNS = [
  ["request", "an opaque number", (r) => (r.choice ? `${r.key}·${r.choice}` : `${r.key}`), true],
  ["ended", "when, ago", (r, now) => (now === null ? "–" : duration(Math.max(0, now - r.t))), true],
  ["reason", "how it ended", (r) => r.finish_reason, false],
  ["prompt", "prompt tokens", (r) => whole(r.prompt_tokens), true],
  ["cached", "prompt tokens out of the prefix cache", (r) => whole(r.cached_tokens), true],
  ["output", "output tokens", (r) => whole(r.output_tokens), true],
  ["queue ms", "time in the queue", (r) => ms(r.queue_s), true],
  ["TTFT ms", "time to the first token", (r) => ms(r.ttft_s), true],
  ["TPOT ms", "time per output token", (r) => ms(r.tpot_s), true],
  ["E2E ms", "end to end", (r) => ms(r.e2e_s), true],
  ["acc. length", "acceptance length: 1 + accepted / drafts", (r) => fixed(r.acceptance_length, 2), true],
  ["accepted", "accepted / drafted tokens", (r) => (r.drafted ? `${r.accepted}/${r.drafted}` : "–"), true],
];

export class RecentTable {
  #rows;
  #empty;
  #painted = null;

  constructor(head, rows, empty) {
    this.#rows = rows;
    this.#empty = empty;
    for (const [name, title, , number] of COLUMNS) {
      head.append(element("th", { scope: "col", class: number && "number", title, text: name }));
    }
  }

  /** `requests` newest first; `now` on the clock of their `t`, or null. */
  paint(requests, now) {
    this.#empty.hidden = requests.length > 0;
    const rows = requests.map((request) => COLUMNS.map(([, , text]) => text(request, now)));
    const key = JSON.stringify(rows);
    if (key === this.#painted) return;
    this.#painted = key;
    this.#rows.replaceChildren(
      ...rows.map((cells, i) =>
        element(
          "tr",
          { class: `ended-${requests[i].finish_reason}` },
          ...cells.map((text, j) => element("td", { class: COLUMNS[j][3] && "number", text })),
        ),
      ),
    );
  }
}
