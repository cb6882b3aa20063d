"""Keeps a board up to date from two threads, for the feed and for the state, and goes on when the server is back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from server.commands import CommandError
from server.top.board import STEPS_BEFORE, Board
from server.top.client import ServerAway, UiClient

STATE_SECONDS = 1.0
RETRY_SECONDS = 1.0


class Watching:
    """``update`` it often. ``problem`` is why nothing is heard of the server, None while something is."""

    def __init__(self, client: UiClient) -> None:
        self.board = Board()
        self.problem: str | None = None
        self._client = client
        self._news: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._stop = threading.Event()
        for work in (self._read_states, self._read_feed):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def update(self) -> None:
        """Take what has come. Raises CommandError if the server will not answer."""
        while True:
            try:
                kind, news = self._news.get_nowait()
            except Empty:
                return
            if kind == "refused":
                raise news
            if kind == "away":
                self.problem = news
            elif kind == "state":
                self.problem = None
                self.board.take_state(news)
            elif self.board.state is not None:
                self.board.take(kind, news)

    def stop(self) -> None:
        """The threads end when they next look up; they hold nothing that has to be given back."""
        self._stop.set()

    def _read_states(self) -> None:
        while not self._stop.is_set():
            self._guarded(lambda: self._news.put(("state", self._client.state())))
            self._stop.wait(STATE_SECONDS)

    def _read_feed(self) -> None:
        while not self._stop.is_set():
            self._guarded(self._follow)
            self._stop.wait(RETRY_SECONDS)

    def _follow(self) -> None:
        state = self._client.state()
        self._news.put(("state", state))
        for name, data in self._client.events(max(0, state["seq"] - STEPS_BEFORE)):
            if self._stop.is_set():
                return
            self._news.put((name, data))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ServerAway as away:
            self._news.put(("away", str(away)))
        except CommandError as refusal:
            self._news.put(("refused", refusal))
            self._stop.set()
