"""W3C Trace Context: which parents are read, and which count as none."""

from __future__ import annotations

import pytest

from server.tracing.parent import MAX_STATE, TraceParent, read_parent

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def read(*parents: str, states: tuple[str, ...] = ()) -> TraceParent | None:
    headers = [(b"host", b"x"), *((b"traceparent", each.encode()) for each in parents)]
    return read_parent([*headers, *((b"tracestate", each.encode()) for each in states)])


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        (GOOD, 1),
        (f"  {GOOD}\t", 1),
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-ff", 255),
        (f"01-{TRACE}-{SPAN}-01", 1),  # of a version to come
        (f"cc-{TRACE}-{SPAN}-01-what-will-be-the-future", 1),
    ],
)
def test_a_parent_is_read(value: str, flags: int) -> None:
    assert read(value) == TraceParent(TRACE, SPAN, flags)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        GOOD.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{TRACE}-{SPAN}-01-more",
        f"cc-{TRACE}-{SPAN}-01.future",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01",
        f"00-{TRACE}-{SPAN[:-1]}g-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}",
        f"{GOOD}, {GOOD}",
    ],
)
def test_a_malformed_parent_is_none(value: str) -> None:
    assert read(value) is None


def test_two_parents_are_none() -> None:
    assert read(GOOD, GOOD) is None


def test_a_state_without_a_parent_is_none() -> None:
    assert read(states=("a=1",)) is None


def test_states_are_joined_in_their_order_and_passed_on_as_they_are() -> None:
    found = read(GOOD, states=("rojo=00f067aa0ba902b7 ", "", "congo=t61rcWkgMzE"))
    assert found is not None
    assert found.state == "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"


def test_a_state_that_is_too_long_is_left_out_and_the_parent_stays() -> None:
    found = read(GOOD, states=("a=" + "1" * MAX_STATE,))
    assert found == TraceParent(TRACE, SPAN, 1)
