"""State and feed of a real server, with and without keys, and without the page."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from server.app import create_app
from server.connections import http_protocol
from server.run import _Server
from server.service import Service
from server.ui.routes import MAX_FEEDS
from tests.server.builders import MODEL_NAME, build_service, running
from tests.server.test_access import ALICE, KEYS, bearer
from tests.server.test_disconnect import wait_for
from tests.server.ui.records import feed_of

REPEATING = "0 1 2 0 1 2 0 1 2"
WORK: dict[str, Any] = {
    "model": MODEL_NAME, "prompt": REPEATING, "max_tokens": 40, "temperature": 0, "ignore_eos": True,
    "speculation": {"num_speculative_tokens": 4},
}  # fmt: skip


def work(http: httpx.Client, **changes: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={**WORK, **changes})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def state(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/ui/state").json()
    return found


@contextlib.contextmanager
def feed(http: httpx.Client, after: int | None = None) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    with http.stream("GET", "/ui/feed", params={} if after is None else {"after": after}) as response:
        yield feed_of(response)


def until(events: Iterator[tuple[str, dict[str, Any]]], name: str) -> dict[str, Any]:
    return next(data for found, data in events if found == name)


def test_the_state_tells_what_the_server_is_and_does(http: httpx.Client, service: Service) -> None:
    work(http)
    work(http)  # drafted from the output before, if not sooner
    found = state(http)
    info = http.get("/v1/server_info").json()
    server = found["server"]
    assert server["model"] == MODEL_NAME
    assert server["fingerprint"] == info["system_fingerprint"]
    assert server["level"] == info["exactness"]["level"]
    assert server["num_blocks"] == info["kv_cache"]["num_blocks"]
    assert server["drafters"] == [drafter["name"] for drafter in info["speculation"]["drafters"]]
    assert server["max_running"] == service.settings.max_num_seqs
    assert server["unready"] is None
    kv = found["now"]["kv"]
    assert kv["free"] + kv["used"] + kv["cached"] == server["num_blocks"]
    assert found["now"]["tokens_per_s"] > 0
    assert found["now"]["acceptance_length"] > 1
    assert found["seq"] > 0


def test_acceptance_by_position_falls_and_has_a_line_to_be_compared_with(http: httpx.Client) -> None:
    work(http)
    acceptance = state(http)["acceptance"]
    shares = acceptance["by_position"]
    assert shares
    assert all(0 <= share <= 1 for share in shares)
    lines = acceptance["break_even"]
    assert len(lines) == state(http)["server"]["num_speculative_tokens"] >= len(shares)
    assert all(line >= 0 for line in lines)


def test_a_finished_request_is_the_newest_of_the_state_with_the_numbers_of_its_answer(http: httpx.Client) -> None:
    answer = work(http, prompt=[50, 60, 70, 80], max_tokens=23)
    wait_for(lambda: state(http)["recent"][0]["output_tokens"] == 23, "it is not among the recent ones")
    newest = state(http)["recent"][0]
    numbers = answer["metrics"]["speculative_decoding"]
    assert newest["prompt_tokens"] == 4
    assert newest["finish_reason"] == "length"
    assert newest["drafted"] == numbers["num_draft_tokens"]
    assert newest["accepted"] == numbers["num_accepted_draft_tokens"]
    assert 0 <= newest["queue_s"] <= newest["ttft_s"] <= newest["e2e_s"]
    assert not {"prompt", "text", "id", "request_id"} & set(newest)


def test_the_feed_tells_every_step_of_a_request(http: httpx.Client) -> None:
    before = state(http)["seq"]
    tokens = work(http, max_tokens=37)["usage"]["completion_tokens"]
    with feed(http, before) as events:
        steps = until(events, "steps")["steps"]
        ended = until(events, "requests")["requests"][-1]
    assert [step["n"] for step in steps] == list(range(before + 1, before + 1 + len(steps)))
    own = [seq for step in steps for seq in step["seqs"] if seq[0] == ended["key"]]
    assert sum(emitted for _, emitted, *_ in own) == tokens == ended["output_tokens"]
    assert sum(drafted for _, _, drafted, *_ in own) == ended["drafted"]
    assert sum(accepted for _, _, _, accepted, _ in own) == ended["accepted"]
    assert all(step["s"]["verify"] > 0 for step in steps)
    assert [step["t"] for step in steps] == sorted(step["t"] for step in steps)


def test_the_block_map_shows_a_request_while_it_runs_and_what_it_leaves(http: httpx.Client, base: str) -> None:
    with (
        httpx.Client(base_url=base, timeout=60, trust_env=False) as other,
        feed(http) as events,
        other.stream(
            "POST", "/v1/completions", json={**WORK, "prompt": [9] * 60, "max_tokens": 400, "stream": True}
        ) as answer,
    ):
        held = next(data for name, data in events if name == "blocks" and {"u", "p"} & set(data["map"]))
        assert len(held["map"]) == held["num_blocks"] == 256
        answer.read()
        last = next(data for name, data in events if name == "blocks" and not {"u", "p", "s"} & set(data["map"]))
    assert "c" in last["map"]


def test_a_feed_that_is_one_too_many_is_refused_and_its_place_comes_back(base: str) -> None:
    with httpx.Client(base_url=base, timeout=60, trust_env=False) as http:
        with contextlib.ExitStack() as opened:
            held = [opened.enter_context(feed(http)) for _ in range(MAX_FEEDS)]  # a generator that is dropped closes it
            for events in held:
                until(events, "steps")
            refused = http.get("/ui/feed")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "overloaded"
            assert int(refused.headers["retry-after"]) >= 1

        def is_open() -> bool:
            with http.stream("GET", "/ui/feed") as response:
                return response.status_code == 200

        wait_for(is_open, "the places of feeds that were left do not come back")


@pytest.mark.parametrize("after", ["x", "-1", "1.5"])
def test_a_wrong_number_is_refused_by_name(http: httpx.Client, after: str) -> None:
    refused = http.get("/ui/feed", params={"after": after})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "after"


@pytest.fixture(scope="module")
def keyed_service(tiny_model: Path, model_home: Path) -> Service:
    return build_service(tiny_model, model_home, keys=KEYS)


@pytest.fixture(scope="module")
def keyed(keyed_service: Service) -> Iterator[httpx.Client]:
    with running(keyed_service) as base, httpx.Client(base_url=base, timeout=60, trust_env=False) as client:
        yield client


def test_with_keys_every_datum_needs_one_and_the_page_itself_none(keyed: httpx.Client) -> None:
    for path in ("/ui/state", "/ui/feed", "/ui/nothing", "/ui//state"):
        assert keyed.get(path).status_code == 401, path
    assert keyed.get("/ui").status_code == 200
    assert keyed.get("/ui/state", headers=bearer(ALICE)).status_code == 200
    with keyed.stream("GET", "/ui/feed", headers=bearer(ALICE)) as response:
        assert until(feed_of(response), "steps")["steps"] == []


def test_a_feed_ends_when_the_server_does_but_not_before_its_last_request(
    keyed: httpx.Client, keyed_service: Service
) -> None:
    with keyed.stream("GET", "/ui/feed", headers=bearer(ALICE)) as response:
        events = feed_of(response)
        until(events, "steps")
        body = {**WORK, "max_tokens": 400, "stream": True}
        with httpx.Client(base_url=keyed.base_url, timeout=60, headers=bearer(ALICE), trust_env=False) as other:
            try:
                with other.stream("POST", "/v1/completions", json=body) as answer:
                    until(events, "steps")
                    keyed_service.draining = True
                    answer.read()
                seen = [*events]
            finally:
                keyed_service.draining = False
    assert "requests" in dict(seen), "it ended before the request did"


def test_no_ui_leaves_nothing_of_it(tiny_model: Path, model_home: Path) -> None:
    service = build_service(tiny_model, model_home, ui=False)
    assert service.feed is None
    with running(service) as base, httpx.Client(base_url=base, timeout=60, trust_env=False) as http:
        for path in ("/ui", "/ui/", "/ui/state", "/ui/feed", "/ui/app.js"):
            assert http.get(path).status_code == 404, path
        assert work(http)["usage"]["completion_tokens"] == 40


def test_a_reader_of_the_feed_who_stopped_reading_does_not_hold_up_the_end(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def much(*_: object) -> AsyncIterator[bytes]:
        while True:
            yield b": \n\n" * 10_000
            await asyncio.sleep(0)

    monkeypatch.setattr("server.ui.routes.feed_events", much)
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections inherit it
    started = threading.Event()
    server = _Server(
        uvicorn.Config(
            create_app(service), http=http_protocol(service.settings), ws="none", lifespan="off", log_config=None,
            timeout_graceful_shutdown=None,  # for ever
        ),
        started.set,
    )  # fmt: skip
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    assert started.wait(60)
    with socket.socket() as watcher:
        watcher.connect(sock.getsockname())
        watcher.sendall(b"GET /ui/feed?after=0 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert watcher.recv(12) == b"HTTP/1.1 200"
        (connection,) = server.server_state.connections
        wait_for(lambda: connection.flow.write_paused, "the feed does not wait for its reader")  # type: ignore[union-attr]
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()
