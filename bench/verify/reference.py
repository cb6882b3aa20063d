"""Greedy ids against transformers' own ``generate``: float32, batch 1, on the same checkpoint.

Two programs that sum in different orders may differ where the reference's best two logits nearly tie. Such a difference
is allowed only if they are within NEAR_TIE; after it the comparison goes on teacher-forced (the reference's tokens
become part of the prompt). Near ties are counted and may be at most NEAR_TIE_SHARE of the positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.offline import OfflineConfig, run_offline
from model.interface import Executor
from model.quiet import quiet_transformers
from specdec.params import SamplingParams

NEAR_TIE = 1e-3
NEAR_TIE_SHARE = 0.01
RULE = f"the reference's best two logits within {NEAR_TIE:g}; at most {NEAR_TIE_SHARE:.0%} of the positions"


@dataclass(frozen=True, slots=True)
class ReferencePrompt:
    kind: str
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Reference:
    """What ``generate`` said."""

    prompt: ReferencePrompt
    token_ids: list[int]
    gaps: list[float]  # best logit minus second best, at each output position


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A difference that no near tie explains."""

    prompt: int
    output_index: int
    expected: list[int]
    got: list[int]
    gap: float


@dataclass(frozen=True, slots=True)
class Outcome:
    positions: int
    near_ties: int
    mismatches: tuple[Mismatch, ...]

    @property
    def passed(self) -> bool:
        return not self.mismatches and self.near_ties <= NEAR_TIE_SHARE * self.positions


def generate_references(
    folder: Path,
    prompts: Sequence[ReferencePrompt],
    stop_token_ids: Sequence[int],
    done: Callable[[int], None] = lambda tokens: None,
) -> list[Reference]:
    """Load the checkpoint in ``folder`` with transformers and let it ``generate``; ``done`` gets each token count."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    with quiet_transformers():
        hf: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        # A checkpoint's own generation config may sample or penalise.
        stops = list(stop_token_ids)
        hf.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=stops or None, pad_token_id=stops[0] if stops else None
        )
        references = []
        for prompt in prompts:
            with torch.inference_mode():
                out = hf.generate(
                    torch.tensor([prompt.token_ids]),
                    attention_mask=torch.ones(1, len(prompt.token_ids), dtype=torch.long),
                    max_new_tokens=prompt.max_tokens,
                    return_dict_in_generate=True,
                    output_logits=True,
                )
            best = [torch.topk(logits[0], 2).values for logits in out.logits]
            ids = out.sequences[0, len(prompt.token_ids) :].tolist()
            references.append(Reference(prompt, ids, [float(b[0] - b[1]) for b in best]))
            done(prompt.max_tokens)
    return references


def compare_with_references(
    executor: Executor,
    references: Sequence[Reference],
    stop_token_ids: Sequence[int],
    config: OfflineConfig,
    *,
    batch: int,
) -> Outcome:
    """Answer every prompt with our engine, ``batch`` at a time. The executor's dtype should be float32."""
    done = [0] * len(references)
    ties = 0
    mismatches: list[Mismatch] = []
    pending = list(range(len(references)))
    while pending:
        requests = [_request(references[i], done[i], stop_token_ids) for i in pending]
        answers = run_offline(executor, config, requests, batch=batch)
        still: list[int] = []
        for i, answer in zip(pending, answers, strict=True):
            expected = references[i].token_ids[done[i] :]
            got = list(answer.token_ids)
            if got == expected:
                continue
            at = _first_difference(expected, got)
            gap = references[i].gaps[min(done[i] + at, len(references[i].gaps) - 1)]
            if gap > NEAR_TIE:
                mismatches.append(Mismatch(i, done[i] + at, expected, got, gap))
                continue
            ties += 1
            done[i] += at + 1
            if done[i] < len(references[i].token_ids):
                still.append(i)
        pending = still
    return Outcome(sum(len(reference.token_ids) for reference in references), ties, tuple(mismatches))


def _request(reference: Reference, done: int, stops: Sequence[int]) -> tuple[list[int], SamplingParams]:
    prompt = [*reference.prompt.token_ids, *reference.token_ids[:done]]
    left = len(reference.token_ids) - done
    return prompt, SamplingParams(seed=0, max_tokens=left, temperature=0.0, stop_token_ids=frozenset(stops))


def _first_difference(expected: Sequence[int], got: Sequence[int]) -> int:
    pairs = enumerate(zip(got, expected, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
