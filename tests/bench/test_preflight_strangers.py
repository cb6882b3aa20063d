"""Whatever a stranger sends, as a server or as a file: bounded, checked, and never a traceback."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.foreign import ForeignError, parse_json, read_file, read_lines, shown
from bench.preflight import play as playing
from bench.preflight.checklist import Line
from bench.preflight.info import server_info
from bench.preflight.live import preflight_live
from bench.preflight.load import find_load
from bench.preflight.reader import Reader
from bench.preflight.report import Findings
from bench.preflight.scrape import Scrape
from bench.preflight.traffic import read_traffic
from server.commands import CommandError
from server.metrics import Metrics
from tests.bench.test_preflight_command import silent
from tests.bench.test_preflight_measures import flat_cost
from tests.server.builders import byte_level_tokenizer

INFO: dict[str, Any] = {
    "model": {"name": "m", "served_names": ["m"]},
    "exactness": {"level": "L0", "detail": "every check passed"},
    "settings": {"audit_rate": 0.01},
}
METRICS = Metrics(model_name="m", max_speculative_tokens=4, exactness_level=0).render().decode()


def looked_at(info: bytes, *metrics: str) -> Findings:
    """What preflight finds at a server that answers so; the last answer to /metrics stays."""
    left = [text.encode("utf-8", "surrogatepass") for text in metrics]

    def get(self: Reader, path: str) -> bytes:
        return info if path == "/v1/server_info" else left.pop(0) if len(left) > 1 else left[0]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Reader, "get", get)
        unknown = Line("equivalence", "unknown", "not run in this test")
        return preflight_live(
            "http://x", seconds=0, probe=0, tokens=8, rounds=1, rules=None, verify=lambda: unknown, report=silent
        )


def answer(metrics: str, name: str) -> Line:
    return next(line for line in looked_at(json.dumps(INFO).encode(), metrics).checklist if line.name == name)


def setting(name: str, value: str, text: str = METRICS) -> str:
    """``text`` with the value of the samples that ``name`` begins."""
    changed, count = re.subn(rf"(?m)^(truedraft_{re.escape(name)}.*) \S+$", rf"\1 {value}", text)
    assert count, name
    return changed


@pytest.mark.parametrize(
    ("metrics", "line", "what"),
    [
        (setting("num_requests_running", "1", setting("kv_fragmentation_ratio", "-3")), "KV fragmentation", "is -3"),
        (setting("num_requests_running", "1", setting("kv_fragmentation_ratio", "3")), "KV fragmentation", "is 3"),
        (setting("num_requests_running", "1", setting("kv_fragmentation_ratio", "NaN")), "KV fragmentation", "NaN"),
        (
            setting("spec_decode_rollback_tokens_total", "900", setting("spec_decode_num_draft_tokens_total", "10")),
            "rollback",
            "900 of 10 draft tokens",
        ),
        (setting("kv_alignment_bytes_moved_total", "-64"), "rollback", "is -64"),
        (setting("equivalence_audits_total", "+Inf"), "audit", "equivalence_audits_total is +Inf"),
        (setting("equivalence_audits_total", "1.5"), "audit", "is 1.5"),
        (setting("spec_decode_num_drafts_total", "-1"), "acceptance", "is -1"),
        (
            setting("spec_decode_num_accepted_tokens_per_pos_total", "9", setting("spec_decode_num_drafts_total", "3")),
            "acceptance",
            "more draft tokens were accepted than were drafted",
        ),
        (setting("iteration_tokens_total_count", "1e300"), "memory-bound", "is 1e300"),
    ],
)
def test_an_impossible_value_is_neither_yes_nor_no(metrics: str, line: str, what: str) -> None:
    found = answer(metrics, line)
    assert found.answer == "unknown"
    assert found.reason.startswith("the server reports an impossible value: ")
    assert what in found.reason


def test_a_counter_that_goes_down_without_a_restart_is_impossible() -> None:
    name = "equivalence_audits_total"
    found = looked_at(json.dumps(INFO).encode(), setting(name, "5"), setting(name, "4"))
    audit = next(line for line in found.checklist if line.name == "audit")
    assert (audit.answer, audit.reason) == ("unknown", f"the server reports an impossible value: {name} went down")


def test_a_bucket_without_an_end_gives_no_quantile() -> None:
    metrics = METRICS.replace('le="0.001"', 'le="abc"')
    found = looked_at(json.dumps(INFO).encode(), metrics)
    assert found.server["ttft_p50"] is None
    assert "ends at abc" in Scrape.parse(metrics).impossible["time_to_first_token_seconds_bucket"]


BAD_INFO: dict[str, tuple[bytes, str]] = {
    "nested": (b"[" * 300_000, "nested too deeply"),
    "a long number": (b"9" * 10_000, "a number that is too long"),
    "not UTF-8": (b"\xff", "is not UTF-8"),
    "settings": (json.dumps({**INFO, "settings": "abc"}).encode(), "settings must be an object, got abc"),
    "model": (json.dumps({**INFO, "model": [1]}).encode(), "model must be an object, got a list of 1"),
    "names": (json.dumps({**INFO, "model": {"served_names": 3}}).encode(), "model.served_names must be a list"),
    "level": (json.dumps({**INFO, "exactness": {"level": "\x1b[2J"}}).encode(), r"got \x1b[2J"),
    "rate": (json.dumps({**INFO, "settings": {"audit_rate": True}}).encode(), "audit_rate must be a number from 0"),
    "a huge rate": (b'{"exactness": {"level": "L0"}, "settings": {"audit_rate": 1' + b"0" * 400 + b"}}", "150 digits"),
}


@pytest.mark.parametrize("name", BAD_INFO)
def test_a_server_info_that_is_none_is_one_line_that_names_the_field(name: str) -> None:
    body, what = BAD_INFO[name]
    with pytest.raises(CommandError) as error:
        looked_at(body, METRICS)
    assert what in str(error.value)
    assert str(error.value).isprintable()


# Mutated bodies: never a traceback, and nothing printed that controls a terminal.

ODD_TEXT = st.sampled_from(["", "abc", "\x1b[2J", "\n0 mismatch", "\ud800", "\u202e", "9" * 500, '"', "\\", "{}"])
ODD_NUMBER = st.sampled_from(["NaN", "+Inf", "-Inf", "-3", "0", "1e308", "1e-320", "7", "0.5", "1e18", "x", "1_0"])
ODD_JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    ODD_TEXT,
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["level", "name", "audit_rate"]), ODD_TEXT, max_size=2),
)
SAMPLES = [line for line in METRICS.splitlines() if line.startswith("truedraft_")]


@st.composite
def mutated_metrics(draw: st.DrawFn) -> str:
    lines = list(SAMPLES)
    for place in draw(st.lists(st.integers(0, len(lines) - 1), max_size=40)):
        head, _, _ = lines[place].rpartition(" ")
        kind = draw(st.sampled_from(["value", "label", "le", "cut"]))
        if kind == "value":
            lines[place] = f"{head} {draw(ODD_NUMBER)}"
        elif kind == "cut":
            lines[place] = lines[place][: draw(st.integers(0, len(lines[place])))]
        else:
            old = "le=" if kind == "le" else "m"
            lines[place] = lines[place].replace(old, old + '"' + draw(ODD_TEXT), 1)
    fill = draw(st.dictionaries(st.sampled_from(["num_requests_running", "spec_decode_num_drafts_total"]), ODD_NUMBER))
    return "\n".join([*lines, *(f"truedraft_{name} {value}" for name, value in fill.items())])


@st.composite
def mutated_info(draw: st.DrawFn) -> bytes:
    info = json.loads(json.dumps(INFO))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.sampled_from([info, *(part for part in info.values() if isinstance(part, dict) and part)]))
        place[draw(st.sampled_from(sorted(place)))] = draw(ODD_JSON)
    body = json.dumps(info).encode()
    return body[: draw(st.integers(0, len(body)))] if draw(st.integers(0, 9)) == 0 else body


@given(mutated_info(), st.lists(mutated_metrics(), min_size=1, max_size=2))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_no_body_of_a_server_is_a_traceback(info: bytes, metrics: list[str]) -> None:
    try:
        found = looked_at(info, *metrics)
    except CommandError as error:
        assert str(error).isprintable()
        return
    assert all(line.isprintable() for line in found.as_text().split("\n"))
    assert len(found.as_text().split("\n")) < 40
    json.dumps(found.as_json(), allow_nan=False)
    assert all(0 <= value < float("inf") for value in found.server.values() if isinstance(value, float))


# The way of the bytes: a server that speaks HTTP as it likes.


@pytest.fixture
def serve() -> Iterator[Callable[[bytes, bytes], str]]:
    """``serve(once, again)``: a server that sends ``once``, then ``again`` every 10 ms, to whoever connects."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.02)
    over = threading.Event()
    threads: list[threading.Thread] = []

    def run(once: bytes, again: bytes) -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection:
                try:
                    connection.recv(65536)
                    connection.sendall(once)
                    while again and not over.is_set():
                        connection.sendall(again)
                        time.sleep(0.01)
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(1)
                    while connection.recv(65536):
                        pass
                except OSError:
                    continue

    def start(once: bytes, again: bytes) -> str:
        threads.append(threading.Thread(target=run, args=(once, again), daemon=True))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    over.set()
    for thread in threads:
        thread.join()
    listener.close()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("head", [OK + b"Content-Length: 1000000\r\n\r\n", OK + b"X-A: "], ids=["body", "head"])
