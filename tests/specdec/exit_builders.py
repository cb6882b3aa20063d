"""A toy target with layers, and the exit drafter on its planes."""

from __future__ import annotations

import torch

from kvcache.storage import KVStorage
from model.batch import PackedBatch
from model.interface import Executor, ForwardOutput, ReducedHead
from specdec.draft_length.cost import StepCost
from specdec.drafters.base import DraftRequest
from specdec.drafters.exit_drafter import ExitDrafter
from specdec.params import SamplingParams
from specdec.sampling import Sampler
from tests.specdec.builders import Bench, ToyExecutor, prompts

GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=14)


def known_cost(executor: Executor, storage: KVStorage, max_rows: int) -> StepCost:
    return StepCost([(1, 1e-3), (64, 2e-3)])


class ExitToy(ToyExecutor):
    """Counts the rows of its forwards through the first layers, and can fail in them: in all, or once after some."""

    def __init__(self, *, layers: int = 3, **toy: int) -> None:
        super().__init__(layers=layers, **toy)  # type: ignore[arg-type]
        self.exits: list[int] = []
        self.fails = False
        self.fails_after: int | None = None

    def forward(
        self,
        batch: PackedBatch,
        *,
        capture_layers: bool = False,
        num_layers: int | None = None,
        head: ReducedHead | None = None,
    ) -> ForwardOutput:
        if num_layers is not None:
            self.exits.append(batch.num_rows)
            if self.fails or self.fails_after == 0:
                self.fails_after = None
                raise RuntimeError("planted")
            if self.fails_after is not None:
                self.fails_after -= 1
        return super().forward(batch, capture_layers=capture_layers, num_layers=num_layers, head=head)


class ExitBench(Bench):
    """A mini engine whose sequences draft by the first layers."""

    drafter: ExitDrafter

    def __init__(
        self,
        executor: Executor | None = None,
        *,
        num_layers: int = 1,
        reduced: int | None = None,
        least_survival: float = 0.0,
        k: int = 4,
        block_size: int = 4,
        num_blocks: int = 256,
        sampler: Sampler | None = None,
        poison: bool = False,
    ) -> None:
        sampler = Sampler() if sampler is None else sampler
        super().__init__(
            ExitToy() if executor is None else executor,
            k=k,
            block_size=block_size,
            num_blocks=num_blocks,
            sampler=sampler,
            poison=poison,
        )
        self.drafter = ExitDrafter(
            self.executor,
            self.storage,
            sampler,
            num_layers=num_layers,
            reduced=reduced,
            least_survival=least_survival,
            measure=known_cost,
        )
        self.draft_with(self.drafter)

    def decoding(self, params: SamplingParams = GREEDY, count: int = 3) -> None:
        """``count`` sequences that have their prompts behind them."""
        for prompt in prompts(count + 1)[1:]:
            self.add(prompt, params)
        self.run_step(limits=dict.fromkeys(range(count), 0))

    def ask(self, k: int = 4) -> list[list[int]]:
        """What it would draft now, in slots reserved as for a step."""
        for sequence in self.sequences.values():
            assert self.manager.reserve(sequence.table, len(sequence.tokens) + k)
        return self.drafter.propose([DraftRequest(sequence, k) for sequence in self.sequences.values()])


def assert_kv_of_plain_decoding(bench: Bench, plain: Bench) -> None:
    """What each sequence of ``bench`` has computed equals, bit by bit, what plain decoding computed."""
    for seq_id, sequence in bench.sequences.items():
        twin = plain.sequences[seq_id]
        count = min(sequence.num_computed, twin.num_computed)
        assert sequence.tokens[:count] == twin.tokens[:count]
        ours = torch.tensor([sequence.table.slot(position) for position in range(count)], dtype=torch.int64)
        theirs = torch.tensor([twin.table.slot(position) for position in range(count)], dtype=torch.int64)
        for spec in bench.executor.planes:
            a, b = bench.storage.plane(spec.name)[ours], plain.storage.plane(spec.name)[theirs]
            assert torch.equal(a, b), (spec.name, seq_id)
