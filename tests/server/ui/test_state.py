"""The numbers of /ui/state, from steps that a test makes up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.service import Service
from server.ui.feed import Feed
from server.ui.state import WINDOW_SECONDS, Drafts, state
from tests.server.ui.records import Clock, got, record

DRAFTS = st.lists(
    st.integers(0, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))), max_size=40
)


def fed(*drafts: tuple[int, int], per_step: int = 3) -> Feed:
    feed = Feed()
    for start in range(0, len(drafts), per_step):
        some = drafts[start : start + per_step]
        feed.observe(
            record(*(got(key, right + 1, drafted, right, "suffix") for key, (drafted, right) in enumerate(some)))
        )
    return feed


@given(DRAFTS)
def test_a_share_counts_the_drafts_that_got_so_far_among_those_that_are_so_long(drafts: list[tuple[int, int]]) -> None:
    shares = Drafts(fed(*drafts).newest()).shares
    assert len(shares) == max((drafted for drafted, _ in drafts), default=0)
    for i, share in enumerate(shares, start=1):
        longer = [right for drafted, right in drafts if drafted >= i]
        assert share == sum(right >= i for right in longer) / len(longer)


@given(DRAFTS)
def test_the_acceptance_length_is_of_drafts_alone(drafts: list[tuple[int, int]]) -> None:
    found = Drafts(fed(*drafts).newest()).acceptance_length
    rights = [right for drafted, right in drafts if drafted]
    assert found == (1 + sum(rights) / len(rights) if rights else None)


def test_only_the_newest_sequences_are_looked_at() -> None:
    feed = fed(*[(4, 0)] * 300, *[(4, 4)] * 30)
    assert Drafts(feed.newest(), most=30).shares == [1.0] * 4
    assert Drafts(feed.newest(), most=330).shares[0] == pytest.approx(30 / 330)


def test_the_batch_is_that_of_steps_that_brought_tokens() -> None:
    feed = fed(*[(1, 1)] * 12, per_step=4)
    feed.observe(record())
    assert Drafts(feed.newest()).batch == 4
    assert Drafts(iter(())).batch == 1


def test_rates_are_of_the_last_seconds(service: Service) -> None:
    clock = Clock()
    feed = Feed(clock=clock)
    clock.now = 100.0
    feed.observe(record(got(1, 1000)))
    clock.now += WINDOW_SECONDS
    feed.observe(record(got(1, 30)))
    feed.observe(record(got(1, 20)))
    now = state(service, feed)["now"]
    assert now["tokens_per_s"] == 50 / WINDOW_SECONDS
    assert now["expected_speedup"] == 1.5
    clock.now += 2 * WINDOW_SECONDS
    idle = state(service, feed)["now"]
    assert (idle["tokens_per_s"], idle["expected_speedup"]) == (0.0, None)


def test_a_server_that_has_done_nothing_has_an_empty_cache(service: Service) -> None:
    found = state(service, Feed())
    assert found["now"]["kv"] == {"free": 256, "used": 0, "cached": 0, "shared": 0, "fragmentation": 0.0}
    assert found["acceptance"]["by_position"] == []
    assert found["now"]["acceptance_length"] is None
    assert found["recent"] == []


def test_without_a_cost_curve_there_is_no_line(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "speculation", lambda: {"drafters": [], "step_seconds": None})
    assert state(service, fed((3, 1)))["acceptance"]["break_even"] is None


def test_a_costly_drafter_has_to_be_right_more_often(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [{"rows": rows, "seconds": 0.01 + 0.0001 * rows} for rows in (1, 64)]

    def lines(round_seconds: object) -> list[float]:
        drafters = [{"name": "suffix", "round_seconds": round_seconds}]
        monkeypatch.setattr(service, "speculation", lambda: {"drafters": drafters, "step_seconds": points})
        found: list[float] = state(service, fed((3, 1), (3, 3)))["acceptance"]["break_even"]
        return found

    cheap, costly = lines(None), lines([{"rows": 1, "seconds": 0.002}, {"rows": 8, "seconds": 0.003}])
    assert all(dear > free for dear, free in zip(costly, cheap, strict=True))
