"""Peers as processes, with small programs in their place: one over HTTP, one as a driver."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.peers.processes import Process, Server, start
from bench.peers.rounds import TokenPrompt
from bench.peers.ways import PORT, Launch
from bench.serving.niced import ClientThread
from bench.serving.options import Mode
from server.commands import CommandError

PROMPTS = [TokenPrompt("a", "one two", (1, 2)), TokenPrompt("b", "three", (3,))]
OFF = Mode("off")

# A completion of as many words as it is asked for, in chunks, each its prompt's last word; every request in the log.
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *words):
        pass

    def answer(self, status, text, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        known = {"/health": "{}", "/v1/models": '{"data": [{"id": "m"}]}'}
        self.answer(200 if self.path in known else 404, known.get(self.path, "{}"))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(json.dumps(body), flush=True)
        words, count = body["prompt"].split(), body["max_tokens"]
        events = [{"choices": [{"text": " " + words[-1], "finish_reason": None}]}] * count
        events += [{"choices": [{"text": "", "finish_reason": "length"}]}]
        events += [{"choices": [], "usage": {"prompt_tokens": len(words), "completion_tokens": count}}]
        lines = "".join(f"data: {json.dumps(event)}\\n\\n" for event in events)
        self.answer(200, lines + "data: [DONE]\\n\\n", "text/event-stream")

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

# Answers each prompt with its own tokens, again and again.
DRIVER = """
import itertools, json, sys, time
settings = json.loads(input())
print("a library's words", file=sys.stderr, flush=True)
print(json.dumps({"ready": True, "versions": {"driver": "1"}} if not settings.get("broken")
      else {"error": "no such weights"}), flush=True)
for line in sys.stdin:
    load = json.loads(line)
    started = time.perf_counter()
    traces = []
    for prompt in load["prompts"]:
        ids = list(itertools.islice(itertools.cycle(prompt), load["tokens"]))
        traces.append({"sent": started, "chunks": [[time.perf_counter(), [i]] for i in ids]})
    print(json.dumps({"started": started, "traces": traces}), flush=True)
"""


@pytest.fixture(scope="module")
def thread() -> Iterator[ClientThread]:
    with ClientThread(0) as made:
        yield made


def launch_of(tmp_path: Path, program: str, *arguments: str, settings: str = "") -> Launch:
    path = tmp_path / "program.py"
    path.write_text(program, "utf-8")
    return Launch((sys.executable, "-u", str(path), *arguments), (("GIVEN", "1"),), settings)


def state(process: Process) -> str:
    """R, S, T (stopped), ... as Linux names it."""
    return Path(f"/proc/{process.popen.pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]


def driven(tmp_path: Path, thread: ClientThread, settings: str = "{}") -> Server:
    return start("peer, off", launch_of(tmp_path, DRIVER, settings=settings), tmp_path / "log", thread)


def test_a_driver_gives_traces_as_http_does(tmp_path: Path, thread: ClientThread) -> None:
    server = driven(tmp_path, thread)
    try:
        found = server.load(PROMPTS, 3, 2, OFF, "salt")
    finally:
        server.process.end()
    assert [trace.token_ids for trace in found.traces] == [[1, 2, 1], [3, 3, 3]]
    assert [(trace.ok, trace.num_tokens, trace.num_prompt_tokens) for trace in found.traces] == [
        (True, 3, 2),
        (True, 3, 1),
    ]
    assert all(trace.ttft is not None and 0 <= trace.ttft <= found.duration for trace in found.traces)
    assert "a library's words" in server.process.log.read_text("utf-8")


def test_a_driver_that_cannot_start_says_why(tmp_path: Path, thread: ClientThread) -> None:
    with pytest.raises(CommandError, match="no such weights"):
        driven(tmp_path, thread, '{"broken": true}')


def test_a_driver_that_dies_under_load_is_told_and_not_waited_for(tmp_path: Path, thread: ClientThread) -> None:
    server = driven(tmp_path, thread)
    server.process.popen.kill()
    with pytest.raises(CommandError, match="it has ended"):
        server.load(PROMPTS, 3, 2, OFF, "salt")
    server.process.end()


def test_a_server_over_http_gets_all_prompts_with_the_length_that_is_asked_for(
    tmp_path: Path, thread: ClientThread
) -> None:
    server = start("peer, off", launch_of(tmp_path, SERVER, PORT), tmp_path / "log", thread)
    try:
        found = server.load(PROMPTS, 3, 2, OFF, "salt")
    finally:
        server.process.end()
    assert [trace.text for trace in found.traces] == [" two two two", " three three three"]
    assert [(trace.num_tokens, trace.num_prompt_tokens) for trace in found.traces] == [(3, 2), (3, 1)]
    sent = server.process.log.read_text("utf-8")
    assert sent.count('"ignore_eos": true') == 2
    assert '"speculation"' not in sent  # a stranger is told nothing that only ours know


def test_a_server_that_ends_at_its_start_is_told_with_its_last_words(tmp_path: Path, thread: ClientThread) -> None:
    with pytest.raises(CommandError, match="no memory"):
        start("peer, off", launch_of(tmp_path, "raise SystemExit('no memory')"), tmp_path / "log", thread)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_peer_sleeps_wakes_and_ends_also_in_its_sleep(tmp_path: Path, thread: ClientThread) -> None:
    server = driven(tmp_path, thread)
    process = server.process
    process.sleep()
    assert state(process) == "T"
    process.wake()
    assert server.load(PROMPTS, 1, 1, OFF, "salt").traces[0].ok
    process.sleep()
    process.end()
    assert process.popen.poll() is not None
