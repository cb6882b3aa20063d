"""The bounds of what waits, over HTTP: room is taken before anything is tokenized, and refused in due form."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest

from scheduler.room import Reservation
from server.comeback import KEPT_SHARE, MAX_SECONDS_OF_PATIENT, ComeBack, Retries
from server.resolve import THREAD_ABOVE_CHARS
from server.service import Service
from tests.server.builders import CONTEXT, MODEL_NAME, build_service, metric, running
from tests.server.chat_builders import HELLO
from tests.server.holding import HeldTokenizer
from tests.server.test_disconnect import assert_idle, wait_for
from tests.server.test_errors import POST, error_of

# Longer than the context, so it counts as the context until it is tokenized and cut.
LONG: dict[str, Any] = {"prompt": "a" * (THREAD_ABOVE_CHARS + 1), "truncate_prompt_tokens": 20, "max_tokens": 2}
SHORT: dict[str, Any] = {"prompt": "b", "max_tokens": 2}
MAX_WAITING = 3
MAX_TOKENS = 2 * CONTEXT + 100
MAX_BODY = 128 * 1024
MAX_BODIES = 2 * MAX_BODY


class Server:
    def __init__(self, service: Service, base: str, client: httpx.Client) -> None:
        self.service, self.base, self.client = service, base, client
        self.pool = ThreadPoolExecutor(8)

    def post(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": MODEL_NAME, **body})

    def send(self, **body: Any) -> Future[httpx.Response]:
        return self.pool.submit(self.post, **body)

    @contextmanager
    def tokenizing(self, *sent: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Inside, these requests are being tokenized."""
        held = HeldTokenizer(self.service.tokenizer)
        room = self.service.engine.room
        with monkeypatch.context() as patch:
            patch.setattr(self.service, "tokenizer", held)
            futures = []
            for i, body in enumerate(sent):
                futures.append(self.send(**body))
                wait_for(lambda i=i: room.num_requests == i + 1, "no room was reserved")
            yield
            held.open.set()
        for future in futures:
            assert future.result(60).status_code == 200

    def refusals(self, reason: str) -> float:
        return metric(self.base, "admission_rejections_total", reason=reason)


@pytest.fixture(scope="module")
def server(tiny_model: Path, model_home: Path) -> Iterator[Server]:
    service = build_service(
        tiny_model,
        model_home,
        max_waiting=MAX_WAITING,
        max_waiting_tokens=MAX_TOKENS,
        max_body_bytes=MAX_BODY,
        max_bodies_bytes=MAX_BODIES,
    )
    with running(service) as base, httpx.Client(base_url=base, timeout=60, trust_env=False) as client:
        yield Server(service, base, client)


@pytest.fixture(autouse=True)
def _nothing_is_left(server: Server) -> Iterator[None]:
    yield
    assert_idle(server.base)
    room = server.service.engine.room
    assert (room.num_requests, room.num_tokens) == (0, 0)


def assert_refused(response: httpx.Response) -> int:
    """Returns its milliseconds to wait."""
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "overloaded"
    milliseconds = int(response.headers["retry-after-ms"])
    assert 0 < milliseconds <= 60_000
    assert 0 <= int(response.headers["retry-after"]) * 1000 - milliseconds < 1000
    return milliseconds


def openais_headers(num_made: int, version: str = "3.0.0") -> dict[str, str]:
    return {
        "x-stainless-lang": "python",
        "x-stainless-package-version": version,
        "x-stainless-retry-count": str(num_made),
    }


def test_while_somebody_is_to_come_for_the_last_time_a_part_of_the_room_is_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service, "comeback", ComeBack(1, lambda: 0.0))
    body = {"model": MODEL_NAME, **LONG}

    def status(num_made: int) -> int:
        return server.client.post("/v1/completions", json=body, headers=openais_headers(num_made)).status_code

    with server.tokenizing(LONG, LONG, monkeypatch=monkeypatch):
        assert status(1) == 503  # it will be back for the last time
    with server.tokenizing(LONG, monkeypatch=monkeypatch):
        assert [status(0), status(1)] == [503, 503]
        last = server.pool.submit(status, 2)
        wait_for(lambda: server.service.engine.room.num_requests == 2, "it was not taken")
    assert last.result(60) == 200
    assert status(0) == 200  # nobody waits: nothing is kept


