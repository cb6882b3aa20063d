"""Subjects of the exactness suite: an executor with the requests it is asked, and how a condition is run on it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.offline import Completion, OfflineEngine, blocks_for
from bench.prompts import VARIED
from kvcache.manager import KVCacheManager
from model.interface import Executor
from model.tokenizer import Tokenizer
from specdec.drafters.base import Drafter, DraftRequest
from specdec.drafters.synthetic import OracleDrafter, WrongDrafter
from specdec.noise import mix_seed
from specdec.params import SamplingParams
from specdec.plan import StepStats
from specdec.sequence import Sequence as TokenSequence
from tests.exactness.conditions import REFERENCE, Condition


class CheckedEngine(OfflineEngine):
    """Looks after every step whether positions, tokens and blocks are in step."""

    def after_step(self) -> None:
        self.scheduler.check_integrity()
        for sequence in self.scheduler.running_sequences():
            surplus = len(sequence.table.blocks) - -(-len(sequence.tokens) // self.manager.block_size)
            assert surplus <= 0, f"sequence {sequence.seq_id} keeps {surplus} blocks of rejected drafts"


Request = tuple[list[int], SamplingParams]


class RecallDrafter:
    """Proposes a request's known answer with some tokens spoiled: the same ones whatever its seq_id and its company."""

    name = "recall"

    def __init__(self, requests: Sequence[Request], answers: Sequence[Completion], vocab_size: int) -> None:
        self._known = {(tuple(p), params.seed): a.token_ids for (p, params), a in zip(requests, answers, strict=True)}
        self._vocab_size = vocab_size

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._propose(request.sequence, request.max_drafts) for request in requests]

    def _propose(self, sequence: TokenSequence, limit: int) -> list[int]:
        right = self._known[tuple(sequence.tokens[: sequence.num_prompt_tokens]), sequence.params.seed]
        done = sequence.num_output_tokens
        wrong = (token * (done + i) % 3 == 1 for i, token in enumerate(right[done : done + limit]))
        return [(t + w) % self._vocab_size for t, w in zip(right[done : done + limit], wrong, strict=True)]

    def update(self, sequence: TokenSequence, num_emitted: int) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass


def sampling_variants(max_tokens: int, stop_token_ids: frozenset[int]) -> list[SamplingParams]:
    """One SamplingParams for each way in which a token can be chosen."""
    base = SamplingParams(seed=0, max_tokens=max_tokens, temperature=1.0, logprobs=3, stop_token_ids=stop_token_ids)
    often = frozenset(range(4, 2**16, 9))  # one token in nine ends it, be it drafted, recovered or bonus
    changes: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {},
        {"temperature": 0.0, "frequency_penalty": 0.8, "presence_penalty": 0.4},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"top_k": 20, "min_p": 0.02},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 50, "top_p": 0.95, "presence_penalty": -0.5},
        {"temperature": 0.0, "logit_bias": ((5, 2.0), (11, -100.0))},
        {"min_tokens": 5, "temperature": 0.5},
        {"stop_token_ids": often},
        {"temperature": 0.0, "presence_penalty": 0.1, "stop_token_ids": often},
    )
    return [dataclasses.replace(base, seed=mix_seed(2026, i), **change) for i, change in enumerate(changes)]


@dataclass
class Subject:
    """``requests`` run on ``executor``; reference answers are computed once."""

    name: str
    executor: Executor
    requests: list[Request]
    _references: dict[int | None, list[Completion]] = field(default_factory=dict)
    _steps: list[StepStats] = field(default_factory=list)

    def limited(self, max_output: int | None) -> list[Request]:
        if max_output is None:
            return self.requests
        return [(p, dataclasses.replace(s, max_tokens=min(s.max_tokens, max_output))) for p, s in self.requests[:6]]

    def reference(self, condition: Condition, max_output: int | None) -> list[Completion]:
        if max_output not in self._references:
            alone = dataclasses.replace(condition, max_output=max_output)
            self._references[max_output] = run_condition(self, alone)
        return self._references[max_output]

    def record(self, steps: list[StepStats]) -> None:
        self._steps += steps

    def speculation_counts(self) -> StepStats:
        """Sums over every step run on this subject so far; runs one speculative condition if there was none."""
        if not any(step.num_drafted for step in self._steps):
            run_condition(self, Condition("drafts of which some are wrong", oracle_errors=0.3))
        return StepStats(
            num_drafted=sum(step.num_drafted for step in self._steps),
            num_accepted=sum(step.num_accepted for step in self._steps),
            rollback_tokens=sum(step.rollback_tokens for step in self._steps),
        )


def build_requests(prompts: list[list[int]], max_tokens: int, stop_token_ids: frozenset[int]) -> list[Request]:
    variants = sampling_variants(max_tokens, stop_token_ids)
    return [(prompt, variants[i % len(variants)]) for i, prompt in enumerate(prompts)]


def encoded_prompts(tokenizer: Tokenizer, *, longest: int, count: int) -> list[list[int]]:
    """The varied prompts of at most ``longest`` tokens, ``count`` of them spread over all classes."""
    encoded = [tokenizer.encode(prompt.text, add_special_tokens=False) for prompt in VARIED]
    fitting = [ids for ids in encoded if len(ids) <= longest]
    stride = max(1, len(fitting) // count)
    return fitting[::stride][:count]


def run_condition(subject: Subject, condition: Condition) -> list[Completion]:
    """The answers to ``subject.requests`` (in their order) under ``condition``; nothing may be left behind."""
    requests = subject.limited(condition.max_output)
    config = condition.config
    lookahead = config.num_speculative_tokens + config.block_size
    blocks = blocks_for(requests, config.block_size, lookahead)
    if condition.tight_pool:
        blocks = max(blocks_for([request], config.block_size, lookahead) for request in requests) + 2
    torch.set_num_threads(condition.threads)
    order = list(range(len(requests)))
    if condition.reverse:
        order.reverse()
    drafter: Drafter | None = None
    if condition.oracle_errors is not None:
        known = subject.reference(REFERENCE, condition.max_output)
        answers_by_seq = {seq_id: known[i].token_ids for seq_id, i in enumerate(order)}
        drafter = WrongDrafter(
            OracleDrafter(answers_by_seq), 5, subject.executor.info.vocab_size, error_rate=condition.oracle_errors
        )
    engine = CheckedEngine(subject.executor, config, num_blocks=blocks, drafter=drafter)
    answers: dict[int, Completion] = {}
    for _ in range(2 if condition.warm else 1):
        for first in range(0, len(order), condition.batch):
            group = order[first : first + condition.batch]
            answers.update(zip(group, engine.generate([requests[i] for i in group]), strict=True))
    engine.check_clean()
    subject.record(engine.steps)
    if condition.warm:
        assert any(answer.num_cached_tokens for answer in answers.values())
    if condition.oracle_errors == 0.0:
        assert sum(step.num_accepted for step in engine.steps) == sum(step.num_drafted for step in engine.steps) > 0
    if condition.tight_pool:
        assert engine.num_preemptions > 0
    return [answers[i] for i in range(len(requests))]


def shuffle_blocks(manager: KVCacheManager, seed: int) -> None:
    """Let the pool, of which nothing is in use, give out its blocks in another order."""
    tables = [manager.new_table() for _ in range(manager.num_blocks)]
    for table in tables:
        assert manager.reserve(table, 1)
    random.Random(seed).shuffle(tables)
    for table in tables:
        manager.free(table)
