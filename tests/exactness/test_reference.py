"""Greedy ids equal transformers' own ``generate`` in fp32: alone and in mixed batches of 8, speculation on and off.

The near-tie rule, and its bound, are those of ``truedraft verify`` (bench.verify.reference).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.offline import OfflineConfig
from bench.prompts import VARIED
from bench.verify.reference import (
    NEAR_TIE,
    NEAR_TIE_SHARE,
    Reference,
    ReferencePrompt,
    compare_with_references,
    generate_references,
)
from model.loader import LoadedModel

OUTPUT_TOKENS = 16
LONG_OUTPUT_TOKENS = 8  # after prompts of more than 400 tokens


@pytest.fixture(scope="module")
def references(default_model_folder: Path, smol_fp32: LoadedModel) -> list[Reference]:
    prompts = []
    for prompt in VARIED:
        ids = smol_fp32.tokenizer.encode(prompt.text, add_special_tokens=False)
        count = OUTPUT_TOKENS if len(ids) <= 400 else LONG_OUTPUT_TOKENS
        prompts.append(ReferencePrompt(prompt.kind, tuple(ids), count))
    return generate_references(default_model_folder, prompts, smol_fp32.info.eos_token_ids)


# All prompts in the plainest way and in that with the most in it; a third of them, of every class, in the two between.
@pytest.mark.parametrize(("k", "batch", "stride"), [(0, 1, 1), (4, 8, 1), (4, 1, 3), (0, 8, 3)])
def test_greedy_equals_transformers_generate(
    smol_fp32: LoadedModel, references: list[Reference], batch: int, k: int, stride: int
) -> None:
    config, some = OfflineConfig(num_speculative_tokens=k), references[::stride]
    outcome = compare_with_references(smol_fp32.executor, some, smol_fp32.info.eos_token_ids, config, batch=batch)
    assert outcome.positions > 10 * len(some)
    assert outcome.mismatches == ()
    assert outcome.passed, f"{outcome.near_ties} near ties in {outcome.positions} positions"


def test_the_near_tie_rule_has_teeth(smol_fp32: LoadedModel, references: list[Reference]) -> None:
    """A wrong token is not excused: most positions of the references are far from a tie."""
    gaps = [gap for reference in references for gap in reference.gaps]
    assert sum(gap <= NEAR_TIE for gap in gaps) <= NEAR_TIE_SHARE * len(gaps)
    assert len({tuple(reference.token_ids) for reference in references}) > 25