@pytest.mark.parametrize(("version", "most"), [("3.0.0", 120), ("1.60.0", 60)])
def test_openais_client_is_told_no_more_than_it_waits(
    version: str, most: int, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    comeback = ComeBack(1, lambda: 0.0)
    monkeypatch.setattr(server.service, "comeback", comeback)
    for _ in range(1000):
        comeback.seconds(Retries(0, MAX_SECONDS_OF_PATIENT))
    body = {"model": MODEL_NAME, **LONG}
    with server.tokenizing(LONG, LONG, monkeypatch=monkeypatch):
        answers = [
            server.client.post("/v1/completions", json=body, headers=openais_headers(0, version)) for _ in range(3)
        ]
    waits = [int(answer.headers["retry-after-ms"]) / 1000 for answer in answers]
    assert all(most / 2 <= wait <= most for wait in waits)
    assert len(set(waits)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_are_being_tokenized_take_room_of_the_queue(
    server: Server, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = server.refusals("queue_full")
    with server.tokenizing(LONG, monkeypatch=monkeypatch):
        assert server.service.engine.room.num_tokens == CONTEXT
        assert_refused(server.post(prompt=["a"] * MAX_WAITING, stream=stream, max_tokens=1))
    assert server.refusals("queue_full") == before + 1


def test_bytes_count_until_the_tokens_are_known(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    before = server.refusals("queue_tokens")
    with server.tokenizing(LONG, LONG, monkeypatch=monkeypatch):
        room = server.service.engine.room
        assert room.num_tokens == 2 * CONTEXT
        assert_refused(server.post(prompt=[70] * 101, max_tokens=1))
        assert server.refusals("queue_tokens") == before + 1
        assert server.post(prompt=[70] * 100, max_tokens=1).status_code == 200


def test_the_exact_count_is_kept_while_the_grammar_waits(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    async def check(grammar: str, *args: object, **kwargs: object) -> str:
        await asyncio.to_thread(go_on.wait, 60)
        return grammar

    room = server.service.engine.room
    with monkeypatch.context() as patch:
        patch.setattr(server.service.grammars, "check", check)
        sent = server.send(**LONG, structured_outputs={"choice": ["a", "b"]})
        wait_for(lambda: room.num_tokens == LONG["truncate_prompt_tokens"], "the count was not corrected")
        go_on.set()
        assert sent.result(60).status_code in (200, 400)


def test_a_list_of_prompts_with_more_tokens_than_may_wait_comes_in_where_nobody_waits(server: Server) -> None:
    prompts = [[70 + i] * (CONTEXT - 10) for i in range(MAX_WAITING)]
    assert sum(map(len, prompts)) > MAX_TOKENS
    assert server.post(prompt=prompts, max_tokens=1).status_code == 200


def test_each_refused_client_is_told_a_later_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with server.tokenizing(LONG, monkeypatch=monkeypatch):
        waits = [assert_refused(server.post(prompt=["a"] * MAX_WAITING, max_tokens=1)) for _ in range(5)]
    assert waits[-1] > waits[0]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a" * 5000},
        {"prompt": "a", "structured_outputs": {"regex": "("}},
        {"prompt": "a", "allowed_token_ids": [70], "bad_words": [], "min_tokens": 1, "stop_token_ids": [70]},
        {"prompt": [70] * CONTEXT, "max_tokens": 1},
        {"prompt": "a", "prediction": {"type": "content", "content": "b" * 100_000}},
    ],
    ids=lambda body: ",".join(body),
)
def test_a_refusal_behind_the_reservation_gives_the_room_back(server: Server, body: dict[str, Any]) -> None:
    assert server.post(**body).status_code == 400


def test_a_fault_behind_the_reservation_gives_the_room_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr("server.completion.build_choices", broken)
        failed = server.post(**SHORT)
    assert failed.status_code == 500
    assert error_of(failed)["message"] == "the server failed"
    assert server.post(**SHORT).status_code == 200


def test_bodies_that_arrive_slowly_hold_a_bounded_memory(server: Server) -> None:
    before = server.refusals("bodies")
    memory = server.service.bodies
    url = urlparse(server.base)
    head = f"{POST}Content-Length: {MAX_BODY}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for i in range(1, MAX_BODIES // MAX_BODY + 1):
            sock = stack.enter_context(socket.create_connection((url.hostname or "", url.port or 0), timeout=20))
            sock.sendall(head.encode() + b" " * (MAX_BODY - 1))
            wait_for(lambda i=i: memory.held == i * (MAX_BODY - 1), "it was not read")
        refused = server.post(**SHORT)
        assert_refused(refused)
        assert refused.headers["connection"] == "close"
        assert server.client.get("/health").status_code == 200
    wait_for(lambda: memory.held == 0, "what they held did not come back")
    assert server.refusals("bodies") == before + 1
    assert server.post(**SHORT).status_code == 200


def test_texts_that_are_only_counted_are_bounded_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    before = server.refusals("texts")
    held = HeldTokenizer(server.service.tokenizer)
    monkeypatch.setattr("server.service.MAX_TEXTS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(server.service, "tokenizer", held)
        sent = server.pool.submit(server.client.post, "/tokenize", json={"prompt": LONG["prompt"]})
        wait_for(lambda: server.service.num_texts == 1, "it did not begin")
        assert_refused(server.client.post("/detokenize", json={"tokens": [70]}))
        held.open.set()
        assert sent.result(60).status_code == 200
    assert server.refusals("texts") == before + 1
    assert server.client.post("/detokenize", json={"tokens": [70]}).status_code == 200


def test_too_many_grammars_that_wait_are_refused_and_counted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    before = server.refusals("grammars")
    monkeypatch.setattr("server.grammars.MAX_CHECKING", 0)
    assert_refused(server.post(**SHORT, structured_outputs={"regex": "never seen before"}))
    assert server.refusals("grammars") == before + 1


def test_too_many_chats_that_wait_are_refused_and_counted(
    chat_base: str, chat_http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = metric(chat_base, "admission_rejections_total", reason="templates")
    monkeypatch.setattr("server.chat.template.MAX_WAITING", 0)
    assert_refused(chat_http.post("/v1/chat/completions", json={"model": MODEL_NAME, "messages": HELLO}))
    assert metric(chat_base, "admission_rejections_total", reason="templates") == before + 1


def test_a_chat_takes_room_while_its_template_is_rendered(
    chat_service: Service, chat_http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = chat_service.engine.room
    seen: list[tuple[int, int]] = []
    render = chat_service.chat.render

    async def looking(*args: Any) -> Any:
        seen.append((room.num_requests, room.num_tokens))
        return await render(*args)

    monkeypatch.setattr(chat_service.chat, "render", looking)
    body = {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 2}
    assert chat_http.post("/v1/chat/completions", json=body).status_code == 200
    text = sum(len(name.encode()) + len(value.encode()) for message in HELLO for name, value in message.items())
    assert seen == [(1, text)]
    assert (room.num_requests, room.num_tokens) == (0, 0)


def test_a_chat_that_comes_for_the_last_time_has_the_room_that_is_kept(
    chat_service: Service, chat_http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    comeback = ComeBack(1, lambda: 0.0)
    comeback.seconds(Retries(1))
    monkeypatch.setattr(chat_service, "comeback", comeback)
    shares = []
    reserve = chat_service.engine.reserve

    def spy(num_requests: int, num_tokens: int, share: float) -> Reservation:
        shares.append(share)
        return reserve(num_requests, num_tokens, share)

    monkeypatch.setattr(chat_service.engine, "reserve", spy)
    for num_made in (0, 2):
        body = {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 1}
        headers = openais_headers(num_made)
        assert chat_http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    assert shares == [1 - KEPT_SHARE, 1]
