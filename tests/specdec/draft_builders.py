"""A target and a draft model on planes of one storage, with the model drafter between them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvcache.storage import DRAFT_PLANES, KVStorage
from model.batch import PackedBatch, RowSpan
from model.interface import Executor, ForwardOutput
from specdec.draft_length.cost import StepCost
from specdec.drafters.model_drafter import ModelDrafter
from specdec.params import SamplingParams
from specdec.sampling import Sampler
from tests.specdec.builders import Bench, ToyExecutor

GREEDY = SamplingParams(seed=1, max_tokens=40, temperature=0.0)
BASE = SamplingParams(seed=11, max_tokens=18)
PARAMS = [
    replace(BASE, temperature=0.0),
    replace(BASE, temperature=1.0, seed=2**64 - 1),
    replace(BASE, temperature=0.0, frequency_penalty=2.0, presence_penalty=-2.0, repetition_penalty=1.2),
    replace(BASE, temperature=0.7, top_p=0.8, top_k=12, presence_penalty=2.0, frequency_penalty=-2.0),
    replace(BASE, temperature=1.2, min_p=0.05, logit_bias=((3, 2.0),), bad_words=((5,), (7, 8)), min_tokens=4),
    replace(BASE, temperature=0.9, top_p=0.7, seed=5),
    replace(BASE, temperature=0.0, stop_token_ids=frozenset({1, 2, 3, 4}), min_tokens=6),
    replace(BASE, temperature=1.1, allowed_token_ids=tuple(range(0, 40, 3)), seed=6),
]
COST = StepCost([(1, 1e-3), (64, 2e-3)])


class DraftToy(ToyExecutor):
    """The toy model as a draft: the same numbers for the same seed, on planes of its own. Counts its rows."""

    def __init__(self, vocab_size: int = 40, **toy: int) -> None:
        super().__init__(vocab_size, **toy)  # type: ignore[arg-type]
        self._own = self.planes
        self.planes = tuple(replace(plane, name=f"{DRAFT_PLANES}/{plane.name}") for plane in self._own)
        self.forwards: list[int] = []  # rows of each
        self.fail_after: int | None = None  # forwards, until one fails in the middle

    def bind(self, storage: KVStorage) -> None:
        super().bind(_Renamed(storage))

    def forward(self, batch: PackedBatch, *, capture_layers: bool = False, **ways: object) -> ForwardOutput:
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                for plane in self._own:  # it had begun to write
                    if plane.dtype.is_floating_point:
                        self._storage.plane(plane.name)[batch.slot_mapping] = float("nan")  # type: ignore[union-attr]
                raise RuntimeError("the draft model fails")
        self.forwards.append(batch.num_rows)
        return super().forward(batch, capture_layers=capture_layers)


class _Renamed(KVStorage):
    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage

    def plane(self, name: str) -> Tensor:
        return self._storage.plane(f"{DRAFT_PLANES}/{name}")


class Pair:
    """The target, which brings the draft's planes along."""

    def __init__(self, target: Executor, draft: Executor) -> None:
        self.target, self.draft = target, draft
        self.info, self.kind = target.info, target.kind
        self.planes = (*target.planes, *draft.planes)

    def bind(self, storage: KVStorage) -> None:
        self.target.bind(storage)
        self.draft.bind(storage)

    def forward(self, batch: PackedBatch, *, capture_layers: bool = False) -> ForwardOutput:
        return self.target.forward(batch, capture_layers=capture_layers)


class DraftBench(Bench):
    """A mini engine whose sequences draft by a model."""

    drafter: ModelDrafter

    def __init__(
        self,
        draft: DraftToy | None = None,
        *,
        target: ToyExecutor | None = None,
        k: int = 4,
        block_size: int = 4,
        num_blocks: int = 256,
        sampler: Sampler | None = None,
        max_rows: int = 512,
        max_catch_up: int = 256,
        least_survival: float = 0.0,
    ) -> None:
        self.draft = DraftToy() if draft is None else draft
        pair = Pair(ToyExecutor() if target is None else target, self.draft)
        sampler = Sampler() if sampler is None else sampler
        super().__init__(pair, k=k, block_size=block_size, num_blocks=num_blocks, sampler=sampler)
        self.drafter = ModelDrafter(
            self.draft,
            self.storage,
            sampler,
            vocab_size=pair.info.num_token_ids,
            max_rows=max_rows,
            max_catch_up=max_catch_up,
            least_survival=least_survival,
            cost=COST,
        )
        self.draft_with(self.drafter)

    def draft_rows(self, run: int = 0) -> int:
        """Rows that the draft model ran, since the first ``run`` forwards."""
        return sum(self.draft.forwards[run:])

    def resume(self, seq_id: int) -> int:
        """Admit a preempted sequence as the scheduler does; returns the tokens that the prefix cache had."""
        sequence = self.sequences[seq_id]
        sequence.num_computed = self.manager.match_prefix(sequence.table, sequence.tokens, len(sequence.tokens) - 1)
        return sequence.num_computed


def fresh_logits(draft: DraftToy, tokens: Seq[int]) -> np.ndarray:
    """The draft model's logits behind ``tokens``, from one forward over all of them on a storage of its own."""
    twin = DraftToy.__new__(DraftToy)
    twin.__dict__.update(draft.__dict__, forwards=[], fail_after=None)
    blocks = list(range(-(-len(tokens) // 4)))
    storage = KVStorage(twin.planes, num_blocks=len(blocks), block_size=4)
    twin.bind(storage)
    span = RowSpan(list(tokens), 0, blocks, len(tokens) - 1)
    batch = PackedBatch.build([span], block_size=4, scratch_block=len(blocks))
    logits: np.ndarray = twin.forward(batch).logits.numpy()[0]
    return logits


def spoil_unknown(bench: DraftBench) -> None:
    """NaN in every slot of the draft's planes that no tag speaks for: nobody may read them."""
    unknown = torch.from_numpy(~bench.drafter.slots.known)
    for plane in bench.draft.planes:
        if plane.dtype.is_floating_point:
            bench.storage.plane(plane.name)[unknown] = float("nan")


def started(
    params: SamplingParams = GREEDY, *, prompt: int = 21, steps: int = 3, **bench: int
) -> tuple[DraftBench, int]:
    """A sequence that has decoded a few steps."""
    made = DraftBench(**bench)
    seq_id = made.add([(7 * i) % 40 for i in range(prompt)], params)
    for _ in range(1 + steps):
        made.run_step()
    return made, seq_id


def missing(bench: DraftBench, seq_id: int) -> int:
    """As in a step that is about to run: the table covers all known tokens."""
    sequence = bench.sequences[seq_id]
    assert bench.manager.reserve(sequence.table, len(sequence.tokens))
    found = bench.drafter.num_missing(sequence)
    assert found is not None
    return found
