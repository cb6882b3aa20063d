"""Two thousand requests through three seats and a tight pool: rows that speculate beside rows that do not."""

from __future__ import annotations

import dataclasses
import random

import pytest

from bench.offline import OfflineConfig, run_offline
from tests.exactness.builders import CheckedEngine, RecallDrafter, Subject
from tests.exactness.conditions import REFERENCE

REQUESTS = 2000
AT_ONCE = 50


@pytest.mark.case("V 5302")
def test_2000_requests_through_three_seats_get_their_own_answers(quick_subject: Subject) -> None:
    rng = random.Random(2000)
    kinds = [
        (prompt[: rng.randint(1, 8)], dataclasses.replace(params, max_tokens=rng.randint(1, 8), logprobs=None, seed=i))
        for i, (prompt, params) in enumerate(quick_subject.requests)
    ]
    alone = run_offline(quick_subject.executor, REFERENCE.config, kinds, batch=1)
    config = OfflineConfig(block_size=1, num_speculative_tokens=4, max_num_seqs=3, max_num_batched_tokens=24)
    drafter = RecallDrafter(kinds, alone, quick_subject.executor.info.vocab_size)
    engine = CheckedEngine(quick_subject.executor, config, num_blocks=17, drafter=drafter)
    for _ in range(REQUESTS // AT_ONCE):
        chosen = [rng.randrange(len(kinds)) for _ in range(AT_ONCE)]
        requests = [
            (prompt, dataclasses.replace(params, num_speculative_tokens=rng.choice((0, None, 1, 4))))
            for prompt, params in (kinds[i] for i in chosen)
        ]
        assert engine.generate(requests) == [alone[i] for i in chosen]
    engine.check_clean()
    assert engine.num_preemptions > 0
    drafted = sum(step.num_drafted for step in engine.steps)
    assert drafted > sum(step.num_accepted for step in engine.steps) > 0
