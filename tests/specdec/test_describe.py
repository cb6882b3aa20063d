"""What speculation costs, as the server tells it."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq

from kvcache.table import BlockTable
from specdec.describe import SHOWN_ROWS, describe_speculation, drafter_memory
from specdec.draft_length.cost import StepCost
from specdec.drafters.base import DraftRequest
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.params import SamplingParams
from specdec.sequence import Sequence


class Costly:
    """Drafts nothing, at a price."""

    name = "costly"

    def __init__(self) -> None:
        self.seconds = 0.5

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        return [[] for _ in requests]

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass

    def round_seconds(self, rows: int) -> float:
        return self.seconds * rows

    def num_missing(self, sequence: Sequence) -> int:
        return 0


def test_each_drafter_tells_the_costs_it_has() -> None:
    suffix = SuffixDrafter(vocab_size=10)
    told = describe_speculation({"ngram": NgramDrafter(vocab_size=10), "suffix": suffix, "costly": Costly()}, None)
    none = {"memory_bytes": None, "max_memory_bytes": None, "round_seconds": None}
    assert told == {
        "drafters": [
            {"name": "ngram", **none},
            {"name": "suffix", **none, "memory_bytes": 0, "max_memory_bytes": suffix.max_memory_bytes},
            {
                "name": "costly",
                **none,
                "round_seconds": [{"rows": rows, "seconds": 0.5 * rows} for rows in SHOWN_ROWS],
            },
        ],
        "step_seconds": None,
    }
    assert json.loads(json.dumps(told)) == told


def test_the_numbers_are_those_of_now() -> None:
    suffix, costly, cost = SuffixDrafter(vocab_size=50), Costly(), StepCost([(1, 0.01), (8, 0.02), (64, 0.1)])
    drafters = {"suffix": suffix, "costly": costly}
    before = describe_speculation(drafters, cost)
    read = drafter_memory(drafters)
    assert set(read) == {"suffix"}
    assert read["suffix"]() == 0
    assert before["step_seconds"][0] == {"rows": 1, "seconds": 0.01}
    sequence = Sequence(0, list(range(20)), SamplingParams(seed=0), BlockTable(16, b"", private=False))
    suffix.propose([DraftRequest(sequence, 4)])
    costly.seconds = 0.25
    for _ in range(100):
        cost.observe(1, 0.015)
    after = describe_speculation(drafters, cost)
    assert after["drafters"][0]["memory_bytes"] == read["suffix"]() > 0
    assert after["drafters"][1]["round_seconds"][0] == {"rows": 1, "seconds": 0.25}
    assert after["step_seconds"][0]["seconds"] > 0.012
