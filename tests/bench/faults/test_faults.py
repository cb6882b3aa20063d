"""Which fault strikes whom, how often, and how it ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.faults.faults import Fault, Faults, InjectedFault


def strikes(faults: Faults, *marks: int | str) -> bool:
    return faults.take("sample", marks) is not None


def test_nothing_strikes_unless_it_is_armed() -> None:
    faults = Faults()
    faults.pass_by("sample", (1,))
    faults.arm(Fault("draft"))
    faults.pass_by("sample", (1,))


def test_a_fault_strikes_whom_it_matches_alone() -> None:
    faults = Faults()
    faults.arm(Fault("sample", match=7))
    assert not strikes(faults, 6)
    assert strikes(faults, 6, 7)
    assert strikes(faults, 7)


def test_it_lets_some_through_and_strikes_so_often() -> None:
    faults = Faults()
    faults.arm(Fault("sample", match=7, after=2, times=3))
    assert [strikes(faults, 7) for _ in range(7)] == [False, False, True, True, True, False, False]
    (armed,) = faults.armed
    assert (armed.passed, armed.fired) == (7, 3)


def test_one_that_is_spent_leaves_the_way_to_the_next() -> None:
    faults = Faults()
    faults.arm(Fault("sample", times=1))
    faults.arm(Fault("sample", action="hang"))
    assert [armed.fault.action for armed in (faults.take("sample"), faults.take("sample")) if armed] == [
        "raise",
        "hang",
    ]


def test_what_it_raises_holds_what_no_client_may_see() -> None:
    faults = Faults()
    faults.arm(Fault("verify"))
    with pytest.raises(InjectedFault, match=r"/srv/secret.*0xdeadbeef"):
        faults.pass_by("verify")


def test_whoever_hangs_goes_on_when_it_is_cleared() -> None:
    faults = Faults()
    faults.arm(Fault("verify", "hang"))
    passed = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(lambda: (faults.pass_by("verify"), passed.set()))
        while not faults.armed[0].hanging:
            pass
        assert not passed.is_set()
        faults.clear()
        going.result(60)
    assert faults.armed == ()
    assert passed.is_set()


def test_a_hang_may_end_by_itself() -> None:
    faults = Faults()
    faults.arm(Fault("verify", "hang", seconds=0.01))
    faults.pass_by("verify")
    assert faults.armed[0].hanging == 0


@pytest.mark.parametrize("change", [{"times": 0}, {"after": -1}, {"seconds": 0.0}, {"seconds": 3601.0}], ids=str)
def test_numbers_that_mean_nothing_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(change.values())))):
        Fault("verify", **change)  # type: ignore[arg-type]
