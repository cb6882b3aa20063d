"""A small server of OpenAI's API that is not ours: it answers ids of its own choice, refuses, fails, cuts or dies."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INFO = {
    "model": {"name": "stranger", "served_names": ["stranger"], "dtype": "float32"},
    "exactness": {"level": "L0", "detail": "every check passed"},
    "speculation": {"num_speculative_tokens": 8, "drafters": [{"name": "ngram"}]},
    "settings": {},
}


def honest(body: Mapping[str, Any]) -> list[int]:
    """The prompt decides, and nothing else."""
    start = sum(map(ord, str(body.get("prompt") or body.get("messages"))))
    return [(start + 7 * i) % 1000 for i in range(body["max_tokens"])]


def wrong(body: Mapping[str, Any]) -> list[int]:
    """With four drafts its last token is another."""
    ids = honest(body)
    return [*ids[:-1], ids[-1] + 1] if body.get("speculation", {}).get("num_speculative_tokens") == 4 else ids


@dataclass
class Stranger:
    """``ids`` of a request; ``status`` and ``cut`` say by the number of the completion, from 0, what becomes of it;
    ``chunk`` tokens are in a chunk. ``seen`` are the bodies. ``arrived`` is called with each number."""

    ids: Callable[[Mapping[str, Any]], list[int]] = honest
    claims_ours: bool = False
    sends_ids: bool = True
    refuses: frozenset[str] = frozenset()
    metrics: str | None = None
    status: Callable[[int], int] = lambda number: 200
    cut: Callable[[int], bool] = lambda number: False
    chunk: int = 2
    arrived: Callable[[int], None] = lambda number: None
    dies_at: int | None = None  # number of the completion from which on nobody is answered
    seen: list[dict[str, Any]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """On a free port, from threads; yields the base URL."""
        stranger = self

        class Handler(_Handler):
            server_of = stranger

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self._server = server
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            self.die()
            thread.join()

    def die(self) -> None:
        """Take no connection any more; twice is once."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_of: Stranger
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # whole answers and whole pieces: no small packets that wait for each other

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        stranger = self.server_of
        if self.path == "/v1/models":
            self._whole(200, json.dumps({"data": [{"id": "stranger"}]}))
        elif self.path == "/v1/server_info" and stranger.claims_ours:
            self._whole(200, json.dumps(INFO))
        elif self.path == "/metrics" and stranger.metrics is not None:
            self._whole(200, stranger.metrics)
        else:
            self._whole(404, "{}")

    def do_POST(self) -> None:
        stranger = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        unknown = stranger.refuses & set(body)
        if unknown:
            self._whole(400, json.dumps({"error": {"message": f"unknown field {min(unknown)}"}}))
            return
        stranger.seen.append(body)
        number = next(stranger._numbers)
        stranger.arrived(number)
        if stranger.dies_at is not None and number >= stranger.dies_at:
            self.close_connection = True
            threading.Thread(target=stranger.die).start()
            return
        status = stranger.status(number)
        if status != 200:
            self._whole(status, json.dumps({"error": {"message": f"said {status}"}}))
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        ids = stranger.ids(body)
        for first in range(0, len(ids), stranger.chunk):
            if first and stranger.cut(number):
                self.close_connection = True
                return
            some = ids[first : first + stranger.chunk]
            choice: dict[str, Any] = {"index": 0, "text": "".join(f"<{i}>" for i in some), "finish_reason": None}
            if stranger.sends_ids and body.get("return_token_ids"):
                choice["token_ids"] = some
            self._event({"choices": [choice]})
        self._event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(ids)}})
        self._piece(b"data: [DONE]\n\n")
        self._piece(b"")

    def _event(self, event: Mapping[str, Any]) -> None:
        self._piece(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _piece(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _whole(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()
