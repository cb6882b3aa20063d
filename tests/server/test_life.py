"""How a real server process ends: exit code, what it says, what clients see, and that no process is left."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.builders import MODEL_NAME
from tests.server.chat_builders import HELLO, save_chat_model
from tests.server.test_cli import environment, processes_with  # noqa: F401 - a fixture
from tests.server.test_disconnect import wait_for

LONG = {"model": MODEL_NAME, "prompt": "the quick", "max_tokens": 400, "ignore_eos": True}


@dataclass
class Process:
    """A server process that fails on command, and the lines that it has written to stderr."""

    popen: subprocess.Popen[str]
    base: str
    lines: list[str]
    mark: str

    def arm(self, **fault: Any) -> None:
        assert httpx.post(f"{self.base}/faults", json=fault).status_code == 200

    def wait_hanging(self) -> None:
        """Until a fault holds a thread; not for one that holds the event loop."""
        wait_for(
            lambda: any(fault["hanging"] for fault in httpx.get(f"{self.base}/faults").json()["faults"]), "none hangs"
        )

    def end(self, reader: threading.Thread) -> None:
        self.popen.kill()
        self.popen.wait(30)
        reader.join(10)

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    @property
    def descendants(self) -> list[str]:
        """Command lines of its processes that run, itself among them."""
        return processes_with(f"TEST_MARK={self.mark}")


@contextlib.contextmanager
def failing_process(model: Path, monkeypatch: pytest.MonkeyPatch, *flags: object) -> Iterator[Process]:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("TEST_MARK", mark)
    arguments = [
        "serve", "--model", model, "--served-model-name", MODEL_NAME, "--port", 0, "--executor", "generic",
        "--num-blocks", 64, "--num-threads", 1, "--max-num-batched-tokens", 128, *flags,
    ]  # fmt: skip
    command = [sys.executable, "-m", "bench.faults", *map(str, arguments)]
    popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    started = threading.Event()

    def read() -> None:
        for line in popen.stderr or ():
            lines.append(line.rstrip("\n"))
            if "on http://" in line:
                started.set()
        started.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    process = Process(popen, "", lines, mark)
    try:
        assert started.wait(240)
        (ready,) = [line for line in lines if "on http://" in line]
        process.base = ready.rsplit(" on ", 1)[1]
        yield process
    finally:
        process.end(reader)
        assert popen.stderr is not None
        popen.stderr.close()


@pytest.fixture(scope="module")
def chat_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tiny_model, tmp_path_factory.mktemp("life") / "model")


def wait_for_exit(process: Process) -> int:
    code = process.popen.wait(240)
    wait_for(lambda: not process.descendants, "a process is left")
    return code


@pytest.mark.usefixtures("environment")
def test_a_step_that_does_not_end_fails_everybody_clearly_and_the_process_exits(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_process(chat_model, monkeypatch, "--stall-timeout", 4) as process:
        with httpx.Client(base_url=process.base, timeout=60) as client, httpx.Client(base_url=process.base) as other:
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                pieces = response.iter_raw()
                received = next(pieces)
                other.post("/faults", json={"point": "verify", "action": "hang"})
                process.wait_hanging()
                wait_for(lambda: other.get("/health").status_code == 503, "it is ready all the same")
                assert other.get("/live").status_code == 503
                received += b"".join(pieces)
            refused = other.post("/v1/completions", json=LONG)
        assert received.endswith(b"\n\ndata: [DONE]\n\n")
        assert b'"message":"no step has ended for 4 seconds"' in received
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
        assert wait_for_exit(process) == 1
        assert "truedraft: no step has ended for 4 seconds; the threads are:" in process.lines
        assert "bench/faults/faults.py" in process.said  # where the model thread stands


@pytest.mark.usefixtures("environment")
def test_an_event_loop_that_stands_still_is_seen_from_outside_and_the_process_exits(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_process(chat_model, monkeypatch, "--stall-timeout", 4) as process:
        process.arm(point="detokenize", action="hang")
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{process.base}/v1/completions", json=LONG, timeout=60)
        assert wait_for_exit(process) == 1
        assert "truedraft: the event loop has not gone round for 4 seconds; the threads are:" in process.lines
        assert "bench/faults/faults.py" in process.said


@pytest.mark.usefixtures("environment")
def test_a_call_that_never_lets_go_of_the_interpreter_is_ended_by_the_runtimes_own_timer(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_process(chat_model, monkeypatch, "--stall-timeout", 2) as process:
        process.arm(point="verify", action="seize")
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{process.base}/v1/completions", json=LONG, timeout=60)
        assert wait_for_exit(process) == 1
        assert "bench/faults/faults.py" in process.said


@pytest.mark.usefixtures("environment")
def test_a_second_signal_ends_the_process_at_once_even_if_its_event_loop_stands_still(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_process(chat_model, monkeypatch) as process:
        process.arm(point="detokenize", action="hang")
        client = threading.Thread(target=lambda: post_quietly(process.base))
        client.start()
        time.sleep(0.5)  # it need not hang yet: a running request holds the end up, too
        process.popen.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.popen.wait(0.5)
        process.popen.send_signal(signal.SIGTERM)
        assert wait_for_exit(process) == 1
        assert "truedraft: ending at once" in process.lines
        client.join(60)


def post_quietly(base: str) -> None:
    with contextlib.suppress(httpx.TransportError):
        httpx.post(f"{base}/v1/completions", json=LONG, timeout=60)


@pytest.mark.usefixtures("environment")
def test_an_engine_whose_state_is_unknown_fails_everybody_and_the_process_exits(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_process(chat_model, monkeypatch) as process:
        process.arm(point="allocate", after=5)
        failed = httpx.post(f"{process.base}/v1/completions", json=LONG, timeout=60)
        assert failed.status_code == 500
        assert httpx.get(f"{process.base}/health").status_code == 503
        assert wait_for_exit(process) == 1
        assert "truedraft: the engine failed: the engine failed (InjectedFault)" in process.lines


@pytest.mark.usefixtures("environment")
def test_a_signal_under_load_lets_all_finish_refuses_the_new_and_leaves_no_process(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_process(chat_model, monkeypatch, "--max-num-seqs", 4) as process:
        bodies = [{**LONG, "max_tokens": 100, "seed": i} for i in range(8)]
        bodies.append({**LONG, "max_tokens": 10, "ignore_eos": False, "structured_outputs": {"regex": "[ab]{5}"}})
        chat = {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 5}
        assert httpx.post(f"{process.base}/v1/chat/completions", json=chat, timeout=60).status_code == 200
        # Held in a step, so that the load is there when the signal comes.
        process.arm(point="verify", action="hang", after=3)
        taken, answers = threading.Semaphore(0), []

        def ask(body: dict[str, Any]) -> None:
            with httpx.stream(
                "POST", f"{process.base}/v1/completions", json={**body, "stream": True}, timeout=60
            ) as response:
                taken.release()  # its 200 is there
                answers.append((response.status_code, b"".join(response.iter_raw())))

        clients = [threading.Thread(target=ask, args=(body,)) for body in bodies]
        for client in clients:
            client.start()
        with httpx.Client(base_url=process.base, timeout=60) as other:
            assert all(taken.acquire(timeout=60) for _ in bodies)
            process.wait_hanging()
            assert len(process.descendants) >= 3  # the server, and a child for chats and one for grammars
            process.popen.send_signal(signal.SIGTERM)
            wait_for(lambda: other.get("/health").status_code == 503, "it is ready all the same")
            assert other.get("/live").status_code == 200
            refused = other.post("/v1/completions", json=LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert refused.headers["retry-after"]
            other.delete("/faults")
        for client in clients:
            client.join(60)
        assert [status for status, _ in answers] == [200] * len(bodies)
        for _, received in answers:
            assert received.endswith(b"data: [DONE]\n\n")
            assert b'"error"' not in received
        assert wait_for_exit(process) == 0
