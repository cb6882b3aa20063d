"""Faults of verifiers that were seen in the wild or are easy to make; each has another law than the target."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from specdec.params import SamplingParams
from tests.specdec.keyed import Floats
from tests.specdec.laws import naive_law
from tests.specdec.reference_verifiers import (
    Laws,
    Outcome,
    Prefix,
    Verifier,
    block_chances,
    block_verification,
    chain,
    longest_accepted,
    rejection_sampling,
    residual,
    running_products,
)
from tests.specdec.table_model import TableExecutor

VOCAB = 4
K = 2
PROMPT = (1, 0)
TARGET = TableExecutor(VOCAB, seed=1)
DRAFT = TableExecutor(VOCAB, seed=2)
PLAIN = SamplingParams(seed=0)


def laws_of(model: TableExecutor, params: SamplingParams, *, forgotten: int = 0) -> Laws:
    """Processed laws after ``PROMPT``; ``forgotten``: how many of the last drafts the history lacks."""

    def law(prefix: Prefix) -> Floats:
        known = prefix[: max(0, len(prefix) - forgotten)]
        row = model.logits_of([*PROMPT, *prefix])
        return np.array(naive_law(row.tolist(), params, [*PROMPT, *known], len(PROMPT)))

    return law


# -- rejection sampling ----------------------------------------------------------------------------------------------


def residual_not_renormalised(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    """The residual's running sum is searched for a U in (0, 1); where it ends too early, the last token is taken."""
    good = rejection_sampling(drafts, p, q)
    rows = np.maximum(p[:-1] - q, 0.0)
    rows[:, -1] += 1.0 - rows.sum(axis=1)
    return Outcome(good.accepted, np.vstack([rows, p[-1:]]))


