"""Room to wait, bounded in requests and in prompt tokens: reserved before a request is tokenized.

::

    reserve(1 request, its byte length) -> correct(its tokens) -> take: the queue counts it -> it runs
         |                                      |
         +---- refused, failed, given up -------+--> release: what was not taken is free again
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType

from scheduler.errors import QueueFull


class WaitingRoom:
    """Counts who is on the way to the queue beside who waits in it; together they are bounded.

    ``queued`` tells the requests that wait in the queue and their prompt tokens. Without ``max_tokens`` tokens are not
    bounded. An empty room takes any prompt: else one that is longer than the bound could never come in. Only one
    thread may call it.
    """

    def __init__(self, max_requests: int, max_tokens: int | None, queued: Callable[[], tuple[int, int]]) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._queued = queued
        self._reserved_requests = 0
        self._reserved_tokens = 0
        self._num_taken = 0

    @property
    def num_requests(self) -> int:
        """That wait, or have reserved."""
        return self._queued()[0] + self._reserved_requests

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of these requests."""
        return self._queued()[1] + self._reserved_tokens

    @property
    def num_taken(self) -> int:
        """Requests with a reservation that were put into the queue since the start."""
        return self._num_taken

    def check(self, num_requests: int, num_tokens: int, share: float = 1.0) -> None:
        """Raises QueueFull unless so many more may wait in this share of the room. Changes nothing."""
        waiting, tokens = self.num_requests, self.num_tokens
        # Where nobody waits the rest is not kept: who asks for more than the share could never come in.
        limit = math.ceil(self._max_requests * share) if waiting else self._max_requests
        if waiting + num_requests > limit:
            raise QueueFull(f"{waiting} requests are waiting, the limit is {limit}", "queue_full")
        self._check_tokens(num_tokens, waiting, tokens, share)

    def reserve(self, num_requests: int, num_tokens: int, share: float = 1.0) -> Reservation:
        """Room for one client's request: its prompts, and at least the tokens that they may have together.

        ``share``: of both bounds, the rest being for others. Raises QueueFull, and changes nothing.
        """
        self.check(num_requests, num_tokens, share)
        self._reserved_requests += num_requests
        self._reserved_tokens += num_tokens
        return Reservation(self, num_requests, num_tokens)

    def take_over(self, num_requests: int, num_tokens: int) -> Reservation:
        """Room that was found already, where the bounds are kept: not checked again."""
        self._change(num_requests, num_tokens)
        return Reservation(self, num_requests, num_tokens)

    def check_integrity(self) -> None:
        """Raise AssertionError if more was given back than was reserved."""
        assert self._reserved_requests >= 0, self._reserved_requests
        assert self._reserved_tokens >= 0, self._reserved_tokens

    def _check_tokens(self, more: int, waiting: int, tokens: int, share: float = 1.0) -> None:
        if self._max_tokens is None or not waiting:
            return
        limit = math.ceil(self._max_tokens * share)
        if tokens + more > limit:
            raise QueueFull(
                f"{tokens} prompt tokens are waiting, {more} more exceed the limit of {limit}", "queue_tokens"
            )

    def _change(self, num_requests: int, num_tokens: int) -> None:
        self._reserved_requests += num_requests
        self._reserved_tokens += num_tokens


class Reservation:
    """The room that one client's request holds until its prompts are queued: use it as a context, which releases it."""

    def __init__(self, room: WaitingRoom, num_requests: int, num_tokens: int) -> None:
        self._room = room
        self._num_requests = num_requests
        self._num_tokens = num_tokens

    @property
    def num_requests(self) -> int:
        """Not taken yet."""
        return self._num_requests

    @property
    def num_tokens(self) -> int:
        """Of these requests."""
        return self._num_tokens

    def correct(self, num_tokens: int) -> None:
        """Its prompts have so many tokens. Raises QueueFull, and changes nothing, if these are more and too many."""
        room = self._room
        if num_tokens > self._num_tokens:
            others, their_tokens = room.num_requests - self._num_requests, room.num_tokens - self._num_tokens
            room._check_tokens(num_tokens, others, their_tokens)
        room._change(0, num_tokens - self._num_tokens)
        self._num_tokens = num_tokens

    def take(self, num_tokens: int) -> None:
        """One of its requests, with so many tokens, is put into the queue, which counts it from now on.

        Raises ValueError if there is none left, or fewer tokens.
        """
        if self._num_requests < 1 or num_tokens > self._num_tokens:
            raise ValueError(
                f"a request of {num_tokens} tokens does not fit what is reserved: "
                f"{self._num_requests} requests of {self._num_tokens} tokens"
            )
        self._room._change(-1, -num_tokens)
        self._room._num_taken += 1
        self._num_requests -= 1
        self._num_tokens -= num_tokens

    def release(self) -> None:
        """Give back what was not taken. May be called again."""
        self._room._change(-self._num_requests, -self._num_tokens)
        self._num_requests = self._num_tokens = 0

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