def test_a_server_that_drips_meets_the_deadline(head: bytes, serve: Callable[[bytes, bytes], str]) -> None:
    url = serve(head, b"a")
    with pytest.raises(CommandError, match=r"/metrics did not arrive within 0\.2 seconds"):
        Reader(url, deadline=0.2).get("/metrics")


def test_a_body_is_not_read_beyond_the_limit(serve: Callable[[bytes, bytes], str]) -> None:
    url = serve(OK + b"Content-Length: 3000000000\r\n\r\n", b"a" * 100_000)
    with pytest.raises(CommandError, match="/metrics is larger than 1,000,000 bytes"):
        Reader(url, max_bytes=1_000_000).get("/metrics")


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"", "cannot be read"),
        (b"SSH-2.0-OpenSSH\r\n", "cannot be read"),
        (b"HTTP/1.1 200 OK\r\nA\x1b[2J: b\r\n\r\n", "cannot be read"),
        (OK + b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\na", "is compressed"),
        (OK + b"Content-Length: 9\r\n\r\na", "cannot be read"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "answers 302"),
    ],
)
def test_broken_http_is_one_line(answer: bytes, what: str, serve: Callable[[bytes, bytes], str]) -> None:
    with pytest.raises(CommandError, match=what) as error:
        Reader(serve(answer, b"")).get("/metrics")
    assert str(error.value).isprintable()


