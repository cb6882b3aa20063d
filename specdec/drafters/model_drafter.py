"""Drafts by a smaller language model with the target's vocabulary, on planes of its own under the target's tables.

::

    tokens          t0 .. t_c-1 | t_c .. t_n-1 | d0     d1          c = valid prefix in the draft's planes
    round 1                       rows, logits of the last -> d0
    round 2                                      row -> d1
    round 3                                             row -> d2

Each round is one packed forward of all sequences that draft on; the first takes in what a sequence lacks, be it the
token that full acceptance left out, the tokens of a spell without drafts, or a whole prompt.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.storage import KVStorage
from kvcache.table import BlockTable
from model.batch import PackedBatch, RowSpan
from model.interface import Executor
from specdec.draft_length.cost import StepCost
from specdec.draft_length.measure import measure_step_cost
from specdec.drafters.base import DraftRequest
from specdec.drafters.draft_sampling import DraftSampler, GrowingDraft
from specdec.drafters.reliability import Reliability
from specdec.drafters.scored import ScoredDraft
from specdec.drafters.slot_tags import SlotTags, next_tag, root_tag
from specdec.sampling import Sampler
from specdec.sequence import Sequence

LEAST_SURVIVAL = 0.1
MAX_CATCH_UP = 256  # rows


@dataclass(slots=True)
class _Track:
    """What is known of a sequence: its first ``num_computed`` tokens had KV in the draft's planes when last seen.

    They still have while its table keeps their blocks: only this drafter writes there, and only what fits.
    """

    tokens: list[int]  # the sequence's own list
    table: BlockTable
    tags: array[int] = field(default_factory=lambda: array("Q"))  # of tokens
    last: int = -1  # the last token that has a tag
    foreign: bool = False  # holds an id that the draft model has no embedding for
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)  # those of the computed tokens

    def follows(self, sequence: Sequence) -> bool:
        """False if ``sequence`` is another one, or was changed where it has tags already."""
        seen, tokens = len(self.tags), sequence.tokens
        return (
            self.tokens is tokens
            and self.table is sequence.table
            and len(tokens) >= seen
            and (seen == 0 or tokens[seen - 1] == self.last)
        )


@dataclass(slots=True)
class _Drafting:
    """One request while it is drafted for."""

    draft: GrowingDraft
    num_computed: int
    tags: array[int]
    tag: int  # of the last token that is known or was fed


@dataclass(frozen=True, slots=True)
class _Rows:
    """Consecutive rows of one sequence; ``samples``: the last one's logits are wanted."""

    token_ids: Seq[int]
    tags: Seq[int]
    start: int
    blocks: Seq[int]
    samples: bool

    def split(self, count: int) -> tuple[_Rows, _Rows]:
        """The first ``count`` rows, and the others."""
        ids, tags = self.token_ids, self.tags
        first = _Rows(ids[:count], tags[:count], self.start, self.blocks, False)
        return first, _Rows(ids[count:], tags[count:], self.start + count, self.blocks, self.samples)


