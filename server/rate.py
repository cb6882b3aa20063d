"""How much each key may use: buckets of requests and of tokens, a minute's worth each.

A request takes the most tokens that it may use when it is admitted: its prompts, and ``max_tokens`` of every choice.
What it did not use comes back when it ends::

    take 30 + 2 x 100  ...  the choices end with 40 and 100 tokens  ...  give back 60
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler.request import EngineRequest
from scheduler.stats import FinishedChoice
from server.errors import APIError, retry_headers

# Reasons of refusals, for the metric.
REQUESTS, TOKENS, SIZE = "rate_limit_requests", "rate_limit_tokens", "rate_limit_size"

MAX_LINE = 64  # places at one bucket
LINE_MINUTES = 2  # and what they want together, in capacities
MAX_WAIT_SECONDS = 60.0  # OpenAI's clients do not wait for longer
CLAIM_SECONDS = 2.0  # how long a place waits for a client who comes back a little late
_ROUNDING = 1e-6  # what floating point may lose of a bucket's content


@dataclass(frozen=True, slots=True)
class RateLimits:
    """A minute's worth; None: no limit."""

    requests: int | None = None
    tokens: int | None = None


class RateLimited(APIError):
    """429 with Retry-After; or 400 if waiting would not help (``wait`` is None)."""

    def __init__(self, reason: str, message: str, wait: float | None) -> None:
        if wait is None:
            super().__init__(400, message, param="max_tokens", code="rate_limit_exceeded")
        else:
            super().__init__(
                429,
                f"{message}; try again in {wait:.3g} seconds",
                kind="requests" if reason == REQUESTS else "tokens",  # as OpenAI has it
                headers=retry_headers(wait),
            )


@dataclass(frozen=True, slots=True)
class _Place:
    """In the line of those who were refused; forgotten at ``until``."""

    cost: float
    until: float