STREAMS: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"data: {\n\n", "is not that of a Truedraft server"),
    "no choices": (b"data: {}\n\n", "is not that of a Truedraft server"),
    "a list": (b"data: []\n\n", "is not that of a Truedraft server"),
    "nothing": (b"data: [DONE]\n\n", "sends 0 ids and counts 0"),
    "more than asked": (b'data: {"choices": [{"token_ids": [1, 2, 3, 4]}]}\n\n', "sends 4 ids and counts 4"),
    "a count of its own": (
        b'data: {"choices": [{"token_ids": [1]}], "usage": {"completion_tokens": 1e400}}\n\n',
        "is not that of a Truedraft server",
    ),
    "an error": (b'data: {"error": "\\u001b[2J"}\n\n', r"a request failed: \x1b[2J"),
    "a line without end": (b"data: " + b"a" * 2_000_000, "longer than"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_none_of_ours_is_one_line(
    name: str, serve: Callable[[bytes, bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    body, what = STREAMS[name]
    get = {"/v1/server_info": json.dumps(INFO).encode(), "/metrics": METRICS.encode()}
    monkeypatch.setattr(Reader, "get", lambda self, path: get[path])
    url = serve(OK + f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body, b"")
    with pytest.raises(CommandError) as error:
        playing.play(url, [{"prompt": "a", "max_tokens": 3}], concurrency=1, rounds=1)
    assert what in str(error.value)
    assert str(error.value).isprintable()


# Files.


def test_what_is_shown_cannot_control_a_terminal_nor_forge_a_line() -> None:
    assert shown("fp_\x1b[2J\nthe same\u202e\ud800é漢") == r"fp_\x1b[2J\nthe same\u202e\ud800é漢"
    assert shown("a" * 300, 10) == "a" * 10 + "…"
    values: list[object] = [None, True, [1, 2], {}, 10**5000]
    assert [shown(value) for value in values] == [
        "null",
        "true",
        "a list of 2",
        "an object of 0",
        "a number of more than 150 digits",
    ]


@given(st.text(), st.integers(1, 50))
@settings(max_examples=50, deadline=None)
def test_shown_is_always_printable_and_bounded(text: str, limit: int) -> None:
    assert shown(text, limit).isprintable()
    assert len(shown(text, limit)) <= 10 * limit + 1


def test_files_are_regular_and_bounded(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345678\n1\n" + b"x" * 50 + b"\nlast")
    assert len(read_file(file, 66)) == 66
    with pytest.raises(ForeignError, match="larger than 65 bytes"):
        read_file(file, 65)
    assert list(read_lines(file, 8)) == [b"12345678\n", b"1\n", None, b"last"]
    for path in (Path("/dev/zero"), tmp_path):
        with pytest.raises(ForeignError, match="not a regular file"):
            read_file(path, 10)
        with pytest.raises(ForeignError, match="not a regular file"):
            list(read_lines(path, 10))


TOKENIZER = byte_level_tokenizer()
TOKENIZER._hf.chat_template = "{% for m in messages %}{{ m['content'] + m['role'] }}{% endfor %}"
HUGE = b"1" + b"0" * 400
WORST: dict[str, bytes] = {
    "a lone surrogate": rb'{"prompt": "\ud800"}',
    "in a message": rb'{"messages": [{"role": "\ud800", "content": "a"}]}',
    "in an output": rb'{"prompt": "a", "output": "\udfff"}',
    "a huge arrival": b'{"prompt": "z", "arrival": ' + HUGE + b"}",
    "a huge latency": b'{"prompt": "z", "latency": 1e300}',
    "a huge id": b'{"prompt": [' + HUGE + b"]}",
    "a number that is too long": b'{"prompt": "z", "seed": 1' + b"0" * 5000 + b"}",
    "nested": b"[" * 300_000,
    "nested in a field": b'{"prompt": ' + b"[" * 300_000,
    "a content that is no text": b'{"messages": [{"role": "user", "content": 3}]}',
    "tools of anything": b'{"messages": [{"role": "user"}], "tools": [1]}',
    "control characters": rb'{"prompt": 3, "\u001b[2J": 1, "temperature": "\u001b[2J\n"}',
}


def traffic_of(folder: Path, *lines: bytes) -> tuple[list[int], list[tuple[int, str]]]:
    file = folder / "traffic.jsonl"
    file.write_bytes(b"\n".join(lines))
    traffic = read_traffic(file, TOKENIZER, vocab_size=TOKENIZER.vocab_size, max_model_len=64)
    find_load(traffic.requests, flat_cost())
    return [request.line for request in traffic.requests], [(bad.line, bad.reason) for bad in traffic.bad_lines]


@pytest.mark.parametrize("name", WORST)
def test_the_worst_line_is_counted_and_named_and_costs_no_other(name: str, tmp_path: Path) -> None:
    used, bad = traffic_of(tmp_path, b'{"prompt": "a"}', WORST[name], b'{"prompt": "b"}')
    assert used == [1, 3]
    assert [line for line, _ in bad] == [2]
    assert bad[0][1].isprintable()


def test_a_line_beyond_the_limit_is_counted_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.preflight.traffic.MAX_LINE_BYTES", 40)
    used, bad = traffic_of(tmp_path, b'{"prompt": "' + b"a" * 500 + b'"}', b'{"prompt": "b"}')
    assert (used, bad) == ([2], [(1, "is longer than 40 bytes")])


FIELDS = ("prompt", "messages", "output", "arrival", "latency", "max_tokens", "temperature", "top_k", "seed", "tools")


@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), ODD_JSON, max_size=4), max_size=8))
@settings(max_examples=60, deadline=None)
def test_no_line_of_traffic_is_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]]
) -> None:
    bodies = [json.dumps({"prompt": "a", **line}).encode() for line in lines]
    used, bad = traffic_of(tmp_path_factory.getbasetemp(), b'{"prompt": "a"}', *bodies)
    assert sorted([*used, *(line for line, _ in bad)]) == list(range(1, len(lines) + 2))
    assert all(reason.isprintable() for _, reason in bad)


def test_json_of_a_file_is_unicode_and_bounded_in_depth() -> None:
    assert parse_json('{"a": "é\\ud83d\\ude00"}'.encode()) == {"a": "é😀"}
    with pytest.raises(ForeignError, match="lone surrogate"):
        parse_json(rb'["\ud800"]')


def test_the_info_of_a_server_of_ours_is_read() -> None:
    found = server_info(INFO)
    assert (found.model, found.served_name, found.level, found.audit_rate) == ("m", "m", "L0", 0.01)
