"""A server that stands still where a test wants it to: in a forward, or while it tokenizes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from model.interface import Executor, ForwardOutput
from server.resolve import THREAD_ABOVE_CHARS, Tokenizer

SECONDS = 60  # a test that never lets go fails by then


class HeldExecutor:
    """Waits in ``forward`` from ``hold`` on until ``let_go``."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._open = threading.Event()
        self._open.set()
        self._before = 0
        self.waits = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def hold(self, after: int = 0) -> None:
        """So many forwards are let through before."""
        self._before = after
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    def forward(self, *args: Any, **kwargs: Any) -> ForwardOutput:
        if self._before > 0:
            self._before -= 1
        elif not self._open.is_set():
            self.waits = True
            assert self._open.wait(SECONDS)
            self.waits = False
        return self._executor.forward(*args, **kwargs)


class HeldTokenizer:
    """Waits until it is open in an ``encode_many`` that the server runs in a thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.open = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        if sum(map(len, texts)) > THREAD_ABOVE_CHARS:
            assert self.open.wait(SECONDS)
        return self._tokenizer.encode_many(texts, add_special_tokens)
