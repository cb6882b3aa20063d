"""Growing drafts token by token from a draft's logits, as the target would sample from its own.

A draft token is the target's pipeline, seed and output index applied to the draft's logits, with the draft so far as
emitted. So a draft with the target's logits is the target's continuation, sampled or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.drafters.reliability import Reliability
from specdec.drafters.scored import ScoredDraft
from specdec.errors import SamplingError
from specdec.sampling import RowJob, Sampler, SamplingState
from specdec.sequence import Sequence

_LEAST_CHANCE = 1e-9  # estimates stay above 0, however long the draft
_RATE_WEIGHT, _RATE_DECAY, _FIRST_RATE = 8.0, 0.995, 0.7


@dataclass(slots=True)
class GrowingDraft:
    """``ids`` may follow ``sequence.tokens``; it ends at ``limit`` (>= 1), or earlier: then it is ``done``."""

    sequence: Sequence
    limit: int
    ids: list[int] = field(default_factory=list)
    cumulative: list[float] = field(default_factory=list)  # see specdec.drafters.scored.ScoredDraft
    own_cumulative: list[float] = field(default_factory=list)  # by the draft's own estimates, not corrected
    done: bool = False

    def scored(self, source: str) -> ScoredDraft:
        """As it is, by the drafter ``source``."""
        return ScoredDraft(self.ids, self.cumulative, source=source) if self.ids else ScoredDraft([], [])


class DraftSampler:
    """Samples for drafts with the target's ``sampler``; ``vocab_size`` is the target's number of token ids.

    A draft ends behind its first stop token, behind a token that is not below ``num_fed`` (which the draft model has no
    embedding for), and where the estimate that all of it is accepted falls below ``least_survival``.

    Estimates. A greedy token's is the draft's own probability for it, corrected by ``reliability`` if that is given.
    With shared noise that probability says little (a draft equal to the target is always right, however unlikely its
    tokens), so for sequences that sample, and for those whose logits are changed by penalties, masks or bias, it is the
    share of such draft tokens that came true of late.
    """

    def __init__(
        self,
        sampler: Sampler,
        vocab_size: int,
        *,
        num_fed: int,
        least_survival: float = 0.0,
        reliability: Reliability | None = None,
    ) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._num_fed = num_fed
        self._least_survival = least_survival
        self._states: dict[int, tuple[list[int], SamplingState]] = {}  # with the token list that it belongs to
        self._reliability = reliability
        self._open: dict[int, GrowingDraft] = {}  # last drafts whose acceptance is to be counted
        self._rate = _Rate()

    def grow(self, drafts: Seq[GrowingDraft], logits: Tensor) -> None:
        """Row i of ``logits`` ``[len(drafts), V of the draft]`` float32 gives the next token of ``drafts[i]``."""
        logits = self._target_width(logits)
        jobs = [
            RowJob(i, 1, one.sequence.params, one.sequence.num_output_tokens + len(one.ids))
            for i, one in enumerate(drafts)
            if self._sampler.batchable(one.sequence.params)
        ]
        found = self._sampler.sample_batch(logits, jobs)
        rows: NDArray[np.float32] = logits.numpy()
        tokens = [self._token(one, rows[i], found.get(i, -1)) for i, one in enumerate(drafts)]
        for one, token, chance in zip(drafts, tokens, self._chances(drafts, tokens, logits), strict=True):
            if token is None:
                one.done = True
                continue
            one.ids.append(token)
            _extend(one.own_cumulative, chance)
            if self._reliability is not None and _own_word(one.sequence):
                chance = self._reliability.corrected(chance)
            _extend(one.cumulative, chance)
            one.done = (
                len(one.ids) >= one.limit
                or token in one.sequence.params.stop_token_ids
                or token >= self._num_fed
                or one.cumulative[-1] < self._least_survival
            )

    def finish(self, drafts: Seq[GrowingDraft]) -> None:
        """``drafts`` are proposed as they are."""
        for one in drafts:
            seq_id = one.sequence.seq_id
            kept = self._states.get(seq_id)
            if kept is not None:
                kept[1].history.sync(one.sequence.tokens)  # without the draft
            if one.ids:
                self._open[seq_id] = one
            else:
                self._open.pop(seq_id, None)

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        """Count what came of the sequence's last draft."""
        draft = self._open.pop(sequence.seq_id, None)
        if draft is None:
            return
        emitted = sequence.tokens[len(sequence.tokens) - num_emitted :]
        if not _own_word(sequence):
            self._rate.record(draft.ids, emitted)
        elif self._reliability is not None:
            self._reliability.record(draft.ids, draft.own_cumulative, emitted)

    def release(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
        self._open.pop(seq_id, None)

    def clear(self) -> None:
        """Forget what is known of sequences: their drafts may have been left in the middle."""
        self._states.clear()
        self._open.clear()

    def _target_width(self, logits: Tensor) -> Tensor:
        """As wide as the target's rows: the padding of the vocabulary may differ."""
        width = logits.shape[1]
        if width > self._vocab_size:
            return logits[:, : self._vocab_size].contiguous()
        if width < self._vocab_size:
            return torch.nn.functional.pad(logits, (0, self._vocab_size - width), value=-math.inf)
        return logits

    def _token(self, one: GrowingDraft, row: NDArray[np.float32], found: int) -> int | None:
        """The token of a row, unless a batch call has ``found`` it already; None if there is none."""
        if found >= 0:
            return found
        sequence, params = one.sequence, one.sequence.params
        try:
            state = None if params.plain else self._state(one)
            return self._sampler.sample_row(row, params, sequence.num_output_tokens + len(one.ids), state)
        except SamplingError:
            return None  # if it is so for the target too, the target will say it

    def _state(self, one: GrowingDraft) -> SamplingState:
        """The sequence's state, with the draft so far as emitted."""
        sequence = one.sequence
        tokens, state = self._states.get(sequence.seq_id, (None, None))
        if state is None or tokens is not sequence.tokens:
            state = SamplingState(sequence.params, sequence.tokens, sequence.num_prompt_tokens, self._vocab_size)
            self._states[sequence.seq_id] = (sequence.tokens, state)
        if one.ids:
            state.history.push(one.ids[-1])
        else:
            state.history.sync(sequence.tokens)
        return state

    def _chances(self, drafts: Seq[GrowingDraft], tokens: Seq[int | None], logits: Tensor) -> list[float]:
        """How likely each token is to be accepted if all before it are."""
        chances = [self._rate.value] * len(drafts)
        own = [i for i, one in enumerate(drafts) if tokens[i] is not None and _own_word(one.sequence)]
        if own:
            picked = logits if len(own) == len(drafts) else logits[torch.tensor(own)]
            normalisers = self._sampler.normalisers(picked, 0, len(own))
            for i, normaliser in zip(own, normalisers, strict=True):
                chances[i] = min(math.exp(float(logits[i, tokens[i]]) - normaliser), 1.0)
        return chances


def _extend(cumulative: list[float], chance: float) -> None:
    cumulative.append(max(_LEAST_CHANCE, chance * (cumulative[-1] if cumulative else 1.0)))


def _own_word(sequence: Sequence) -> bool:
    """The draft's probability is an estimate for this sequence's tokens."""
    return sequence.params.greedy and sequence.params.plain


class _Rate:
    """The share of draft tokens that came true, of late, among those whose drafts were right up to them."""

    def __init__(self) -> None:
        self._tried = 0.0
        self._right = 0.0

    @property
    def value(self) -> float:
        return (self._right + _RATE_WEIGHT * _FIRST_RATE) / (self._tried + _RATE_WEIGHT)

    def record(self, draft: Seq[int], emitted: Seq[int]) -> None:
        for token, truth in zip(draft, emitted, strict=False):
            self._tried = self._tried * _RATE_DECAY + 1.0
            self._right = self._right * _RATE_DECAY + (token == truth)
            if token != truth:
                return
