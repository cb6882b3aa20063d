"""Rate limits: never more than flows in, nothing lost, nobody kept out for ever."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from scheduler.request import ChoiceSpec, ChoiceTiming, EngineRequest
from scheduler.stats import FinishedChoice
from server.rate import (
    CLAIM_SECONDS,
    MAX_WAIT_SECONDS,
    REQUESTS,
    SIZE,
    TOKENS,
    Bucket,
    RateLimited,
    RateLimiter,
    RateLimits,
    unlimited,
)
from specdec.params import SamplingParams


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def build_request(name: str, num_prompt: int, *max_tokens: int) -> EngineRequest:
    choices = tuple(ChoiceSpec(i, SamplingParams(seed=0, max_tokens=most)) for i, most in enumerate(max_tokens))
    return EngineRequest(name, tuple(range(num_prompt)), choices, arrival_time=0.0)


def ended(request: EngineRequest, *num_tokens: int, reason: str = "stop") -> list[FinishedChoice]:
    return [
        FinishedChoice(
            request.request_id,
            i,
            reason,
            ChoiceTiming(0.0, 0.0, 0.0, 0.0, len(request.prompt_token_ids), 0, count),
            0.0,
            last_of_request=i == len(num_tokens) - 1,
        )
        for i, count in enumerate(num_tokens)
    ]


@dataclass
class Limited:
    clock: Clock
    refused: Counter[str]
    limiter: RateLimiter

    def level(self, name: str | None = None) -> float:
        bucket = self.limiter._accounts[name].tokens
        assert bucket is not None
        return bucket.level


def build_limiter(**limits: RateLimits) -> Limited:
    clock, refused = Clock(), Counter[str]()
    by_name: dict[str | None, RateLimits] = {
        name if name != "everybody" else None: each for name, each in limits.items()
    }
    return Limited(clock, refused, RateLimiter(by_name, count=lambda reason: refused.update([reason]), clock=clock))


def test_a_full_bucket_is_spent_at_once_and_fills_within_a_minute() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    assert [bucket.take(20) for _ in range(3)] == [0, 0, 0]
    assert bucket.take(20) == pytest.approx(20)
    clock.now += 19.5
    assert bucket.take(20) == pytest.approx(0.5)
    clock.now += 0.5
    assert bucket.take(20) == 0
    clock.now += 1000
    assert bucket.level == 60


def test_more_than_was_taken_is_owed() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    assert bucket.take(60) == 0
    bucket.give_back(-30)
    assert bucket.level == -30
    assert bucket.take(1) == pytest.approx(31)


def test_behind_a_place_that_nobody_claims_it_is_told_when_that_is_forgotten() -> None:
    clock = Clock()
    bucket = Bucket(120, clock)
    assert bucket.take(13) == 0
    assert bucket.take(120) > 0  # and never comes back
    bucket.give_back(13)  # full: nothing more flows in
    clock.now += bucket.take(1)
    assert bucket.take(1) == 0


class BucketMachine(RuleBasedStateMachine):
    """Against the one law of a bucket: what left it is at most a minute's worth and what flowed in."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.bucket = Bucket(120, self.clock)
        self.taken: list[float] = []
        self.out = 0.0

    @rule(cost=st.integers(1, 120))
    def take(self, cost: int) -> None:
        before = self.bucket.level
        wait = self.bucket.take(cost)
        assert 0 <= wait <= MAX_WAIT_SECONDS
        if wait:
            assert self.bucket.level == before
            return
        assert self.bucket.level == pytest.approx(before - cost)
        self.out += cost
        self.taken.append(cost)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 7.0, 60.0, 1000.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(used=st.floats(0, 1))
    def give_back(self, used: float) -> None:
        if self.taken:
            unused = self.taken.pop() * (1 - used)
            self.bucket.give_back(unused)
            self.out -= unused

    @rule(cost=st.integers(1, 120))
    def who_waits_long_enough_alone_is_taken(self, cost: int) -> None:
        for _ in range(5):  # who found no place in a full line is told a time all the same
            wait = self.bucket.take(cost)
            if not wait:
                self.out += cost
                return
            self.clock.now += math.ceil(wait) + CLAIM_SECONDS / 2
        raise AssertionError("nobody else came, and it was refused again and again")

    @invariant()
    def never_more_than_flowed_in(self) -> None:
        assert self.bucket.level <= 120
        assert self.out <= 120 + 2.0 * (self.clock.now - 100.0) + 1e-3


TestBucket = BucketMachine.TestCase
TestBucket.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


@given(
    large=st.integers(30, 60),  # of 60
    small=st.integers(1, 5),
    step=st.sampled_from([0.1, 0.25, 1.0]),
    late=st.floats(0, CLAIM_SECONDS / 2),
)
@settings(max_examples=60, deadline=None)
def test_a_large_request_is_not_kept_out_by_a_flood_of_small_ones(
    large: int, small: int, step: float, late: float
) -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    while bucket.take(small) == 0:
        pass
    tries = 0
    while (told := bucket.take(large)) > 0:
        tries += 1
        assert tries < 4, "it came each time when it was told to"
        comes = clock.now + math.ceil(told) + late
        while clock.now < comes:
            bucket.take(small)
            clock.now += step
    waited = clock.now
    while bucket.take(small) > 0:  # and afterwards it is their turn again
        clock.now += step
        assert clock.now < waited + MAX_WAIT_SECONDS