def residual_is_the_target(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    return Outcome(rejection_sampling(drafts, p, q).accepted, p)


def residual_from_the_other_side(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    rows = [*(residual(q[i], p[i]) for i in range(len(q))), p[-1]]
    return Outcome(rejection_sampling(drafts, p, q).accepted, np.stack(rows))


def bonus_from_the_row_before(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    good = rejection_sampling(drafts, p, q)
    return Outcome(good.accepted, np.vstack([good.following[:-1], p[-2:-1]]))


def recovered_from_the_row_behind(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    good = rejection_sampling(drafts, p, q)
    rows = [residual(p[i + 1], q[i]) for i in range(len(q))]
    return Outcome(good.accepted, np.stack([*rows, p[-1]]))


def ratio_upside_down(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    chances = [min(1.0, q[i, d] / p[i, d]) if p[i, d] else 1.0 for i, d in enumerate(drafts)]
    return chain(chances, rejection_sampling(drafts, p, q).following)


def ratio_without_the_draft(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    """Right for a greedy draft, whose q is 1; not for a sampled one."""
    return chain([p[i, d] for i, d in enumerate(drafts)], rejection_sampling(drafts, p, q).following)


def accepts_on_equality(bits: int) -> Verifier:
    """``U <= p / q`` with a U of so many bits that may be 0: a token of probability 0 is accepted then."""

    def verifier(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
        grid = 2.0**bits
        ratios = [min(1.0, p[i, d] / q[i, d]) for i, d in enumerate(drafts)]
        chances = [min(1.0, (np.floor(r * grid) + 1.0) / grid) for r in ratios]
        return chain(chances, rejection_sampling(drafts, p, q).following)

    return verifier


def one_draft_too_many(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    """Accepts the first rejected draft as well, and goes on behind it."""
    good = rejection_sampling(drafts, p, q)
    accepted = np.append(0.0, good.accepted[:-1])
    accepted[-1] += good.accepted[-1]
    return Outcome(accepted, p)


def residual_of_raw_laws(raw: Laws) -> Verifier:
    """The ratio test sees the processed target; the residual is taken from the raw one (``raw``)."""

    def verifier(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
        rows = [residual(raw(tuple(drafts[:i])), q[i]) for i in range(len(q))]
        return Outcome(rejection_sampling(drafts, p, q).accepted, np.stack([*rows, p[-1]]))

    return verifier


def bonus_of_raw_laws(raw: Laws) -> Verifier:
    def verifier(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
        good = rejection_sampling(drafts, p, q)
        return Outcome(good.accepted, np.vstack([good.following[:-1], raw(tuple(drafts))[None]]))

    return verifier


# -- block verification ----------------------------------------------------------------------------------------------


def _block(products: list[float], chances: Seq[float], p: Floats, q: Floats, *, weighted: bool = True) -> Outcome:
    weights = products if weighted else [1.0] * len(products)
    rows = [*(residual(weights[i] * p[i], q[i]) for i in range(len(q))), p[-1]]
    return Outcome(longest_accepted(np.clip(chances, 0.0, 1.0).tolist()), np.stack(rows))


def product_not_capped(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    products = [1.0]
    for i, token in enumerate(drafts):
        products.append(products[-1] * p[i, token] / q[i, token])
    return _block(products, block_chances(products, p, q), p, q)


def product_of_the_last_draft_only(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    products = [1.0, *(min(1.0, p[i, d] / q[i, d]) for i, d in enumerate(drafts))]
    return _block(products, block_chances(products, p, q), p, q)


def product_one_draft_late(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    products = [1.0, *running_products(drafts, p, q)[:-1]]
    return _block(products, block_chances(products, p, q), p, q)


def block_residual_without_the_product(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    products = running_products(drafts, p, q)
    return _block(products, block_chances(products, p, q), p, q, weighted=False)


def stops_at_the_first_failure(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    """Leaves the loop where a prefix fails, although a longer one may still succeed."""
    chances = block_chances(running_products(drafts, p, q), p, q)
    return chain(chances, block_verification(drafts, p, q).following)


def block_chance_is_the_product(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    products = running_products(drafts, p, q)
    return _block(products, products[1:], p, q)


# -- what each has to get right --------------------------------------------------------------------------------------

HOT = replace(PLAIN, temperature=2.0)
FILTERED = replace(PLAIN, top_k=2)
PENALISED = replace(PLAIN, presence_penalty=1.0, frequency_penalty=0.5)


def by_depth(*rows: Seq[float]) -> Laws:
    """One law for each length of the prefix, the last for all longer ones."""
    return lambda prefix: np.array(rows[min(len(prefix), len(rows) - 1)])


TRUTH = laws_of(TARGET, PLAIN)
DRAFTED = laws_of(DRAFT, PLAIN)


@dataclass(frozen=True)
class Mutant:
    """``verifier`` is given the laws ``seen``; it should emit ``truth``."""

    verifier: Verifier
    truth: Laws = TRUTH
    seen: Laws | None = None  # None: the truth
    draft: Laws = DRAFTED


MUTANTS = {
    "residual not renormalised": Mutant(residual_not_renormalised),
    "residual is the target": Mutant(residual_is_the_target),
    "residual max(q - p, 0)": Mutant(residual_from_the_other_side),
    "bonus token from the row before": Mutant(bonus_from_the_row_before),
    "recovered token from the row behind": Mutant(recovered_from_the_row_behind),
    "ratio q / p": Mutant(ratio_upside_down),
    "ratio p alone": Mutant(ratio_without_the_draft),
    "accepts one draft too many": Mutant(one_draft_too_many),
    "accepts on equality, U of 5 bits": Mutant(accepts_on_equality(5)),
    "filters on the draft side only": Mutant(
        rejection_sampling, laws_of(TARGET, FILTERED), TRUTH, laws_of(DRAFT, FILTERED)
    ),
    "temperature on the draft side only": Mutant(rejection_sampling, laws_of(TARGET, HOT), TRUTH, laws_of(DRAFT, HOT)),
    "temperature in the ratio only": Mutant(
        residual_of_raw_laws(TRUTH), laws_of(TARGET, HOT), draft=laws_of(DRAFT, HOT)
    ),
    "temperature not on the bonus row": Mutant(
        bonus_of_raw_laws(TRUTH), laws_of(TARGET, HOT), draft=laws_of(DRAFT, HOT)
    ),
    "penalties not on the bonus row": Mutant(
        bonus_of_raw_laws(TRUTH), laws_of(TARGET, PENALISED), draft=laws_of(DRAFT, PENALISED)
    ),
    "penalties with a history that lacks the last draft": Mutant(
        rejection_sampling, laws_of(TARGET, PENALISED), laws_of(TARGET, PENALISED, forgotten=1)
    ),
    "penalties with the history of the step's start": Mutant(
        rejection_sampling, laws_of(TARGET, PENALISED), laws_of(TARGET, PENALISED, forgotten=K)
    ),
    "block: product not capped": Mutant(product_not_capped),
    "block: product of the last draft only": Mutant(product_of_the_last_draft_only),
    "block: product one draft late": Mutant(product_one_draft_late),
    # On most laws this one changes 1 token of 500; here the first draft keeps the product at 1/2.
    "block: residual without the product": Mutant(
        block_residual_without_the_product,
        by_depth([0.5, 0.5, 0.0, 0.0], [0.6, 0.4, 0.0, 0.0]),
        draft=by_depth([1.0, 0.0, 0.0, 0.0], [0.25, 0.0, 0.4, 0.35]),
    ),
    "block: stops at the first failure": Mutant(stops_at_the_first_failure),
    "block: chance is the product": Mutant(block_chance_is_the_product),
    "block: filters on the draft side only": Mutant(
        block_verification, laws_of(TARGET, FILTERED), TRUTH, laws_of(DRAFT, FILTERED)
    ),
}
