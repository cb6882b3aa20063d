"""Early exit: the first layers of the target draft, with its own final norm and head.

They read and write the target's KV planes, so there is nothing to catch up with and nothing to keep::

    position        n-1        n          n+1            n = len(tokens), k = 3 drafts
    round 1         t_n-1 -> d0
    round 2                    d0 -> d1
    round 3                               d1 -> d2
    verify          t_n-1      d0         d1      d2

A round writes K and V of the first layers alone; the verify forward writes the same bits there again, and those of the
other layers. What it does not write again lies behind the verified positions, like a rejected draft.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from kvcache.ledger import Ledger
from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.errors import ModelError
from model.exits import FirstLayers
from model.interface import Executor, ExitExecutor
from specdec.draft_length.cost import StepCost
from specdec.draft_length.measure import measure_step_cost
from specdec.drafters.base import DraftRequest
from specdec.drafters.draft_sampling import DraftSampler, GrowingDraft
from specdec.drafters.reliability import Reliability
from specdec.drafters.scored import ScoredDraft
from specdec.ledger_hook import check_draft_forward
from specdec.sampling import Sampler
from specdec.sequence import Sequence

REDUCED_VOCABULARY = 8192
LEAST_SURVIVAL = 0.1

_MEASURED_ROWS = 64


class ExitDrafter:
    """Implements specdec.drafters.base.CostlyDrafter and specdec.drafters.scored.ScoringDrafter.

    ``executor`` is the target, bound to ``storage``; its first ``num_layers`` layers draft. Tokens are sampled by
    ``sampler`` with the target's pipeline, seed and output index. ``reduced``: only the logits of so many ids are
    computed, the lowest (of a vocabulary built by merging pairs of tokens, these are the bytes and the merges of the
    most frequent pairs) and the model's stop ids; None: of all.

    A draft ends with its first stop token, and with the first token behind which the estimate that all of it is
    accepted is below ``least_survival`` (estimates: :class:`specdec.drafters.draft_sampling.DraftSampler`).

    ``measure`` says what so many rows of an executor cost; here it gets the first layers as one, whose ``kind`` names
    them. By default it runs them, so nothing in ``storage`` may be in use. ``ledger``, if set, checks each round.
    Raises ModelError, one line, if the target cannot stop after ``num_layers`` layers or cannot compute the logits of a
    part of its vocabulary, and ValueError if ``reduced`` is not positive.
    """

    def __init__(
        self,
        executor: Executor,
        storage: KVStorage,
        sampler: Sampler,
        *,
        num_layers: int,
        reduced: int | None = REDUCED_VOCABULARY,
        least_survival: float = LEAST_SURVIVAL,
        measure: Callable[[Executor, KVStorage, int], StepCost] = measure_step_cost,
        name: str = "exit",
    ) -> None:
        if reduced is not None and reduced < 1:
            raise ValueError(f"a reduced vocabulary has at least one id, got {reduced}")
        if not isinstance(executor, ExitExecutor):
            raise ModelError(f"{executor.kind} cannot stop after its first layers")
        executor.check_exit(num_layers)
        info = executor.info
        self.name = name
        self.num_layers = num_layers
        self.ledger: Ledger | None = None
        self._storage = storage
        self._num_ids = info.num_token_ids
        ids = None if reduced is None else frequent_ids(reduced, self._num_ids, info.eos_token_ids)
        head = None if ids is None else executor.reduce_head(ids)
        self._ids = None if head is None else head.token_ids
        self._wide = torch.empty(0)
        self._layers = FirstLayers(executor, num_layers, head)
        self.reliability = Reliability()
        self._sampler = DraftSampler(
            sampler,
            self._num_ids,
            num_fed=info.embedding_rows,
            least_survival=least_survival,
            reliability=self.reliability,
        )
        self._cost = measure(self._layers, storage, _MEASURED_ROWS)

    @property
    def num_ids(self) -> int:
        """Ids that it can draft."""
        return self._num_ids if self._ids is None else len(self._ids)

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        """See :class:`specdec.drafters.base.Drafter`."""
        return [draft.token_ids for draft in self.propose_scored(requests)]

    def propose_scored(self, requests: Seq[DraftRequest]) -> list[ScoredDraft]:
        """The same drafts with estimates. Sequences that have more to compute than their last token get none."""
        able = {i: one for i, request in enumerate(requests) if (one := _start(request)) is not None}
        try:
            self._draft(list(able.values()))
        except BaseException:
            self._sampler.clear()  # derived from the tokens when it is needed again
            raise
        self._sampler.finish(list(able.values()))
        return [able[i].scored(self.name) if i in able else ScoredDraft([], []) for i in range(len(requests))]

    def round_seconds(self, rows: int) -> float:
        """See :class:`specdec.drafters.base.CostlyDrafter`; follows the rounds that were run."""
        return self._cost.seconds(rows)

    def num_missing(self, sequence: Sequence) -> int | None:
        """Nothing ever: the target's KV is its own. None before the sequence decodes."""
        return 0 if sequence.num_uncomputed == 1 else None

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        """Compare the last draft with what was emitted, verified or not."""
        self._sampler.update(sequence, num_emitted)

    def release(self, seq_id: int) -> None:
        self._sampler.release(seq_id)

    def _draft(self, active: list[GrowingDraft]) -> None:
        while active:
            began = time.perf_counter()
            batch = PackedBatch.build(
                [_span(draft) for draft in active],
                block_size=self._storage.block_size,
                scratch_block=self._storage.scratch_block,
            )
            if self.ledger is not None:
                check_draft_forward(self.ledger, batch, [(draft.sequence, draft.ids) for draft in active])
            logits = self._layers.forward(batch).logits
            self._sampler.grow(active, self._over_all_ids(logits))
            self._cost.observe(len(active), time.perf_counter() - began)
            active = [draft for draft in active if not draft.done]

    def _over_all_ids(self, logits: Tensor) -> Tensor:
        """``[n, ids]`` of a reduced head -> ``[n, V]``: what is not computed cannot be sampled."""
        if self._ids is None:
            return logits
        if len(self._wide) < len(logits):
            self._wide = torch.full((len(logits), self._num_ids), -math.inf)
        wide = self._wide[: len(logits)]
        wide[:, self._ids] = logits  # the others stay at -inf
        return wide


def frequent_ids(count: int, num_ids: int, stop_ids: Collection[int]) -> list[int] | None:
    """The lowest ``count`` ids and ``stop_ids``, ascending; None if these are all there are (``num_ids``)."""
    ids = sorted({*range(min(count, num_ids)), *(i for i in stop_ids if 0 <= i < num_ids)})
    return ids if len(ids) < num_ids else None


def _start(request: DraftRequest) -> GrowingDraft | None:
    """None if the sequence has more to compute than its last token, or no slot for a draft."""
    sequence = request.sequence
    limit = min(request.max_drafts, sequence.table.num_slots - len(sequence.tokens))
    if limit < 1 or sequence.num_uncomputed != 1:
        return None
    return GrowingDraft(sequence, limit)


def _span(draft: GrowingDraft) -> RowSpan:
    """The last token that is known or was drafted, at its position."""
    tokens, ids = draft.sequence.tokens, draft.ids
    token = ids[-1] if ids else tokens[-1]
    return RowSpan([token], len(tokens) - 1 + len(ids), draft.sequence.table.blocks, 0)
