"""How far a model is from another of the same vocabulary: on a text, and in greedy answers to the frozen prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.offline import OfflineConfig, run_offline
from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.interface import Executor
from specdec.params import SamplingParams

TEXT = Path(__file__).with_name("text.txt")  # written for this purpose, so no model has seen it
_WINDOW = 1024  # tokens of the text that are read together
_ROWS = 256  # of logits that are compared at a time
_BLOCK = 16

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OnText:
    """On one text, against a reference."""

    tokens: int  # that were predicted
    perplexity: float
    reference_perplexity: float
    same_best: float  # share of tokens at which both models' most likely token is the same
    divergence: float  # mean KL divergence from the reference's distribution, in nats


@dataclass(frozen=True, slots=True)
class OnAnswers:
    """Greedy answers to prompts, against the reference's."""

    prompts: int
    tokens: int  # of each answer
    same_prefix: float  # mean share of the answer before the first token that differs
    same_answers: float  # share of answers in which none differs
    same_best: float  # share of tokens that it would choose as well, after the reference's tokens


@dataclass(frozen=True, slots=True)
class Answers:
    prompts: tuple[Ids, ...]
    outputs: tuple[Ids, ...]


class TextLogits:
    """Logits of one executor on a text, window by window; binds a storage of its own."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def of(self, ids: Sequence[int]) -> Tensor:
        """``[len(ids) - 1, V]`` float32 of one window: row i is what follows ``ids[:i + 1]``."""
        blocks = -(-len(ids) // _BLOCK)
        storage = KVStorage(
            self._executor.planes, num_blocks=blocks, block_size=_BLOCK, device=self._executor.info.device
        )
        self._executor.bind(storage)
        parts = []
        for first in range(0, len(ids) - 1, _ROWS):
            span = RowSpan(list(ids[first : min(first + _ROWS, len(ids) - 1)]), first, list(range(blocks)), 0)
            batch = PackedBatch.build([span], block_size=_BLOCK, scratch_block=storage.scratch_block)
            parts.append(self._executor.forward(batch).logits)
        return torch.cat(parts)


def on_text(executor: Executor, reference: Executor, ids: Sequence[int]) -> OnText:
    """Both executors on ``ids``, cut into windows that each begin without a context. Re-binds them."""
    nats = reference_nats = divergence = 0.0
    same = count = 0
    for window in _windows(ids, min(_WINDOW, executor.info.max_model_len)):
        pairs = (TextLogits(executor).of(window), TextLogits(reference).of(window))
        following = torch.tensor(window[1:])
        for first in range(0, len(following), _ROWS):
            own, other = (torch.log_softmax(logits[first : first + _ROWS].double(), -1) for logits in pairs)
            wanted = following[first : first + _ROWS, None]
            nats -= float(own.gather(1, wanted).sum())
            reference_nats -= float(other.gather(1, wanted).sum())
            divergence += float((other.exp() * (other - own)).sum())
            same += int((own.argmax(-1) == other.argmax(-1)).sum())
        count += len(following)
    return OnText(count, math.exp(nats / count), math.exp(reference_nats / count), same / count, divergence / count)


def _windows(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(ids) - 1, size):
        if len(window := ids[first : first + size]) > 1:
            yield window


def greedy_answers(executor: Executor, prompts: Sequence[Ids], tokens: int, *, batch: int = 8) -> Answers:
    """``tokens`` greedy tokens for each prompt, end-of-text ignored. Re-binds ``executor``."""
    params = SamplingParams(seed=0, max_tokens=tokens, temperature=0.0)
    config = OfflineConfig(num_speculative_tokens=0, ledger=False)
    done = run_offline(executor, config, [(prompt, params) for prompt in prompts], batch=batch)
    return Answers(tuple(prompts), tuple(completion.token_ids for completion in done))


def on_answers(executor: Executor, reference: Answers) -> OnAnswers:
    """``executor``'s own answers, and its choice after the reference's tokens. Re-binds it."""
    tokens = len(reference.outputs[0])
    own = greedy_answers(executor, reference.prompts, tokens).outputs
    prefixes = [_common(one, other) / tokens for one, other in zip(own, reference.outputs, strict=True)]
    same = 0
    for prompt, output in zip(reference.prompts, reference.outputs, strict=True):
        logits = TextLogits(executor).of((*prompt, *output))[len(prompt) - 1 :]
        same += int((logits.argmax(-1) == torch.tensor(output)).sum())
    return OnAnswers(
        prompts=len(own),
        tokens=tokens,
        same_prefix=sum(prefixes) / len(own),
        same_answers=sum(share == 1.0 for share in prefixes) / len(own),
        same_best=same / (tokens * len(own)),
    )


def _common(one: Ids, other: Ids) -> int:
    """Tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
