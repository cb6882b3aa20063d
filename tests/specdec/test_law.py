"""The law of emitted tokens is the processed distribution, for every parameter, at every position, with any drafts.

Two legs. Keyed sampling is run for ``NUMBER`` seeds at once and its paths of ``DEPTH`` tokens are G-tested against the
exact law, enumerated from first principles. And what the step emits is, token for token, what that sampling gives for
the same seed: a step whose law were off by 0.02 with one of the drafters would differ on 1 of 50 of its paths or more,
and the ``COUPLED`` paths of each drafter show that with probability ``POWER``.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from model.kernels import get_kernels
from specdec.drafters.base import Drafter
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.synthetic import OracleDrafter, RandomDrafter, WrongDrafter
from specdec.params import SamplingParams
from specdec.sampling import Sampler
from tests.specdec.builders import Bench
from tests.specdec.gtest import ALPHA, DETECTED_TV, POWER, Family, p_value, worst_power
from tests.specdec.keyed import (
    Floats,
    Paths,
    Seeds,
    count_paths,
    keyed_paths,
    path_law,
    seed_range,
    uniforms_of,
    winners,
)
from tests.specdec.law_cases import BASE, CASES, DEPTH, PROMPT, TARGET, VOCAB
from tests.specdec.laws import naive_law
from tests.specdec.table_model import TableExecutor

NUMBER = 2**17  # paths a G-test sees
FIRST_SEED = 2**63 - NUMBER // 2  # adjacent seeds, across the sign bit of a 64-bit integer
COUPLED = 228  # of these seeds, run through the step by each drafter: a fault may show with one of them only
PATHS_OFF = [name for name in CASES if name not in ("temperature 1", "stop tokens")]

Law = dict[tuple[int, ...], float]


@functools.cache
def seeds() -> Seeds:
    return seed_range(NUMBER, FIRST_SEED)


@functools.cache
def noise() -> Floats:
    """``[NUMBER, DEPTH, VOCAB]``."""
    return np.stack([uniforms_of(seeds(), t, range(VOCAB)) for t in range(DEPTH)], axis=1)


@functools.cache
def paths(name: str) -> Paths:
    return keyed_paths(TARGET.logits_of, CASES[name], PROMPT, noise())


@functools.cache
def law(name: str) -> Law:
    return path_law(TARGET.logits_of, CASES[name], PROMPT, DEPTH)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.case("H 47932")
def test_paths_follow_the_exact_joint_law(name: str, family: Family) -> None:
    family.follows(f"paths, {name}", *count_paths(paths(name), law(name)))


@pytest.mark.parametrize("name", CASES)
def test_each_joint_test_sees_an_error_of_two_percent(name: str) -> None:
    _, probabilities = count_paths(paths(name), law(name))
    assert worst_power(probabilities, NUMBER, DETECTED_TV) >= POWER


@pytest.mark.parametrize("name", CASES)
def test_the_first_token_follows_its_exact_law(name: str, family: Family) -> None:
    exact = naive_law(TARGET.logits_of(PROMPT).tolist(), CASES[name], PROMPT, len(PROMPT))
    family.follows(f"first token, {name}", np.bincount(paths(name)[:, 0], minlength=VOCAB), exact)


@pytest.mark.parametrize("name", PATHS_OFF)
def test_a_parameter_that_is_ignored_is_seen(name: str) -> None:
    stops = CASES[name].stop_token_ids
    ignored = "stop tokens" if stops else "temperature 1"
    assert p_value(*count_paths(paths(ignored), law(name))) < ALPHA


DRAFTERS = ["none", "ngram", "random", "oracle with errors"]


def make_drafter(name: str, known: Paths, vocab: int) -> Drafter | None:
    if name == "none":
        return None
    if name == "ngram":
        return NgramDrafter(vocab_size=vocab)
    if name == "random":
        return RandomDrafter(3, vocab)
    return WrongDrafter(OracleDrafter(dict(enumerate(known.tolist()))), 5, vocab, error_rate=0.25)


def run_step(
    target: TableExecutor,
    params: SamplingParams,
    prompt: list[int],
    some: Seeds,
    drafter: Drafter | None,
    sampler: Sampler | None,
) -> tuple[list[list[int]], int, int]:
    """Emitted ids by seed, drafts proposed, drafts accepted."""
    bench = Bench(
        target,
        drafter=drafter,
        k=3 if drafter else 0,
        block_size=32,
        num_blocks=len(some) * (-(-(len(prompt) + params.max_tokens + 4) // 32) + 1),
        sampler=sampler or Sampler(),
    )
    for seed in some.tolist():
        bench.add(prompt, replace(params, seed=seed))
    results = bench.run()
    drafted = sum(step.stats.num_drafted for step in bench.steps)
    accepted = sum(step.stats.num_accepted for step in bench.steps)
    return [result.token_ids for result in results.values()], drafted, accepted


def test_the_coupling_sees_an_error_of_two_percent_that_shows_with_one_drafter_only() -> None:
    assert 1.0 - (1.0 - DETECTED_TV) ** COUPLED >= POWER >= 0.99


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", CASES)
def test_the_step_emits_the_keyed_paths_with_any_drafts(name: str, drafter: str) -> None:
    first = COUPLED * DRAFTERS.index(drafter)  # other seeds for each drafter
    some = slice(first, first + COUPLED)
    expected = keyed_paths(TARGET.logits_of, CASES[name], PROMPT, noise()[some], law_of="reference")
    sampler = Sampler(get_kernels()) if DRAFTERS.index(drafter) % 2 else None  # both paths of plain parameters
    found, drafted, accepted = run_step(
        TARGET, CASES[name], PROMPT, seeds()[some], make_drafter(drafter, expected, VOCAB), sampler
    )
    assert found == [path[path >= 0].tolist() for path in expected]
    assert (drafted > 0) == (drafter != "none")
    assert accepted < drafted or not drafted


LONG = 128  # output tokens
SEQUENCES = 136  # by drafter
LATE_TARGET = TableExecutor(VOCAB, periods=1, seed=8)  # the last token alone decides: a Markov chain
LATE = replace(BASE, max_tokens=LONG, temperature=1.2, min_p=0.1)


def late_laws() -> Floats:
    """The law of the next token by the last: [V, V]."""
    return np.array([naive_law(LATE_TARGET.logits_of([v]).tolist(), LATE, [v], 1) for v in range(VOCAB)])


def chains(some: Seeds) -> Paths:
    """The keyed chains of ``LONG`` tokens after ``PROMPT``."""
    laws = late_laws()
    tokens = np.full(len(some), PROMPT[-1])
    found = []
    for t in range(LONG):
        tokens = winners(uniforms_of(some, t, range(VOCAB)), laws[tokens])
        found.append(tokens)
    return np.stack(found, axis=1)


def test_late_tokens_of_the_step_follow_the_law_given_the_token_before(family: Family) -> None:
    table = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    for i, drafter in enumerate(DRAFTERS):
        some = seed_range(SEQUENCES, 1000 * i)
        expected = chains(some)
        found, _, _ = run_step(
            LATE_TARGET, LATE, PROMPT, some, make_drafter(drafter, expected, VOCAB), Sampler(get_kernels())
        )
        assert found == expected.tolist()
        emitted = np.array(found)
        np.add.at(table, (emitted[:, :-1], emitted[:, 1:]), 1)
    visits = table.sum(axis=1)
    # Given its past each token is a fresh draw: the rows together are one law over (last, next), visits given.
    joint = late_laws() * (visits / visits.sum())[:, None]
    assert worst_power(joint.ravel(), int(visits.sum())) >= POWER
    family.follows("late tokens", table.ravel(), joint.ravel(), fitted=VOCAB - 1)
