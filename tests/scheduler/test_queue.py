"""The order of the waiting queue."""

from __future__ import annotations

import pytest

from kvcache.table import BlockTable
from scheduler.choice import Choice, RequestGroup
from scheduler.queue import WaitingQueue
from specdec.sequence import Sequence
from tests.scheduler.builders import ToyFilter, build_request


def build_choice(arrival: int, *, index: int = 0, priority: int = 0, preempted: bool = False) -> Choice:
    request = build_request(priority=priority)
    sequence = Sequence(arrival, [1], request.choices[0].params, BlockTable(4))
    choice = Choice(RequestGroup(request, arrival), index, sequence, ToyFilter(request, index), 0)
    choice.num_preemptions = int(preempted)
    return choice


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (build_choice(1), build_choice(2)),
        (build_choice(2, priority=-1), build_choice(1)),
        (build_choice(2, preempted=True), build_choice(1)),
        (build_choice(2), build_choice(1, priority=1, preempted=True)),
        (build_choice(1, preempted=True), build_choice(2, preempted=True)),
        (build_choice(1, index=0), build_choice(1, index=1)),
    ],
    ids=["arrival", "priority", "preempted", "priority before preempted", "both preempted", "index"],
)
def test_order(first: Choice, second: Choice) -> None:
    for order in ([first, second], [second, first]):
        queue = WaitingQueue()
        for choice in order:
            queue.push(choice)
        assert list(queue) == [first, second]
        assert queue.head is first
        queue.check_integrity()


def test_only_who_waits_can_be_removed() -> None:
    queue = WaitingQueue()
    queue.push(build_choice(1))
    with pytest.raises(ValueError, match="sequence 2 is not waiting"):
        queue.remove(build_choice(2))
    queue.remove(queue.head)  # type: ignore[arg-type]
    assert len(queue) == 0
    assert queue.head is None
