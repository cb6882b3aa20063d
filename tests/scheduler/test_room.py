"""The room to wait: nothing goes over its bounds, and whatever happens to a request, its room comes back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.config import SchedulerConfig
from scheduler.errors import QueueFull, RequestTooLarge
from scheduler.room import Reservation, WaitingRoom
from tests.scheduler.builders import Bench, build_request

CONTEXT = 64


class RoomMachine(RuleBasedStateMachine):
    """A real scheduler, against a list of who should be where."""

    @initialize(
        max_requests=st.integers(1, 6), max_tokens=st.none() | st.integers(1, 120), num_blocks=st.integers(4, 40)
    )
    def start(self, max_requests: int, max_tokens: int | None, num_blocks: int) -> None:
        config = SchedulerConfig(
            max_num_seqs=2,
            max_num_batched_tokens=16,
            max_model_len=CONTEXT,
            max_waiting_requests=max_requests,
            max_waiting_tokens=max_tokens,
        )
        self.bench = Bench(num_blocks=num_blocks, block_size=4, config=config)
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.open: list[tuple[Reservation, int, int]] = []  # requests and tokens that each should still hold
        self.next_id = 0

    @property
    def room(self) -> WaitingRoom:
        return self.bench.scheduler.room

    def waiting(self, without: Reservation | None = None) -> tuple[int, int]:
        """Requests and tokens that wait or are on the way."""
        held = [(requests, tokens) for reservation, requests, tokens in self.open if reservation is not without]
        queued = self.bench.queued_prompts()
        return len(queued) + sum(r for r, _ in held), sum(queued) + sum(t for _, t in held)

    def fits(self, tokens: int, without: Reservation | None = None) -> bool:
        others, their_tokens = self.waiting(without)
        return self.max_tokens is None or others == 0 or their_tokens + tokens <= self.max_tokens

    @rule(requests=st.integers(1, 3), tokens=st.integers(0, 60))
    def reserve(self, requests: int, tokens: int) -> None:
        if self.waiting()[0] + requests > self.max_requests:
            with pytest.raises(QueueFull) as full:
                self.room.reserve(requests, tokens)
            assert full.value.reason == "queue_full"
        elif not self.fits(tokens):
            with pytest.raises(QueueFull) as full:
                self.room.reserve(requests, tokens)
            assert full.value.reason == "queue_tokens"
        else:
            self.open.append((self.room.reserve(requests, tokens), requests, tokens))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), tokens=st.integers(0, 60))
    def correct(self, data: st.DataObject, tokens: int) -> None:
        at = data.draw(st.integers(0, len(self.open) - 1))
        reservation, requests, reserved = self.open[at]
        if tokens > reserved and not self.fits(tokens, without=reservation):
            with pytest.raises(QueueFull) as full:
                reservation.correct(tokens)
            assert full.value.reason == "queue_tokens"
        else:
            reservation.correct(tokens)
            self.open[at] = (reservation, requests, tokens)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), length=st.integers(1, 40))
    def queue_one(self, data: st.DataObject, length: int) -> None:
        at = data.draw(st.integers(0, len(self.open) - 1))
        reservation, requests, tokens = self.open[at]
        request = build_request(f"r{self.next_id}", [5] * length, max_tokens=20)
        self.next_id += 1
        if not self.bench.manager.fits(length + 19):
            with pytest.raises(RequestTooLarge):
                self.bench.add(request, reservation)
        elif requests == 0 or length > tokens:
            with pytest.raises(ValueError, match="does not fit what is reserved"):
                self.bench.add(request, reservation)
        else:
            self.bench.add(request, reservation)
            self.open[at] = (reservation, requests - 1, tokens - length)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        reservation, _, _ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        reservation.release()
        reservation.release()

    @rule(steps=st.integers(1, 4))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.bench.scheduler.has_work:
                self.bench.run_step()

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.bench.abort(data.draw(st.sampled_from(sorted(self.bench.requests))))

    @invariant()
    def counts_are_those_of_the_list(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check_integrity()
            assert (self.room.num_requests, self.room.num_tokens) == self.waiting()
            assert self.room.num_requests <= self.max_requests

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            for reservation, _, _ in self.open:
                reservation.release()
            self.bench.drain()
            assert (self.room.num_requests, self.room.num_tokens) == (0, 0)


TestRoom = RoomMachine.TestCase
TestRoom.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def room(max_requests: int = 10, max_tokens: int | None = 100) -> WaitingRoom:
    return WaitingRoom(max_requests, max_tokens, lambda: (0, 0))


def test_a_prompt_beyond_the_bound_comes_in_where_nobody_waits() -> None:
    full = room()
    with full.reserve(2, 500) as reservation:
        with pytest.raises(QueueFull, match="500 prompt tokens are waiting, 1 more exceed the limit of 100"):
            full.reserve(1, 1)
        reservation.correct(400)
    full.reserve(1, 1)


def test_the_exact_count_makes_room_for_others_before_the_request_is_queued() -> None:
    full = room()
    reservation = full.reserve(1, 90)
    with pytest.raises(QueueFull):
        full.reserve(1, 20)
    reservation.correct(30)
    full.reserve(1, 20)


def test_an_exception_gives_back_what_was_reserved() -> None:
    full = room()
    with pytest.raises(RuntimeError), full.reserve(3, 50):
        raise RuntimeError
    assert (full.num_requests, full.num_tokens) == (0, 0)


def test_what_was_put_into_the_queue_is_counted() -> None:
    full = room()
    with full.reserve(3, 30) as reservation:
        reservation.take(10)
        reservation.take(10)
    assert full.num_taken == 2


def test_a_share_of_both_bounds_is_left_for_others() -> None:
    full = room(max_requests=8, max_tokens=100)
    full.reserve(6, 10)
    with pytest.raises(QueueFull, match="the limit is 6"):
        full.reserve(1, 10, 0.75)
    full.reserve(1, 60)
    of_tokens = room(max_requests=99, max_tokens=100)
    of_tokens.reserve(1, 70)
    with pytest.raises(QueueFull, match="the limit of 75"):
        of_tokens.reserve(1, 6, 0.75)


def test_where_nobody_waits_nothing_is_left_for_others() -> None:
    room(max_requests=8, max_tokens=100).reserve(8, 100, 0.1)
    with pytest.raises(QueueFull):
        room(max_requests=8).reserve(9, 9, 0.1)
