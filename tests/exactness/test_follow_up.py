"""A follow-up repeats the first prompt and its answer, which the prefix cache holds: its own answer is the cold one.

What the cache holds of an answer was written by verify forwards, beside rejected drafts, and ends before the last
token, whose KV nobody wrote.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from bench.offline import Completion, OfflineConfig, blocks_for, run_offline
from specdec.drafters.synthetic import OracleDrafter, WrongDrafter
from tests.exactness.builders import CheckedEngine, Request, Subject
from tests.exactness.conditions import REFERENCE

K = 6
TURNS = 6


@dataclass(frozen=True, slots=True)
class Talk:
    first: list[Request]
    answers: list[Completion]
    second: list[Request]  # prompt, answer and one more token
    cold: list[Completion]


@pytest.fixture(scope="session")
def talk(subject: Subject) -> Talk:
    first = subject.requests[:TURNS]
    answers = subject.reference(REFERENCE, None)[:TURNS]
    second = [
        ([*prompt, *answer.token_ids, 7], dataclasses.replace(params, max_tokens=5))
        for (prompt, params), answer in zip(first, answers, strict=True)
    ]
    return Talk(first, answers, second, run_offline(subject.executor, REFERENCE.config, second, batch=1))


@pytest.mark.parametrize(("block_size", "k"), [(1, K), (4, 0), (4, K), (16, K)])
@pytest.mark.case("tenstorrent 415", "V 18668")
def test_a_follow_up_from_the_cache_equals_itself_cold(subject: Subject, talk: Talk, block_size: int, k: int) -> None:
    known = {i: completion.token_ids for i, completion in enumerate(talk.answers + talk.cold)}
    drafter = WrongDrafter(OracleDrafter(known), 4, subject.executor.info.vocab_size, error_rate=0.3)
    config = OfflineConfig(block_size=block_size, num_speculative_tokens=k)
    blocks = blocks_for(talk.first + talk.second, block_size, K + block_size)
    engine = CheckedEngine(subject.executor, config, num_blocks=blocks, drafter=drafter)
    assert engine.generate(talk.first) == talk.answers
    warm = engine.generate(talk.second)
    engine.check_clean()
    assert warm == talk.cold
    for (prompt, _), answer, found in zip(talk.first, talk.answers, warm, strict=True):
        written = len(prompt) + len(answer.token_ids) - 1
        assert found.num_cached_tokens == written // block_size * block_size
    if k:
        assert sum(step.rollback_tokens for step in engine.steps) > 0
