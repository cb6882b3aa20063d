"""The processes of a run: started one after the other, asleep while another one is loaded, ended with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.peers.ways import PORT, Launch
from bench.process import ServerStartError, free_port, wait_ready
from bench.serving.loops import LoadResult, Request, run_load
from bench.serving.niced import ClientThread
from bench.serving.options import Load, Mode
from bench.serving.target import OPTIONAL, Target, open_target
from bench.serving.trace import OK, Trace
from bench.serving.wire import Client
from server.commands import CommandError

START_SECONDS = 1200.0  # vLLM compiles its model at the first start
END_SECONDS = 30.0
LAST_LINES = 12


class RoundPrompt(Protocol):
    """What a request of a round asks. ``ids`` are the tokens of ``text``."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def ids(self) -> Sequence[int]: ...


class Process:
    """A launched peer in a process group of its own, so that all of it sleeps and wakes together.

    The group stays in this session: with Linux's autogroups a session of its own would make the client's niceness
    meaningless.
    """

    def __init__(self, name: str, launch: Launch, log: Path) -> None:
        self.name = name
        self.launch = launch
        self.log = log
        self.port = free_port()
        self._asleep = False
        command = [part.replace(PORT, str(self.port)) for part in launch.command]
        driven = bool(launch.settings)
        with log.open("wb") as out:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if driven else subprocess.DEVNULL,
                stdout=subprocess.PIPE if driven else out,
                stderr=out if driven else subprocess.STDOUT,
                env={**os.environ, **{key: value for key, value in launch.environment if value}},
                process_group=0,
            )

    def sleep(self) -> None:
        """Its spinning threads cost the others nothing. Returns when it has stopped (or ended)."""
        self._signal(signal.SIGSTOP)
        self._asleep = True
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.popen.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def wake(self) -> None:
        if self._asleep:
            self._signal(signal.SIGCONT)
            self._asleep = False

    def end(self) -> None:
        self.wake()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(END_SECONDS)
        self._signal(signal.SIGKILL)  # what is left of the group
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def last_words(self) -> str:
        lines = self.log.read_text("utf-8", "replace").splitlines()
        return "\n".join(line for line in lines[-LAST_LINES:] if line.strip())

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


class Server(Protocol):
    """A peer that takes loads."""

    process: Process
    versions: dict[str, str]

    def load(self, prompts: Sequence[RoundPrompt], tokens: int, seats: int, mode: Mode, salt: str) -> LoadResult:
        """All prompts, ``seats`` at a time, exactly ``tokens`` greedy tokens each. Raises CommandError if the peer has
        died; what became of a single request stands in its trace."""


class HttpServer:
    """Over HTTP, with the client of ``truedraft bench``."""

    def __init__(self, process: Process, thread: ClientThread) -> None:
        self.process = process
        self._thread = thread
        url = f"http://127.0.0.1:{process.port}"
        try:
            wait_ready(process.popen, url, process.log, START_SECONDS)
        except ServerStartError as error:
            raise CommandError(f"{process.name} did not get ready:\n{process.last_words()}") from error
        self._target: Target = thread.run(_open(process.name, url))
        self.versions = _told_version(self._target)

    def load(self, prompts: Sequence[RoundPrompt], tokens: int, seats: int, mode: Mode, salt: str) -> LoadResult:
        optional: dict[str, Any] = {
            "temperature": 0,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "ignore_eos": True,
            **(mode.fields if self._target.ours else {}),
        }
        target = self._target
        requests = [
            Request(
                p.name, ("", "", i), target.body({"prompt": p.text}, tokens, {**optional, "cache_salt": f"{salt}-{i}"})
            )
            for i, p in enumerate(prompts)
        ]
        return self._thread.run(run_load(target.client, target.path, requests, Load(seats=seats), 0))


class PipedServer:
    """A driver (driver.py) in the peer's own process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        answer = self._ask(json.loads(process.launch.settings))
        self.versions: dict[str, str] = answer["versions"]

    def load(self, prompts: Sequence[RoundPrompt], tokens: int, seats: int, mode: Mode, salt: str) -> LoadResult:
        answer = self._ask({"prompts": [list(p.ids) for p in prompts], "tokens": tokens, "seats": seats})
        traces = [_trace(p, found, tokens) for p, found in zip(prompts, answer["traces"], strict=True)]
        return LoadResult(traces, max((trace.ended for trace in traces), default=0.0) - answer["started"])

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        stdin, stdout = self.process.popen.stdin, self.process.popen.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # its last words say why
        line = stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it has ended"}
        if "error" in answer:
            raise CommandError(f"{self.process.name}: {answer['error']}\n{self.process.last_words()}")
        return answer


def start(name: str, launch: Launch, log: Path, thread: ClientThread) -> Server:
    """Returns when it is ready. Raises CommandError with its last lines, and leaves nothing running."""
    process = Process(name, launch, log)
    try:
        return PipedServer(process) if launch.settings else HttpServer(process, thread)
    except BaseException:
        process.end()
        raise


def _trace(prompt: RoundPrompt, found: Mapping[str, Any], tokens: int) -> Trace:
    """As a request over HTTP would have left it."""
    trace = Trace(prompt.name, planned=found["sent"], sent=found["sent"])
    trace.chunks = [(time, len(ids)) for time, ids in found["chunks"]]
    trace.token_ids = [i for _, ids in found["chunks"] for i in ids]
    trace.ended = trace.chunks[-1][0] if trace.chunks else found["sent"]
    trace.usage = {"prompt_tokens": len(prompt.ids), "completion_tokens": len(trace.token_ids)}
    trace.finish_reason, trace.outcome, trace.reason = "length", OK, ""
    return trace


async def _open(name: str, url: str) -> Target:
    target = await open_target(name, Client(url, timeout=600.0), model=None, chat=False)
    target.fields = OPTIONAL
    return target


def _told_version(target: Target) -> dict[str, str]:
    version = target.info.get("version")
    return {"truedraft": str(version)} if target.ours and version else {}
