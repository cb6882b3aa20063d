"""The command line: one line and exit code 1 for a mistake, a graceful end for a signal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from model.exactness import ExactnessCheck
from model.loader import LoadedModel, load_model
from server.cli import main
from tests.server.builders import CONTEXT, MODEL_NAME, metric
from tests.server.test_disconnect import send, wait_for


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "server", *map(str, arguments)]


@pytest.fixture
def environment(model_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("TRUEDRAFT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TRUEDRAFT_HOME", str(model_home))
    monkeypatch.setenv("TRUEDRAFT_KERNELS", "off")  # or the first start in a fresh home builds them
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # ``serve`` points the log of the whole process at stderr.
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@contextlib.contextmanager
def server(model: Path, *flags: object) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server process, its URL from the start-up line, and the lines it has written to stderr."""
    arguments = command(
        "serve", "--model", model, "--served-model-name", MODEL_NAME, "--port", 0, "--executor", "generic",
        "--num-blocks", 64, "--num-threads", 1, "--max-num-batched-tokens", 128, *flags,
    )  # fmt: skip
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    found = threading.Event()

    def read() -> None:
        for line in process.stderr or ():
            lines.append(line.rstrip("\n"))
            if "on http://" in line:
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert found.wait(240), lines
        started = [line for line in lines if "on http://" in line]
        assert started, lines
        yield process, started[0].rsplit(" on ", 1)[1], lines
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        reader.join(10)
        process.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["serve", "--port", "x"], "port = 'x'"),
        (["serve", "--nonsense", "1"], "--nonsense"),
        (["serve", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["nonsense"], "nonsense"),
        ([], "command"),
        (["serve", "--model", "/nowhere/at/all", "--port", "0"], "/nowhere/at/all"),
        (["serve", "--host", "no.such.host.invalid", "--port", "0"], "no.such.host.invalid"),
        (["fetch", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("environment")
def test_a_mistake_is_one_line_and_exit_code_1(
    arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    shown = capsys.readouterr()
    assert code == 1
    assert shown.out == ""
    errors = [line for line in shown.err.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert match in errors[0]
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--device", "cuda"), "cuda"),
        (("--num-blocks", "99999999999"), "there is no memory for a KV cache of"),
        (("--model", "truncated"), "model.safetensors"),
    ],
    ids=["device", "memory", "weights"],
)
@pytest.mark.usefixtures("environment")
def test_what_the_engines_process_cannot_do_is_one_line_too(
    flags: tuple[str, str], match: str, tiny_model: Path, tmp_path: Path
) -> None:
    """It ends by itself while it is told to end, and writes to the same stderr."""
    folder = shutil.copytree(tiny_model, tmp_path / "truncated")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    given = ["--model", str(tiny_model), *(str(folder) if flag == "truncated" else flag for flag in flags)]
    ended = subprocess.run(
        command("serve", "--port", 0, "--executor", "generic", *given), stderr=subprocess.PIPE, text=True, timeout=240
    )
    assert ended.returncode == 1
    errors = [line for line in ended.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert match in errors[0]
    assert "Traceback" not in ended.stderr


@pytest.mark.usefixtures("environment")
def test_a_port_in_use_is_told_before_the_model_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", "/nowhere/at/all", "--port", str(port)]) == 1
    assert f"127.0.0.1:{port}: the port is in use" in capsys.readouterr().err


@pytest.mark.parametrize("off", [[], ["--num-speculative-tokens", "0"]], ids=["on", "off"])
@pytest.mark.parametrize(
    ("drafter", "message"), [("nonsense", "unknown drafter 'nonsense'"), ("model", "name one with --draft-model")]
)
@pytest.mark.usefixtures("environment")
def test_a_drafter_that_cannot_be_had_is_told_before_the_model_is_looked_at(
    drafter: str, message: str, off: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", "/nowhere/at/all", "--port", "0", "--drafter", drafter, *off]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert "nowhere" not in shown


@pytest.mark.usefixtures("environment")
def test_a_drafter_or_a_context_that_does_not_exist_is_one_line(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["serve", "--model", str(tiny_model), "--port", "0", "--executor", "generic", "--num-blocks", "8"]
    assert main([*flags, "--drafter", "oracle"]) == 1
    assert "oracle" in capsys.readouterr().err
    assert main([*flags, "--max-model-len", str(CONTEXT + 1)]) == 1
    assert str(CONTEXT + 1) in capsys.readouterr().err


@pytest.mark.usefixtures("environment")
def test_a_model_that_cannot_be_quantised_is_refused_and_not_served_otherwise(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["serve", "--model", str(tiny_model), "--port", "0", "--num-blocks", "8", "--quantize", "int8"]
    assert main([*flags, "--executor", "generic"]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert "quantize int8, which only the fused executor can: executor is generic" in errors[0]


@pytest.mark.usefixtures("environment")
def test_require_exact_refuses_a_model_below_l0_with_the_reason(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def below(*args: object, **options: object) -> LoadedModel:
        loaded = load_model(*args, **options)  # type: ignore[arg-type]
        failed = ExactnessCheck("13 rows", False, "2 of 13 rows differ")
        return dataclasses.replace(loaded, exactness=loaded.exactness.with_checks([failed]))

    monkeypatch.setattr("model.opening.load_model", below)
    flags = ["serve", "--model", str(tiny_model), "--port", "0", "--executor", "generic", "--num-blocks", "8"]
    assert main([*flags, "--no-engine-process", "--require-exact"]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert "reaches exactness L2 only, and L0 is required: 13 rows: 2 of 13 rows differ" in errors[0]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("truedraft ")


@pytest.mark.usefixtures("environment")
def test_a_signal_lets_running_requests_finish_and_refuses_new_ones(tiny_model: Path) -> None:
    with server(tiny_model, "--log-format", "json") as (process, base, lines):
        (started,) = [line for line in lines if "on http://" in line]
        for fact in ("exactness L0", "generic", "64 KV blocks of 16 tokens"):
            assert fact in started
        body = {"model": MODEL_NAME, "prompt": "SECRET", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=base, timeout=60) as client, httpx.Client(base_url=base, timeout=60) as other:
            other.get("/live")
            with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "long"}) as response:
                pieces = response.iter_raw()
                received = next(pieces)
                process.send_signal(signal.SIGTERM)
                deadline = time.monotonic() + 20
                while (health := other.get("/health")).status_code == 200:
                    assert time.monotonic() < deadline
                refused = other.post("/v1/completions", json={**body, "stream": False})
                received += b"".join(pieces)
        assert health.json()["error"]["message"] == "the server is shutting down"
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["retry-after"]
        assert received.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in received
        assert process.wait(60) == 0
        logged = [json.loads(line) for line in lines if line.startswith("{")]
        assert any(entry.get("request_id") == "long" and entry["status"] == 200 for entry in logged)
        assert "SECRET" not in "\n".join(lines)


@pytest.mark.usefixtures("environment")
def test_what_does_not_finish_in_time_is_ended_with_an_error_and_done(tiny_model: Path) -> None:
    with server(tiny_model, "--shutdown-timeout", "0") as (process, base, _):
        body = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as response:
            pieces = response.iter_raw()
            received = next(pieces)
            process.send_signal(signal.SIGINT)
            received += b"".join(pieces)
        assert received.endswith(b"\n\ndata: [DONE]\n\n")
        assert b'"code":"shutting_down"' in received
        assert process.wait(60) == 0


@pytest.mark.parametrize("gone", [True, False], ids=["the reader has gone", "the reader does not read"])
@pytest.mark.usefixtures("environment")
def test_a_server_whose_lines_nobody_reads_any_more_ends_as_any_other(tiny_model: Path, gone: bool) -> None:
    flags = ("serve", "--model", tiny_model, "--served-model-name", MODEL_NAME, "--port", 0, "--executor", "generic",
             "--num-blocks", 64, "--num-threads", 1, "--shutdown-timeout", 240)  # fmt: skip
    with starting(*flags, said="on http://") as (process, lines):
        assert process.stderr is not None
        base = lines[-1].rsplit(" on ", 1)[1]
        if gone:
            process.stderr.close()
        with httpx.Client(base_url=base, timeout=60) as client:  # more lines than a pipe holds
            for _ in range(0 if gone else 300):
                client.get("/" + "x" * 250, headers={"X-Request-Id": "y" * 128})
        body = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as response:
            pieces = response.iter_raw()
            received = next(pieces)
            process.send_signal(signal.SIGTERM)
            received += b"".join(pieces)
        assert received.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in received
        assert process.wait(60) == 0


@pytest.mark.usefixtures("environment")
def test_a_reader_who_does_not_read_does_not_hold_up_the_end(tiny_model: Path) -> None:
    flags = ("--send-timeout", 600, "--num-blocks", 256, "--max-num-seqs", 16)
    with server(tiny_model, *flags) as (process, base, lines):
        body = {"prompt": "a", "n": 8, "max_tokens": 400, "logprobs": 20, "stream": True}
        with send(base, receive_buffer=4096, **body):
            wait_for(lambda: metric(base, "request_success_total", finished_reason="length") == 8, "it does not end")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert not any("Traceback" in line for line in lines)


@contextlib.contextmanager
def starting(*arguments: object, said: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process that has written a line with ``said`` to stderr, and its lines so far; ended with the block."""
    process = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True, env={**os.environ, **variables})
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if said in line:
                break
        else:
            pytest.fail(f"never said {said!r}: {lines}")
        yield process, lines
    finally:
        process.kill()
        process.wait(30)
        process.stderr.close()


def end(process: subprocess.Popen[str], number: int) -> tuple[int, list[str]]:
    """Exit code, and the lines that followed the signal."""
    process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    return process.returncode, rest.splitlines()


def processes_with(variable: str) -> list[str]:
    """Command lines of all processes that were started, however indirectly, with this environment variable."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGTERM, 143, "truedraft: ended by SIGTERM"), (signal.SIGINT, 1, "truedraft: interrupted")],
)
@pytest.mark.usefixtures("environment")
def test_a_signal_while_the_model_loads_is_one_line(tiny_model: Path, number: int, code: int, line: str) -> None:
    arguments = ("serve", "--model", tiny_model, "--port", 0, "--num-blocks", 8)
    with starting(*arguments, said="loading") as (process, _):
        assert end(process, number) == (code, [line])


@pytest.mark.usefixtures("environment")
def test_a_signal_while_a_model_downloads_leaves_no_process_and_nothing_in_the_way(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:  # takes connections and never answers
        variables = {
            "TRUEDRAFT_HOME": str(tmp_path / "home"),
            "TEST_MARK": str(tmp_path),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "no_proxy": "127.0.0.1",
        }
        with starting("fetch", said="downloading", **variables) as (process, _):
            index.settimeout(60)
            index.accept()[0].close()  # pip runs; it tries again
            assert len(processes_with(f"TEST_MARK={tmp_path}")) == 2
            code, lines = end(process, signal.SIGTERM)
    assert (code, lines[-1]) == (143, "truedraft: ended by SIGTERM")
    assert processes_with(f"TEST_MARK={tmp_path}") == []
    assert [path.name for path in (tmp_path / "home" / "models").iterdir() if path.is_dir()] == []


@pytest.mark.usefixtures("environment")
def test_a_signal_while_the_kernels_compile_leaves_no_process_and_nothing_in_the_way(tmp_path: Path) -> None:
    fifo = tmp_path / "compiling"
    os.mkfifo(fifo)
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && echo "a compiler that takes its time" && exit\n'
        f"sleep 600 & echo compiling > '{fifo}'; wait\n"  # as a driver with a child of its own
    )
    compiler.chmod(0o755)
    variables = {"TRUEDRAFT_HOME": str(tmp_path / "home"), "TEST_MARK": str(tmp_path), "CXX": str(compiler)}
    with starting("build-kernels", said="building", **variables) as (process, _):
        fifo.read_text()
        assert len(processes_with(f"TEST_MARK={tmp_path}")) >= 3
        assert end(process, signal.SIGTERM) == (143, ["truedraft: ended by SIGTERM"])
    assert processes_with(f"TEST_MARK={tmp_path}") == []
    assert [path for path in (tmp_path / "home" / "kernels").rglob("*") if path.is_dir() and any(path.iterdir())] == []


def test_what_does_not_let_go_is_ended_after_the_grace_period_and_at_once_by_a_second_signal() -> None:
    script = (
        "import sys, time, server.ending as e; e.GRACE_SECONDS = float(sys.argv[1])\n"
        "say = lambda line: print(line, file=sys.stderr, flush=True)\n"
        "with e.ended_by_signals(say, lambda: say('leaving')):\n"
        "    while True:\n"
        "        try: say('ready'); time.sleep(600)\n"
        "        except BaseException: pass\n"
    )
    for grace, signals in (("0.1", 1), ("600", 2)):
        process = subprocess.Popen([sys.executable, "-c", script, grace], stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        with process:
            for _ in range(signals):
                process.stderr.readline()
                process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
            rest = [line for line in process.stderr.read().splitlines() if line != "ready"]
            assert rest == ["ended by SIGTERM", "leaving"]


@pytest.mark.usefixtures("environment")
def test_the_command_line_leaves_the_callers_signals_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert main(["serve", "--model", "/nowhere/at/all", "--port", "0"]) == 1
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.real_model
def test_a_second_start_of_the_default_model_asks_nobody(
    default_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:  # who speaks to the network would be heard here
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
            monkeypatch.setenv(name.upper(), f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("NO_PROXY", "")
        with starting("serve", "--port", 0, said="on http://") as (process, lines):
            assert not [line for line in lines if "downloading" in line or "converting" in line]
            assert end(process, signal.SIGTERM)[0] == 0
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
