"""Verifiers from the literature, with their noise integrated out, so that their law can be enumerated exactly.

::

    row         0        1        2            k = 2 drafts d0 d1, drawn from the draft's laws q_0, q_1
    target      p_0      p_1      p_2          its law after d[:i]
    emitted     d[:a] and one more token       a drafts are accepted

Rejection sampling: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML
2023, algorithm 1; Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", arXiv
2302.01318, algorithm 2. Block verification: Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR
2025, arXiv 2403.10444, algorithm 2. The server uses neither: its drafts are verified by keyed sampling.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from tests.specdec.keyed import Floats

Prefix = tuple[int, ...]
Laws = Callable[[Prefix], Floats]  # tokens so far -> [V], the law of the next


@dataclass(frozen=True)
class Outcome:
    """What a verifier does with one block of k drafts."""

    accepted: Floats  # [k + 1]: probability that exactly so many drafts are accepted
    following: Floats  # [k + 1, V]: law of the token emitted behind them


Verifier = Callable[[Seq[int], Floats, Floats], Outcome]  # drafts [k], p [k + 1, V], q [k, V]


def residual(p: Floats, q: Floats) -> Floats:
    """max(p - q, 0), renormalised; p itself if nothing is left, where no draft can be rejected."""
    rest = np.maximum(p - q, 0.0)
    total = rest.sum()
    return rest / total if total > 0.0 else p


def ratio(p: float, q: float) -> float:
    """p / q of a token that was drafted, so q > 0."""
    return p / q


def rejection_sampling(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    """Token by token: accept with probability min(1, p / q); behind a rejection the residual, else the bonus row."""
    k = len(drafts)
    chances = [min(1.0, ratio(p[i, drafts[i]], q[i, drafts[i]])) for i in range(k)]
    return chain(chances, np.stack([*(residual(p[i], q[i]) for i in range(k)), p[k]]))


def chain(chances: Seq[float], following: Floats) -> Outcome:
    """Accept draft i with probability ``chances[i]`` if all before it are accepted."""
    reached = np.cumprod([1.0, *chances])
    return Outcome(reached * np.array([*(1.0 - chance for chance in chances), 1.0]), following)


def running_products(drafts: Seq[int], p: Floats, q: Floats) -> list[float]:
    """w_0 = 1 and w_i = min(1, w_(i-1) p / q): how much of draft i's prefix the target can use. ``[k + 1]``."""
    products = [1.0]
    for i, token in enumerate(drafts):
        products.append(min(1.0, products[-1] * ratio(p[i, token], q[i, token])))
    return products


def block_chances(products: Seq[float], p: Floats, q: Floats) -> list[float]:
    """h_1 .. h_k: the chance to end with i drafts, given that no longer prefix is taken; h_k = w_k."""
    chances = []
    for i in range(1, len(q)):
        rest = float(np.maximum(products[i] * p[i] - q[i], 0.0).sum())
        below = rest + 1.0 - products[i]
        chances.append(rest / below if below > 0.0 else 0.0)  # p = q: the next draft will be accepted
    return [*chances, products[len(q)]]


def longest_accepted(chances: Seq[float]) -> Floats:
    """``[k + 1]``: every prefix is tried with a chance of its own; the longest that succeeds is taken, else none."""
    fails = np.cumprod([1.0, *(1.0 - chance for chance in reversed(chances))])[::-1]  # fails[i]: all longer than i
    return fails * np.array([1.0, *chances])


def block_verification(drafts: Seq[int], p: Floats, q: Floats) -> Outcome:
    """All drafts together: a prefix may be accepted although one of its tokens alone would be rejected."""
    k = len(drafts)
    products = running_products(drafts, p, q)
    rows = [*(residual(products[i] * p[i], q[i]) for i in range(k)), p[k]]
    return Outcome(longest_accepted(block_chances(products, p, q)), np.stack(rows))


def target_law(target: Laws, vocab: int, length: int) -> Floats:
    """``[V] * length``: the joint law of the target's own tokens."""
    law = np.ones(())
    for i in range(length):
        rows = [target(prefix) for prefix in itertools.product(range(vocab), repeat=i)]
        law = law[..., None] * np.reshape(rows, (*[vocab] * i, vocab))
    return law


def emitted_law(
    verifier: Verifier, seen: Laws, draft: Laws, vocab: int, k: int, target: Laws | None = None
) -> tuple[Floats, float]:
    """The joint law of the next k + 1 tokens, ``[V] * (k + 1)``, and the expected number of accepted drafts.

    Summed over all blocks of drafts and all outcomes. ``seen`` are the laws that the verifier is given for the target;
    what is left of the k + 1 tokens comes from ``target`` itself (default: ``seen``), one by one.
    """
    truth = seen if target is None else target
    law = np.zeros([vocab] * (k + 1))
    expected = 0.0
    for drafts in itertools.product(range(vocab), repeat=k):
        q = np.array([draft(drafts[:i]) for i in range(k)])
        mass = float(np.prod([q[i, drafts[i]] for i in range(k)]))
        if mass == 0.0:
            continue
        outcome = verifier(drafts, np.array([seen(drafts[:i]) for i in range(k + 1)]), q)
        expected += mass * float(outcome.accepted @ np.arange(k + 1))
        for a, chance in enumerate(outcome.accepted):
            for token in range(vocab):
                weight = mass * chance * outcome.following[a, token]
                if weight != 0.0:
                    law[(*drafts[:a], token)] += weight * _rest(truth, (*drafts[:a], token), vocab, k - a)
    return law, expected


def _rest(target: Laws, prefix: Prefix, vocab: int, length: int) -> Floats:
    """``[V] * length``: the joint law of the target's tokens behind ``prefix``."""
    return target_law(lambda more: target((*prefix, *more)), vocab, length)
