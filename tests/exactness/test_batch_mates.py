"""Who runs beside a request changes neither its answer nor how many of its drafts are accepted."""

from __future__ import annotations

import random

import pytest

from bench.offline import Completion, OfflineConfig, blocks_for, run_offline
from model.kernels import get_kernels
from specdec.sampling import Sampler
from tests.exactness.builders import CheckedEngine, RecallDrafter, Request, Subject
from tests.exactness.conditions import REFERENCE
from tests.specdec.builders import Bench

K = 4


@pytest.fixture(scope="module")
def alone(quick_subject: Subject) -> list[Completion]:
    return run_offline(quick_subject.executor, REFERENCE.config, quick_subject.requests, batch=1)


@pytest.mark.case("H 29769")
def test_batches_of_1_to_32_give_each_request_its_own_answer(quick_subject: Subject, alone: list[Completion]) -> None:
    requests, rng = quick_subject.requests, random.Random(32)
    config = OfflineConfig(num_speculative_tokens=K)
    for size in range(1, 33):
        chosen = rng.sample(range(len(requests)), size)  # other mates, in another order, every time
        engine = CheckedEngine(
            quick_subject.executor, config, num_blocks=blocks_for(requests, config.block_size, K + config.block_size)
        )
        assert engine.generate([requests[i] for i in chosen]) == [alone[i] for i in chosen], chosen
        engine.check_clean()


def _speculation(subject: Subject, requests: list[Request], answers: list[Completion]) -> list[list[tuple[int, int]]]:
    """(drafted, accepted) of every step of each request, run together; some drafts are wrong."""
    drafter = RecallDrafter(requests, answers, subject.executor.info.vocab_size)
    bench = Bench(subject.executor, drafter=drafter, k=K, sampler=Sampler(get_kernels()))
    for prompt, params in requests:
        bench.add(prompt, params)
    bench.run()
    counts: list[list[tuple[int, int]]] = [[] for _ in requests]
    for step in bench.steps:
        for output in step.outputs:
            counts[output.seq_id].append((output.num_drafted, output.num_accepted))
    return counts


@pytest.mark.case("L 27117")
def test_acceptance_does_not_depend_on_batch_mates(quick_subject: Subject, alone: list[Completion]) -> None:
    requests, rng = quick_subject.requests[:12], random.Random(12)
    by_itself = [_speculation(quick_subject, [requests[i]], [alone[i]])[0] for i in range(len(requests))]
    assert len({tuple(counts) for counts in by_itself}) > 3
    for size in (2, 5, 12, 12):
        chosen = rng.sample(range(len(requests)), size)
        together = _speculation(quick_subject, [requests[i] for i in chosen], [alone[i] for i in chosen])
        assert together == [by_itself[i] for i in chosen]
