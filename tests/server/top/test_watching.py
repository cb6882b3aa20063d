"""The board is kept up to date by itself, through whatever becomes of the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from server.commands import CommandError
from server.top import watching
from server.top.client import ServerAway
from server.top.watching import Watching
from tests.server.top.test_board import state, step


class Client:
    """A server whose feed ends after each event, and which is away or refuses when a test wants it."""

    url = "http://x"

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.uptime = 100.0
        self.seq = 40

    def state(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        self.uptime += 1.0
        return state(seq=self.seq, uptime=self.uptime)

    def events(self, after: int) -> Iterator[tuple[str, dict[str, Any]]]:
        self.seq += 1
        yield "steps", {"seq": self.seq, "dropped": 0, "steps": [step(self.seq, self.uptime, 1)]}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(watching, "STATE_SECONDS", 0.01)
    monkeypatch.setattr(watching, "RETRY_SECONDS", 0.01)
    return Client()


def until(watched: Watching, condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        watched.update()
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def test_it_goes_on_when_the_server_is_back(client: Client) -> None:
    watched = Watching(client)  # type: ignore[arg-type]
    try:
        until(watched, lambda: len(watched.board.steps) > 2)
        client.error = ServerAway("gone")
        until(watched, lambda: watched.problem == "gone")
        client.error, client.uptime, client.seq = None, 0.0, 0  # it was started again
        until(watched, lambda: watched.problem is None and 0 < watched.board.seq < 40)
    finally:
        watched.stop()


def test_a_refusal_ends_it(client: Client) -> None:
    client.error = CommandError("wants an API key")
    watched = Watching(client)  # type: ignore[arg-type]
    try:
        with pytest.raises(CommandError, match="API key"):
            until(watched, lambda: False)
    finally:
        watched.stop()
