"""A request that takes longer than its timeout is over, wherever it is by then, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from server.body import THREAD_ABOVE_BYTES
from server.deadline import Deadline
from server.errors import APIError
from server.resolve import THREAD_ABOVE_CHARS
from server.service import Service
from tests.server.builders import MODEL_NAME, build_service, metric, running, sse_events
from tests.server.chat_builders import HELLO
from tests.server.holding import SECONDS, HeldExecutor, HeldTokenizer
from tests.server.test_disconnect import assert_idle, send, wait_for

BODY: dict[str, Any] = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 400, "ignore_eos": True}
TIMEOUT = 0.3  # of those that are held up for as long as the test wants
MOST = 50.0
WORDY: dict[str, Any] = {"logprobs": 20, "speculation": {"num_speculative_tokens": 0}}  # much to send, step by step
LONG_TEXT = "a" * (THREAD_ABOVE_CHARS + 1)  # tokenized in a thread


class Server:
    def __init__(self, service: Service, executor: HeldExecutor, base: str, client: httpx.Client) -> None:
        self.service, self.executor, self.base, self.client = service, executor, base, client

    def post(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={**BODY, "timeout": TIMEOUT, **body})

    def check_empty(self) -> None:
        assert_idle(self.base)
        room = self.service.engine.room
        assert (room.num_requests, room.num_tokens) == (0, 0)


@pytest.fixture(scope="module")
def started(tiny_model: Path, model_home: Path) -> Iterator[Server]:
    """One seat; sockets take little."""
    made: list[HeldExecutor] = []

    def wrap(executor: Any) -> Any:
        made.append(HeldExecutor(executor))
        return made[0]

    service = build_service(
        tiny_model, model_home, wrap=wrap, max_num_seqs=1, request_timeout=MOST, send_timeout=60, stall_timeout=1000
    )
    with running(service, send_buffer=4096) as base, httpx.Client(base_url=base, timeout=60, trust_env=False) as client:
        yield Server(service, made[0], base, client)


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    yield started
    started.executor.let_go()
    started.check_empty()


def assert_timeout(error: dict[str, Any]) -> None:
    assert (error["code"], error["type"], error["param"]) == ("timeout", "server_error", None)
    assert f"{TIMEOUT:g} seconds" in error["message"]


def assert_504(response: httpx.Response) -> None:
    assert response.status_code == 504
    assert_timeout(response.json()["error"])


@pytest.mark.parametrize("held_after", [0, 3], ids=["in prefill", "in decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_running_request_ends_while_its_step_still_runs(server: Server, stream: bool, held_after: int) -> None:
    before = metric(server.base, "request_timeouts_total")
    server.executor.hold(held_after)
    response = server.post(stream=stream)
    if stream:
        assert response.status_code == 200
        *_, last = sse_events(response.content)
        assert_timeout(last["error"])  # type: ignore[arg-type]
    else:
        assert_504(response)
        assert response.headers["x-seed"]
    assert metric(server.base, "request_timeouts_total") == before + 1


def test_a_request_in_the_queue_ends_before_it_ever_ran(server: Server) -> None:
    server.executor.hold()
    sock = send(server.base, prompt="a", max_tokens=400)
    wait_for(lambda: server.executor.waits, "it does not run")
    prompts = metric(server.base, "prompt_tokens_total")
    assert_504(server.post(prompt="b"))
    sock.close()
    server.executor.let_go()
    assert_idle(server.base)
    assert metric(server.base, "prompt_tokens_total") <= prompts + 1


def test_all_choices_of_all_prompts_end_together(server: Server) -> None:
    server.executor.hold(2)
    assert_504(server.post(prompt=["a", "b", "c"], n=2))


def test_what_a_reader_does_not_read_ends_too(server: Server) -> None:
    before = metric(server.base, "request_timeouts_total")
    server.executor.hold(after=150)
    with send(server.base, receive_buffer=4096, prompt="a", max_tokens=400, stream=True, timeout=3, **WORDY):
        wait_for(lambda: metric(server.base, "request_timeouts_total") == before + 1, "it did not end")
        server.executor.let_go()
        assert_idle(server.base)


def test_a_reader_who_is_behind_gets_nothing_after_the_deadline(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire: list[Callable[[], object]] = []

    def call_at_end(deadline: Deadline, function: Callable[[], None]) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        expire.append(lambda: loop.call_soon_threadsafe(function))  # when the test says so
        return loop.call_later(3600, lambda: None)

    monkeypatch.setattr(Deadline, "call_at_end", call_at_end)
    before = metric(server.base, "request_timeouts_total")
    done = metric(server.base, "request_success_total", finished_reason="length")
    with send(server.base, receive_buffer=4096, prompt="a", max_tokens=150, stream=True, **WORDY) as sock:
        wait_for(
            lambda: metric(server.base, "request_success_total", finished_reason="length") == done + 1,
            "the engine has not done its part",
        )
        expire[0]()
        wait_for(lambda: metric(server.base, "request_timeouts_total") == before + 1, "its deadline did not pass")
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += sock.recv(65536)
    assert b'"code":"timeout"' in received
    assert b"data: [DONE]" in received
    assert b'"finish_reason":"length"' not in received


@pytest.mark.parametrize("stream", [False, True])
def test_tokenizing_ends_and_its_room_comes_back(server: Server, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldTokenizer(server.service.tokenizer)
    monkeypatch.setattr(server.service, "tokenizer", held)
    assert_504(server.post(prompt=LONG_TEXT, truncate_prompt_tokens=5, stream=stream))  # before the 200
    room = server.service.engine.room
    assert (room.num_requests, room.num_tokens) == (0, 0)
    held.open.set()


async def never(*args: object, **kwargs: object) -> None:
    await asyncio.Event().wait()


def test_waiting_for_a_grammar_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.grammars, "check", never)
    assert_504(server.post(structured_outputs={"regex": "a+"}, ignore_eos=False))


def test_waiting_for_a_template_ends(
    chat_service: Service, chat_http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_service.chat, "render", never)
    body = {"model": MODEL_NAME, "messages": HELLO, "timeout": TIMEOUT}
    assert_504(chat_http.post("/v1/chat/completions", json=body))
    assert chat_service.engine.room.num_requests == 0


def test_texts_that_are_only_counted_have_the_servers_timeout(
    chat_service: Service, chat_http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = chat_service.settings.model_copy(update={"request_timeout": TIMEOUT})
    monkeypatch.setattr(chat_service, "settings", settings)
    monkeypatch.setattr(chat_service.chat, "render", never)
    monkeypatch.setattr("server.routes.tokenize.detokenize", never)
    for path, body in (("/tokenize", {"messages": HELLO}), ("/detokenize", {"tokens": [70]})):
        assert_504(chat_http.post(path, json=body))
    assert chat_service.num_texts == 0


def test_a_body_that_waits_to_be_parsed_has_the_servers_timeout(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    monkeypatch.setattr("server.body.parse_json_object", lambda body: held.wait(SECONDS))
    settings = server.service.settings.model_copy(update={"request_timeout": TIMEOUT})
    monkeypatch.setattr(server.service, "settings", settings)
    assert_504(server.post(prompt="a" * THREAD_ABOVE_BYTES))
    assert server.service.bodies.held == 0
    held.set()


def test_a_client_who_leaves_before_the_queue_gives_its_room_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service.grammars, "check", never)
    room = server.service.engine.room
    sock = send(server.base, prompt="a", structured_outputs={"regex": "a+"}, ignore_eos=False)
    wait_for(lambda: room.num_requests == 1, "nothing was reserved")
    sock.close()
    wait_for(lambda: room.num_requests == 0, "its room did not come back")


def test_an_answer_in_time_is_whole_and_counts_as_no_timeout(server: Server) -> None:
    before = metric(server.base, "request_timeouts_total")
    for timeout in (None, MOST):
        response = server.post(max_tokens=5, timeout=timeout)
        assert response.status_code == 200
        assert response.json()["choices"][0]["finish_reason"] == "length"
    assert metric(server.base, "request_timeouts_total") == before


@pytest.mark.parametrize("timeout", [0, -1, MOST + 1, "5", True])
def test_a_timeout_that_cannot_be_kept_is_refused(server: Server, timeout: Any) -> None:
    response = server.post(timeout=timeout)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "timeout"


def test_without_its_own_a_request_has_the_servers_timeout(server: Server) -> None:
    now = time.monotonic()
    assert MOST - 1 < server.service.deadline(None, now).left <= MOST
    assert server.service.deadline(5.0, now).left <= 5.0


def test_openais_client_sees_a_timeout_as_an_error_of_the_server(server: Server) -> None:
    server.executor.hold()
    client = openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)
    with client, pytest.raises(openai.InternalServerError) as error:
        client.completions.create(model=MODEL_NAME, prompt="a", extra_body={"timeout": TIMEOUT})
    assert (error.value.status_code, error.value.code) == (504, "timeout")


def test_a_timeout_of_another_kind_inside_is_not_the_deadlines() -> None:
    async def work() -> None:
        async with Deadline(time.monotonic(), 60).bound():
            raise TimeoutError

    with pytest.raises(TimeoutError):
        asyncio.run(work())


def test_a_deadline_that_has_passed_lets_nothing_begin_and_counts_once() -> None:
    counted: list[int] = []
    deadline = Deadline(time.monotonic() - 10, 5, lambda: counted.append(1))

    async def work() -> None:
        async with deadline.bound():
            raise AssertionError("it began")

    for _ in range(2):
        with pytest.raises(APIError, match="within its timeout of 5 seconds"):
            asyncio.run(work())
    assert counted == [1]
