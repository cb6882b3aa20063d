"""Requests that run together on the same cached blocks, and end one after the other: each answer is the one from alone.

The pool is so small that blocks which are given back are written again at once.
"""

from __future__ import annotations

import dataclasses

import pytest

from bench.offline import OfflineConfig, run_offline
from tests.exactness.builders import CheckedEngine, RecallDrafter, Subject
from tests.exactness.conditions import REFERENCE

PROMPT = 9  # of the subject's requests: long enough for several blocks
K = 4


@pytest.mark.case("tenstorrent 415")
def test_holders_of_a_shared_prefix_do_not_depend_on_each_other(subject: Subject) -> None:
    prefix = subject.requests[PROMPT][0][:40]
    requests = [
        ([*prefix, i, 2 * i], dataclasses.replace(params, max_tokens=1 + 4 * (i % 3), seed=i))
        for i, (_, params) in enumerate(subject.requests[:9])
    ]
    expected = run_offline(subject.executor, REFERENCE.config, requests, batch=1)
    config = OfflineConfig(block_size=4, num_speculative_tokens=K, max_num_seqs=3)
    drafter = RecallDrafter(requests, expected, subject.executor.info.vocab_size)
    engine = CheckedEngine(subject.executor, config, num_blocks=len(prefix) // 4 + 14, drafter=drafter)
    assert engine.generate(requests[:1]) == expected[:1]  # its prefix is in the cache from now on
    found = engine.generate(requests)
    engine.check_clean()
    assert found == expected
    assert all(answer.num_cached_tokens >= len(prefix) // 4 * 4 for answer in found)