class Bucket:
    """Holds at most ``per_minute``, which is also what flows in within a minute. ``clock`` gives seconds.

    Small requests could keep a large one out for ever, by taking all that flows in. So there is a line: whoever is
    refused gets a place, is told when it is their turn, and until then those behind get only what is left over. Nobody
    knows who comes back, so a place belongs to whoever asks for the same cost, and is forgotten soon after its time.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.capacity = per_minute
        self._per_second = per_minute / 60.0
        self._clock = clock
        self._level = float(per_minute)  # below 0: more was used than was taken
        self._filled = clock()
        self._line: list[_Place] = []

    @property
    def level(self) -> float:
        """What it holds now; below 0: what must flow in before there is anything."""
        self._fill()
        return self._level

    def take(self, cost: float) -> float:
        """Take ``cost``, at most the capacity, and return 0; or take nothing and return the seconds to wait for it."""
        now = self._fill()
        mine = next((place for place in self._line if place.cost == cost), None)
        ahead = self._line if mine is None else self._line[: self._line.index(mine)]
        needed = sum(place.cost for place in ahead) + cost
        missing = needed - self._level
        if missing <= _ROUNDING:
            self._level -= cost
            if mine is not None:
                self._line.remove(mine)
            return 0.0
        wait = max(missing / self._per_second, self._blocked(ahead, needed, now))
        if mine is None and needed <= LINE_MINUTES * self.capacity and len(self._line) < MAX_LINE:
            self._line.append(_Place(cost, now + math.ceil(wait) + CLAIM_SECONDS))
        return min(wait, MAX_WAIT_SECONDS)

    def _blocked(self, ahead: Sequence[_Place], needed: float, now: float) -> float:
        """Seconds until the bucket can hold what is ``needed``: not while too many ``ahead`` may still come."""
        blocked = 0.0
        for place in sorted(ahead, key=lambda place: place.until):
            if needed <= self.capacity:
                break
            needed -= place.cost
            blocked = place.until - now
        return blocked

    def give_back(self, amount: float) -> None:
        """``amount`` was taken and not used; below 0: that much more was used."""
        self._fill()
        self._level = min(float(self.capacity), self._level + amount)

    def _fill(self) -> float:
        now = self._clock()
        self._level = min(float(self.capacity), self._level + (now - self._filled) * self._per_second)
        self._filled = now
        self._line = [place for place in self._line if now < place.until]
        return now


@dataclass(frozen=True, slots=True)
class _Account:
    """The buckets of one key, or of everybody where there are no keys."""

    requests: Bucket | None
    tokens: Bucket | None


_FREE = _Account(None, None)


@dataclass(slots=True)
class _Charge:
    """What a queued or running request took and has not used yet."""

    bucket: Bucket
    left: float


class RateLimiter:
    """For the event loop's thread. ``count`` is told the reason of each refusal.

    ``limits`` by the name of the key; None stands for everybody where there are no keys.
    """

    def __init__(
        self,
        limits: Mapping[str | None, RateLimits],
        *,
        count: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        def bucket(per_minute: int | None) -> Bucket | None:
            return None if per_minute is None else Bucket(per_minute, clock)

        self._accounts = {name: _Account(bucket(each.requests), bucket(each.tokens)) for name, each in limits.items()}
        self._count = count
        self._charges: dict[str, _Charge] = {}  # by the engine's request id

    @property
    def num_charged(self) -> int:
        """Engine requests that took tokens and have not ended."""
        return len(self._charges)

    def take_request(self, name: str | None) -> None:
        """A request came. Raises RateLimited."""
        bucket = self._account(name).requests
        if bucket is not None and (wait := bucket.take(1)) > 0.0:
            raise self._refusal(REQUESTS, f"more than {bucket.capacity} requests a minute are not allowed", wait)

    def check_size(self, name: str | None, at_least: int) -> None:
        """Refuse a request that takes at least so many tokens, if it could never have them. Raises RateLimited."""
        bucket = self._account(name).tokens
        if bucket is not None:
            self._check_size(bucket, at_least, "at least ")

    def take_tokens(self, name: str | None, requests: Sequence[EngineRequest], *, open_ended: bool = False) -> None:
        """Charge what ``requests`` may use at most, until each has ended or is given back. Raises RateLimited.

        ``open_ended``: nobody named a length, so no more is taken beforehand than the bucket can hold.
        """
        bucket = self._account(name).tokens
        if bucket is None:
            return
        costs: list[float] = [_most_tokens(request) for request in requests]
        total = sum(costs)
        if open_ended and total > bucket.capacity:
            self._check_size(bucket, sum(map(_fewest_tokens, requests)), "at least ")
            costs = [cost * bucket.capacity / total for cost in costs]
        else:
            self._check_size(bucket, int(total), "")
        if (wait := bucket.take(min(sum(costs), bucket.capacity))) > 0.0:
            raise self._refusal(TOKENS, f"more than {bucket.capacity} tokens a minute are not allowed", wait)
        for request, cost in zip(requests, costs, strict=True):
            self._charges[request.request_id] = _Charge(bucket, cost - len(request.prompt_token_ids))

    def give_back(self, requests: Iterable[EngineRequest]) -> None:
        """They were not queued after all: nothing of them counts."""
        for request in requests:
            charge = self._charges.pop(request.request_id, None)
            if charge is not None:
                charge.bucket.give_back(charge.left + len(request.prompt_token_ids))

    def settle(self, finished: Iterable[FinishedChoice]) -> None:
        """Choices have ended, in whatever way: what their request did not use comes back with the last of them."""
        for choice in finished:
            charge = self._charges.get(choice.request_id)
            if charge is None:
                continue
            charge.left -= choice.timing.num_output_tokens
            if choice.last_of_request:
                del self._charges[choice.request_id]
                charge.bucket.give_back(charge.left)

    def _account(self, name: str | None) -> _Account:
        # A replay has no key, whatever keys there are.
        return self._accounts.get(name, _FREE)

    def _check_size(self, bucket: Bucket, cost: int, qualifier: str) -> None:
        if cost > bucket.capacity:
            raise self._refusal(
                SIZE,
                f"the request may use {qualifier}{cost} tokens (its prompts, and max_tokens of each choice), but "
                f"{bucket.capacity} a minute are allowed: it could never be taken",
                None,
            )

    def _refusal(self, reason: str, message: str, wait: float | None) -> RateLimited:
        self._count(reason)
        return RateLimited(reason, message, wait)


def unlimited() -> RateLimiter:
    """For everybody, without keys and without limits."""
    return RateLimiter({None: RateLimits()}, count=lambda reason: None, clock=time.monotonic)


def _most_tokens(request: EngineRequest) -> int:
    return len(request.prompt_token_ids) + sum(spec.params.max_tokens for spec in request.choices)


def _fewest_tokens(request: EngineRequest) -> int:
    return len(request.prompt_token_ids) + len(request.choices)
