"""Drafters for tests and benches. None of them makes a server faster; they bracket what a real one can do.

=================  =============================================  ==============================================
``EmptyDrafter``   proposes nothing                               plain decoding through the speculative step
``RandomDrafter``  random ids, random lengths                     adversarial: nearly everything is rejected
``OracleDrafter``  a continuation known beforehand                the upper bound: everything is accepted
``WrongDrafter``   another drafter's, spoiled at a random place   acceptance at any rate, rejection at any depth
=================  =============================================  ==============================================

All are pure functions of (their arguments, seq_id, number of tokens), so runs repeat whatever the batch mates.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from specdec.drafters.base import Drafter, DraftRequest
from specdec.sequence import Sequence


class _Stateless:
    """A drafter that remembers nothing about a sequence."""

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        """Nothing to keep up to date."""

    def release(self, seq_id: int) -> None:
        """Nothing to forget."""


class EmptyDrafter(_Stateless):
    """Never proposes anything."""

    @property
    def name(self) -> str:
        return "none"

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        return [[] for _ in requests]


class RandomDrafter(_Stateless):
    """0 to max_drafts uniformly random ids below ``vocab_size``; always max_drafts with ``ragged=False``."""

    def __init__(self, seed: int, vocab_size: int, *, ragged: bool = True) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be positive, got {vocab_size}")
        self._seed = seed
        self._vocab_size = vocab_size
        self._ragged = ragged

    @property
    def name(self) -> str:
        return "random"

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        drafts = []
        for request in requests:
            rng = _rng(self._seed, request.sequence)
            count = rng.randint(0, request.max_drafts) if self._ragged else request.max_drafts
            drafts.append([rng.randrange(self._vocab_size) for _ in range(count)])
        return drafts


class OracleDrafter(_Stateless):
    """Proposes from ``continuations``: seq_id to the output tokens that the sequence will have.

    Unknown sequences, and those that have left their known continuation, get nothing.
    """

    def __init__(self, continuations: Mapping[int, Seq[int]]) -> None:
        self._continuations = continuations

    @property
    def name(self) -> str:
        return "oracle"

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        drafts: list[list[int]] = []
        for request in requests:
            known = self._continuations.get(request.sequence.seq_id, ())
            output = request.sequence.output_token_ids
            done = len(output)
            on_track = list(known[:done]) == output
            drafts.append(list(known[done : done + request.max_drafts]) if on_track else [])
        return drafts


class WrongDrafter:
    """``inner``'s drafts, each token replaced by another one with probability ``error_rate`` (1: all are wrong).

    With an :class:`OracleDrafter` inside, ``error_rate`` is exactly the chance that a draft is rejected.
    """

    def __init__(self, inner: Drafter, seed: int, vocab_size: int, *, error_rate: float = 1.0) -> None:
        if vocab_size < 2:
            raise ValueError(f"a wrong token needs a vocabulary of at least 2, got {vocab_size}")
        if not 0.0 <= error_rate <= 1.0:
            raise ValueError(f"error_rate must lie in 0..1, got {error_rate}")
        self._inner = inner
        self._seed = seed
        self._vocab_size = vocab_size
        self._error_rate = error_rate

    @property
    def name(self) -> str:
        return f"wrong-{self._inner.name}"

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        return [
            self._spoil(draft, _rng(self._seed, request.sequence))
            for request, draft in zip(requests, self._inner.propose(requests), strict=True)
        ]

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        self._inner.update(sequence, num_emitted)

    def release(self, seq_id: int) -> None:
        self._inner.release(seq_id)

    def _spoil(self, draft: list[int], rng: random.Random) -> list[int]:
        spoiled = []
        for token in draft:
            wrong = rng.random() < self._error_rate
            spoiled.append((token + rng.randrange(1, self._vocab_size)) % self._vocab_size if wrong else token)
        return spoiled


def _rng(seed: int, sequence: Sequence) -> random.Random:
    return random.Random(f"{seed}/{sequence.seq_id}/{len(sequence.tokens)}")
