// What the page asks the server: JSON and event streams, with the reader's API key if there is one.

const KEY = "truedraft-key";

export class ApiFailure extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Server-sent events out of pieces of text, however the network cut them. LF framing, as the server writes it. */
export class EventParser {
  #rest = "";

  /** The events that `text` completes: `{event, data}`, data as it was sent. */
  push(text) {
    this.#rest += text;
    const blocks = this.#rest.split("\n\n");
    this.#rest = blocks.pop();
    const events = [];
    for (const block of blocks) {
      let event = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      }
      if (data.length) events.push({ event, data: data.join("\n") });
    }
    return events;
  }
}

export class Client {
  #key = readKey();

  get hasKey() {
    return this.#key !== "";
  }

  useKey(key) {
    this.#key = key;
    try {
      sessionStorage.setItem(KEY, key);
    } catch {
      // storage is forbidden: the key lasts as long as the page
    }
  }

  forgetKey() {
    this.useKey("");
  }

  /** Throws ApiFailure. */
  async json(path, { signal } = {}) {
    return (await this.#ask(path, { signal })).json();
  }

  /** Events of a stream, parsed. Ends at `[DONE]` or with the connection. Throws ApiFailure. */
  async *events(path, { body, signal } = {}) {
    const response = await this.#ask(path, { body, signal });
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    const parser = new EventParser();
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        for (const { event, data } of parser.push(decoder.decode(value, { stream: true }))) {
          if (data === "[DONE]") return;
          yield { event, data: JSON.parse(data) };
        }
      }
    } finally {
      reader.cancel().catch(() => {}); // a reader that stops asking would keep the stream open
    }
  }

  async #ask(path, { body, signal }) {
    const headers = {};
    if (this.#key) headers.Authorization = `Bearer ${this.#key}`;
    if (body) headers["Content-Type"] = "application/json";
    const response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
    if (response.ok) return response;
    const { error } = await response.json().catch(() => ({}));
    throw new ApiFailure(response.status, error?.message ?? `the server answered ${response.status}`, error?.code);
  }
}

function readKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}
