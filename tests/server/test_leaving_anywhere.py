"""A client may leave, or the server cancel its request, at any turn of the event loop: all that it held comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from server.app import create_app
from server.auth.keys import KEYS_VARIABLE, load_keys
from server.resolve import THREAD_ABOVE_CHARS
from server.service import Service
from tests.server.builders import MODEL_NAME, build_service
from tests.server.chat_builders import HELLO, save_chat_model

SECONDS = 60
_numbers = count()

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
LONG = "a" * (THREAD_ABOVE_CHARS + 1)  # tokenized in a thread


def new_regex() -> dict[str, Any]:
    """One that was never compiled."""
    return {"structured_outputs": {"regex": f"[ab]{{1,9}}{next(_numbers)}"}}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": (COMPLETIONS, {"prompt": "the quick", "max_tokens": 30, "stream": True}),
    "prompts": (COMPLETIONS, {"prompt": ["a", "b c", "d"], "n": 2, "max_tokens": 9}),
    "long text": (COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": 9, "max_tokens": 3, "stream": True}),
    "grammar": (COMPLETIONS, {"prompt": "a", "max_tokens": 9}),
    "chat": (CHAT, {"messages": HELLO, "max_tokens": 9, "stream": True}),
    "chat with a grammar": (CHAT, {"messages": HELLO}),
    "tokens of a chat": (TOKENIZE, {"messages": HELLO}),
    "tokens of a long text": (TOKENIZE, {"prompt": LONG}),
}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """One for all tests: the engine belongs to the loop that it is started in."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def service(
    loop: asyncio.Runner, tiny_model: Path, model_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    model = save_chat_model(tiny_model, tmp_path_factory.mktemp("anywhere") / "model")
    keys = load_keys(None, {KEYS_VARIABLE: "alice:key"})
    service = build_service(model, model_home, keys=keys, rate_limit_tokens=10**9, rate_limit_requests=10**6)

    async def start() -> None:
        service.engine.start()

    loop.run(start())
    yield service
    loop.run(service.engine.shutdown(drain=False))
    service.grammars.close()
    service.chat.close()


def held(service: Service) -> dict[str, float]:
    """What requests hold outside of the engine's step."""
    room, bucket = service.engine.room, service.limiter._accounts["alice"].tokens
    assert bucket is not None
    scheduler = service.engine.scheduler  # type: ignore[attr-defined]
    return {
        "requests": room.num_requests,
        "tokens": room.num_tokens,
        "choices": scheduler.num_running + scheduler.num_waiting,
        "bytes": service.bodies.held,
        "texts": service.num_texts,
        "grammars": service.grammars._checking,
        "chats": service.chat._waiting,
        "charges": service.limiter.num_charged,
        "readers": len(service.engine._readers),  # type: ignore[attr-defined]
    }


async def ask(app: ASGIApp, path: str, body: dict[str, Any], turns: int, pause: float, cancelled: bool) -> bool:
    """Send it, and end it after so many turns of the loop and a pause. Whether it had ended by itself."""
    messages = [{"type": "http.request", "body": json.dumps({"model": MODEL_NAME, **body}).encode()}]
    gone = asyncio.Event()

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await asyncio.sleep(0)

    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer key")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": headers, "state": {}, "http_version": "1.1", "scheme": "http", "server": ("x", 80)}  # fmt: skip
    task = asyncio.create_task(app(scope, receive, send))  # type: ignore[arg-type]
    for _ in range(turns):
        await asyncio.sleep(0)
    if pause:
        await asyncio.wait({task}, timeout=pause)
    ended = task.done()
    task.cancel() if cancelled else gone.set()
    await asyncio.wait({task}, timeout=SECONDS)
    assert task.done(), "it goes on without its client"
    return ended


@pytest.mark.parametrize("cancelled", [False, True], ids=["left", "cancelled"])
def test_what_a_request_held_comes_back_at_whatever_moment_it_is_ended(
    service: Service, loop: asyncio.Runner, cancelled: bool
) -> None:
    app = create_app(service)
    moments = [*((turns, 0.0) for turns in range(24)), *((24, 0.002 * i) for i in range(1, 12))]

    async def main() -> None:
        for name, (path, body) in REQUESTS.items():
            ended_early = 0
            for turns, pause in moments:
                changed = {**body, **(new_regex() if "grammar" in name else {})}
                ended_early += not await ask(app, path, changed, turns, pause, cancelled)
                async with asyncio.timeout(SECONDS):
                    while any((left := held(service)).values()):  # noqa: ASYNC110 - nobody tells when all is back
                        await asyncio.sleep(0.001)
                assert not any(left.values()), (name, turns, pause, left)
            assert ended_early > len(moments) // 3, f"{name}: it ends before anybody could leave"

    loop.run(main())
