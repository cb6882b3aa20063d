"""How often a draft that shares the target's noise is accepted: the formula, its bounds, and what the step does.

Token x wins both races if E_y >= E_x max(p_y / p_x, q_y / q_x) for all y, which has probability
1 / sum over y of max(p_y / p_x, q_y / q_x). That this lies between (1 - TV) / (1 + TV) and 1 - TV: Daliri, Musco and
Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.sampling import sample_token
from specdec.sequence import Sequence
from tests.specdec.builders import Bench, ScriptedDrafter
from tests.specdec.gtest import Family
from tests.specdec.keyed import Floats, seed_range, uniforms_of, winners
from tests.specdec.law_cases import BASE, CASES, PROMPT, TARGET, VOCAB
from tests.specdec.laws import naive_law
from tests.specdec.table_model import TableExecutor
from tests.specdec.test_law import NUMBER

DRAFT = TableExecutor(VOCAB, seed=21)


def match_probability(p: Floats, q: Floats) -> float:
    """Pr[the races under p and q have the same winner] with the same noise."""
    both = [x for x in range(len(p)) if p[x] > 0.0 and q[x] > 0.0]
    return sum(1.0 / float(np.maximum(p / p[x], q / q[x]).sum()) for x in both)


def first_laws(name: str) -> tuple[Floats, Floats]:
    """Laws of target and draft after the prompt, both processed."""
    laws = [
        np.array(naive_law(model.logits_of(PROMPT).tolist(), CASES[name], PROMPT, len(PROMPT)))
        for model in (TARGET, DRAFT)
    ]
    return laws[0], laws[1]


SOME = ["temperature 1", "temperature 0.5", "top_k 3", "all filters", "all penalties", "everything"]
weights = st.lists(st.floats(0.0, 1.0).map(lambda x: x if x > 1e-6 else 0.0), min_size=2, max_size=6)


@given(a=weights, b=weights)
def test_the_formula_lies_within_its_bounds(a: list[float], b: list[float]) -> None:
    size = max(len(a), len(b))
    p, q = (np.array([*w, *[0.0] * (size - len(w))]) for w in (a, b))
    if not p.sum() or not q.sum():
        return
    p, q = p / p.sum(), q / q.sum()
    distance = np.abs(p - q).sum() / 2.0
    assert (1 - distance) / (1 + distance) - 1e-9 <= match_probability(p, q) <= 1 - distance + 1e-9


def test_equal_laws_always_match_and_a_sure_draft_matches_with_its_probability() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    assert match_probability(p, p) == pytest.approx(1.0, abs=1e-15)
    for token in range(4):
        assert match_probability(p, np.eye(4)[token]) == pytest.approx(p[token], abs=1e-15)
    assert match_probability(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 0.0


@pytest.mark.parametrize("name", SOME)
def test_shared_noise_matches_as_often_as_the_formula_says(name: str, family: Family) -> None:
    noise = uniforms_of(seed_range(NUMBER, 9), 0, range(VOCAB))
    p, q = first_laws(name)
    expected = match_probability(p, q)
    matches = int((winners(noise, p) == winners(noise, q)).sum())
    family.follows(f"matches, {name}", [matches, NUMBER - matches], [expected, 1.0 - expected])
    for token in np.flatnonzero(p)[:2].tolist():  # a draft that is not random
        hits = int((winners(noise, p) == token).sum())
        family.follows(f"draft {token}, {name}", [hits, NUMBER - hits], [p[token], 1.0 - p[token]])


SEQUENCES = 300


@pytest.mark.parametrize("name", SOME)
def test_the_step_accepts_a_shared_noise_draft_exactly_where_both_races_have_one_winner(name: str) -> None:
    seeds = seed_range(SEQUENCES, 9)
    noise = uniforms_of(seeds, 0, range(VOCAB))
    p, q = first_laws(name)

    def script(sequence: Sequence, max_drafts: int) -> list[int]:
        row = DRAFT.logits_of(sequence.tokens)
        return [sample_token(row, sequence.params, sequence.tokens, sequence.num_prompt_tokens)]

    bench = Bench(TARGET, drafter=ScriptedDrafter(script), k=1, block_size=16, num_blocks=SEQUENCES)
    for seed in seeds.tolist():
        bench.add(PROMPT, replace(CASES[name], seed=seed, max_tokens=2))
    outputs = bench.run_step().outputs
    assert [output.num_drafted for output in outputs] == [1] * SEQUENCES
    accepted = [output.num_accepted == 1 for output in outputs]
    assert accepted == (winners(noise, p) == winners(noise, q)).tolist()
    assert 0 < sum(accepted) < SEQUENCES


def test_the_target_as_its_own_draft_is_always_accepted() -> None:
    def script(sequence: Sequence, max_drafts: int) -> list[int]:
        tokens = list(sequence.tokens)
        for _ in range(max_drafts):
            row = TARGET.logits_of(tokens)
            tokens.append(sample_token(row, sequence.params, tokens, sequence.num_prompt_tokens))
            if tokens[-1] in sequence.params.stop_token_ids:
                break  # nothing behind it can be emitted
        return tokens[len(sequence.tokens) :]

    bench = Bench(TARGET, drafter=ScriptedDrafter(script), k=3)
    for name in SOME:
        bench.add(PROMPT, replace(CASES[name], max_tokens=12))
    bench.add(PROMPT, replace(BASE, temperature=0.0, max_tokens=12))
    bench.run()
    drafted = sum(step.stats.num_drafted for step in bench.steps)
    assert drafted == sum(step.stats.num_accepted for step in bench.steps) > 0