class ModelDrafter:
    """Implements specdec.drafters.base.CostlyDrafter and specdec.drafters.scored.ScoringDrafter.

    ``executor`` is the draft model, bound to ``storage``, which has its planes beside the target's. ``sampler`` is the
    target's and ``vocab_size`` its number of token ids. A draft ends with its first stop token, and with the token
    behind which the estimate that all of it is accepted is below ``least_survival`` (estimates: :class:`DraftSampler`).

    No forward has more than ``max_rows`` rows. A call of ``propose`` takes in at most ``max_catch_up`` known tokens
    beyond the last one of each sequence, those of whom lacks the fewest first, and a sequence that has not caught up
    gets no draft: a long prompt costs many steps a little, and none a lot. ``release`` must be called when a
    sequence's blocks are taken away.

    ``cost`` is what a round takes by its rows. Without it, it is measured, and nothing in ``storage`` may be in use.
    Raises ValueError for sizes that are not positive.
    """

    def __init__(
        self,
        executor: Executor,
        storage: KVStorage,
        sampler: Sampler,
        *,
        vocab_size: int,
        max_rows: int,
        max_catch_up: int = MAX_CATCH_UP,
        least_survival: float = LEAST_SURVIVAL,
        cost: StepCost | None = None,
        name: str = "model",
    ) -> None:
        if vocab_size < 1 or max_rows < 1 or max_catch_up < 1:
            raise ValueError(
                "vocab_size, max_rows and max_catch_up must be positive, "
                f"got {vocab_size}, {max_rows} and {max_catch_up}"
            )
        self.name = name
        self.max_catch_up = max_catch_up
        self._executor = executor
        self._storage = storage
        self._max_rows = max_rows
        self._num_ids = executor.info.embedding_rows
        self.reliability = Reliability()
        self._sampler = DraftSampler(
            sampler,
            vocab_size,
            num_fed=self._num_ids,
            least_survival=least_survival,
            reliability=self.reliability,
        )
        self.slots = SlotTags((storage.num_blocks + 1) * storage.block_size, storage.block_size)
        self._tracks: dict[int, _Track] = {}
        self._cost = measure_step_cost(executor, storage, max_rows=max_rows) if cost is None else cost

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        """See :class:`specdec.drafters.base.Drafter`. A draft ends with the first stop token in it."""
        return [draft.token_ids for draft in self.propose_scored(requests)]

    def propose_scored(self, requests: Seq[DraftRequest]) -> list[ScoredDraft]:
        """The same drafts with estimates."""
        try:
            able = {i: one for i, request in enumerate(requests) if (one := self._start(request)) is not None}
            self._draft(list(able.values()))
            self._sampler.finish([one.draft for one in able.values()])
        except BaseException:
            # What the planes hold now is known by the tags of their slots alone.
            self._tracks.clear()
            self._sampler.clear()
            raise
        return [able[i].draft.scored(self.name) if i in able else ScoredDraft([], []) for i in range(len(requests))]

    def round_seconds(self, rows: int) -> float:
        """See :class:`specdec.drafters.base.CostlyDrafter`; follows the rounds that were run."""
        return self._cost.seconds(rows)

    def num_missing(self, sequence: Sequence) -> int | None:
        """See :class:`specdec.drafters.base.CostlyDrafter`; a call of ``propose`` takes in ``max_catch_up`` at most."""
        track = self._follow(sequence)
        return max(0, len(track.tags) - 1 - track.num_computed) if self._room(track) > 0 else None

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        """Count what came of the last draft; all else follows from the tokens when it is needed."""
        self._sampler.update(sequence, num_emitted)

    def release(self, seq_id: int) -> None:
        self._tracks.pop(seq_id, None)
        self._sampler.release(seq_id)

    def _start(self, request: DraftRequest) -> _Drafting | None:
        """None if the draft model's context, the table or an id leaves nothing to draft."""
        track = self._follow(request.sequence)
        limit = min(request.max_drafts, self._room(track))
        if limit < 1:
            return None
        return _Drafting(GrowingDraft(request.sequence, limit), track.num_computed, track.tags, track.tags[-1])

    def _room(self, track: _Track) -> int:
        """How many tokens could be drafted; the last one is not fed: it needs neither a slot nor a position."""
        if track.foreign:
            return 0
        return min(track.table.num_slots, self._executor.info.max_model_len) + 1 - len(track.tokens)

    def _draft(self, able: Seq[_Drafting]) -> None:
        rows, active = self._first_round(able)
        while rows:
            began = time.perf_counter()
            logits = self._forward(rows)
            if active:
                self._sampler.grow([one.draft for one in active], logits)
            self._cost.observe(sum(len(one.token_ids) for one in rows), time.perf_counter() - began)
            active = [one for one in active if not one.draft.done]
            rows = [self._next_row(one) for one in active]

    def _first_round(self, able: Seq[_Drafting]) -> tuple[list[_Rows], list[_Drafting]]:
        """The rows that take in what is missing, and who samples from them, in the order of the rows."""
        rows: list[_Rows] = []
        active: list[_Drafting] = []
        left = self.max_catch_up
        for one in sorted(able, key=lambda one: len(one.tags) - one.num_computed):
            sequence, last = one.draft.sequence, len(one.tags) - 1
            # The last token runs even if its KV is there: its logits are not.
            start = min(one.num_computed, last)
            samples = last - start <= left
            end = last + 1 if samples else start + left
            if start < end:
                left -= min(end, last) - start
                rows.append(
                    _Rows(sequence.tokens[start:end], one.tags[start:end], start, sequence.table.blocks, samples)
                )
            if samples:
                active.append(one)
        return rows, active

    def _next_row(self, one: _Drafting) -> _Rows:
        """The draft's last token."""
        sequence, ids = one.draft.sequence, one.draft.ids
        one.tag = next_tag(one.tag, ids[-1])
        return _Rows(ids[-1:], (one.tag,), len(sequence.tokens) + len(ids) - 1, sequence.table.blocks, True)

    def _forward(self, rows: Seq[_Rows]) -> Tensor:
        """Logits of all rows that sample, in order, ``[samples, V of the draft]``."""
        logits = []
        for part in _parts(rows, self._max_rows):
            batch = PackedBatch.build(
                [RowSpan(some.token_ids, some.start, some.blocks, len(some.token_ids) - some.samples) for some in part],
                block_size=self._storage.block_size,
                scratch_block=self._storage.scratch_block,
            )
            slots: NDArray[np.int64] = batch.slot_mapping.numpy()
            self.slots.clear(slots)  # in case that the forward fails
            logits.append(self._executor.forward(batch).logits)
            self.slots.set(slots, [tag for some in part for tag in some.tags])
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _follow(self, sequence: Sequence) -> _Track:
        """The sequence's track, up to date with its tokens and its table."""
        table, tokens = sequence.table, sequence.tokens
        track = self._tracks.get(sequence.seq_id)
        if track is None or not track.follows(sequence):
            track = self._tracks[sequence.seq_id] = _Track(tokens, table)
        self._tag(track)
        end = min(len(tokens), table.num_slots)
        if track.num_computed > end or table.blocks[: len(track.blocks)] != track.blocks:
            track.num_computed, track.blocks = 0, []
        track.num_computed = self.slots.valid_until(table.blocks, track.tags, track.num_computed, end)
        count = -(-track.num_computed // table.block_size)
        if count != len(track.blocks):
            track.blocks = table.blocks[:count]
        return track

    def _tag(self, track: _Track) -> None:
        """Give a tag to each token that has none."""
        tokens, tags = track.tokens, track.tags
        seen = len(tags)
        if seen == len(tokens):
            return
        tag = tags[-1] if seen else root_tag(track.table.salt)
        for token in tokens[seen:]:
            tag = next_tag(tag, token)
            tags.append(tag)
            track.foreign |= token >= self._num_ids
        track.last = tokens[-1]


def _parts(rows: Seq[_Rows], max_rows: int) -> Iterator[list[_Rows]]:
    """``rows`` in forwards of at most ``max_rows``, in order."""
    part: list[_Rows] = []
    room = max_rows
    for some in rows:
        rest = some
        while len(rest.token_ids) > room:
            if room:
                first, rest = rest.split(room)
                part.append(first)
            yield part
            part, room = [], max_rows
        part.append(rest)
        room -= len(rest.token_ids)
    if part:
        yield part