def test_who_never_comes_back_takes_nothing_from_the_others() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    for cost in (50, 9):
        bucket.take(cost)
    clock.now += 60 + CLAIM_SECONDS
    assert [bucket.take(1) for _ in range(60)] == [0] * 60


def test_tokens_are_taken_at_admission_and_what_was_not_used_comes_back_at_the_end() -> None:
    limited = build_limiter(everybody=RateLimits(tokens=1000))
    request = build_request("r-0", 30, 100, 100)
    limited.limiter.take_tokens(None, [request])
    assert limited.level() == 1000 - 230
    first, last = ended(request, 40, 100)
    limited.limiter.settle([first])
    assert limited.level() == 1000 - 230
    limited.limiter.settle([last])
    assert limited.level() == 1000 - 30 - 140
    assert limited.limiter.num_charged == 0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 20), min_size=1, max_size=3)), max_size=8),
    st.randoms(use_true_random=False),
)
def test_in_the_end_exactly_what_was_used_is_charged_however_requests_end(
    shapes: list[tuple[int, list[int]]], random: object
) -> None:
    limited = build_limiter(everybody=RateLimits(tokens=10_000))
    used, events = 0, []
    for i, (num_prompt, choices) in enumerate(shapes):
        request = build_request(f"r-{i}", num_prompt, *choices)
        limited.limiter.take_tokens(None, [request])
        if i % 3 == 2:
            limited.limiter.give_back([request])
            events.append(ended(request, *choices))  # the abort of what was not wholly queued is told later
            continue
        outputs = [random.randint(0, most) for most in choices]  # type: ignore[attr-defined]
        used += num_prompt + sum(outputs)
        events.append(ended(request, *outputs, reason=random.choice(["stop", "abort", "error"])))  # type: ignore[attr-defined]
    random.shuffle(events)  # type: ignore[attr-defined]
    for each in events:
        limited.limiter.settle(each)
    assert limited.level() == pytest.approx(10_000 - used)
    assert limited.limiter.num_charged == 0


def test_a_request_larger_than_the_bucket_is_refused_for_good_and_says_why() -> None:
    limited = build_limiter(everybody=RateLimits(tokens=100))
    with pytest.raises(RateLimited, match=r"101 tokens.*100 a minute.*never") as caught:
        limited.limiter.take_tokens(None, [build_request("r", 1, 50, 50)])
    assert caught.value.status == 400
    assert "Retry-After" not in caught.value.headers
    with pytest.raises(RateLimited, match="at least 101"):
        limited.limiter.check_size(None, 101)
    limited.limiter.check_size(None, 100)
    assert limited.refused == {SIZE: 2}
    assert limited.level() == 100


def test_an_open_end_takes_what_the_bucket_holds_and_owes_the_rest() -> None:
    limited = build_limiter(everybody=RateLimits(tokens=100))
    request = build_request("r", 20, 500)
    limited.limiter.take_tokens(None, [request], open_ended=True)
    assert limited.level() == pytest.approx(0)
    with pytest.raises(RateLimited) as caught:
        limited.limiter.take_tokens(None, [build_request("s", 1, 1)])
    assert caught.value.status == 429
    limited.limiter.settle(ended(request, 30))
    assert limited.level() == pytest.approx(50)
    limited.limiter.settle(ended(request, 30))  # told again: it is over
    assert limited.level() == pytest.approx(50)
    limited.clock.now += 60
    limited.limiter.take_tokens(None, [request], open_ended=True)
    limited.limiter.settle(ended(request, 180))
    assert limited.level() == pytest.approx(-100)
    with pytest.raises(RateLimited, match="at least 101"):
        limited.limiter.take_tokens(None, [build_request("t", 100, 500)], open_ended=True)


def test_keys_have_buckets_of_their_own() -> None:
    limited = build_limiter(alice=RateLimits(1, 10), bob=RateLimits(1, 10), carol=RateLimits())
    limited.limiter.take_request("alice")
    limited.limiter.take_tokens("alice", [build_request("a", 5, 5)])
    limited.limiter.take_request("bob")
    limited.limiter.take_tokens("bob", [build_request("b", 5, 5)])
    for name in ("alice", "bob"):
        with pytest.raises(RateLimited) as caught:
            limited.limiter.take_request(name)
        assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
        assert caught.value.kind == "requests"
        assert caught.value.headers["Retry-After"] == "60"
        with pytest.raises(RateLimited) as caught:
            limited.limiter.take_tokens(name, [build_request("c", 1, 1)])
        assert caught.value.kind == "tokens"
        assert caught.value.headers["Retry-After"] == "12"
    for _ in range(100):
        limited.limiter.take_request("carol")
        limited.limiter.take_tokens("carol", [build_request("d", 1000, 1000)])
    assert limited.refused == {REQUESTS: 2, TOKENS: 2}


def test_without_limits_nothing_is_counted() -> None:
    limiter = unlimited()
    limiter.take_request(None)
    limiter.take_tokens(None, [build_request("a", 5, 10**9)])
    assert limiter.num_charged == 0
