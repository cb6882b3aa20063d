"""Running token sequences through an executor in any way a scheduler could: pieces, mixes, shuffled blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.interface import Executor, ForwardOutput


def random_ids(count: int, *, seed: int = 0, vocab: int = 97) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Packing:
    """An executor on a storage of its own, with block tables for sequences of ``lengths``, scattered over it."""

    def __init__(
        self, executor: Executor, lengths: list[int], *, block_size: int = 16, shuffle: int = 0, poison: bool = False
    ) -> None:
        self.executor = executor
        self.block_size = block_size
        counts = [-(-length // block_size) for length in lengths]
        self.storage = KVStorage(executor.planes, num_blocks=sum(counts) + 2, block_size=block_size)
        if poison:
            for name in self.storage.names:
                self.storage.plane(name).fill_(float("nan"))
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(shuffle)).tolist()
        self.tables = []
        for count in counts:
            self.tables.append(order[:count])
            order = order[count:]
        executor.bind(self.storage)

    def run(self, *spans: tuple[int, list[int], int], logits_from: int = 0, capture: bool = False) -> ForwardOutput:
        """Each span is (sequence, token ids, start)."""
        rows = [RowSpan(ids, start, self.tables[s], min(logits_from, len(ids))) for s, ids, start in spans]
        batch = PackedBatch.build(rows, block_size=self.block_size, scratch_block=self.storage.scratch_block)
        return self.executor.forward(batch, capture_layers=capture)


def decode_alone(executor: Executor, ids: list[int], rows: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Logits ``[V]`` and layer outputs ``[L, H]`` of positions ``rows`` (ascending), each decoded as one row."""
    packing = Packing(executor, [len(ids)])
    logits, layers, done = [], [], 0
    for row in rows:
        if done < row:
            packing.run((0, ids[done:row], done))
        out = packing.run((0, ids[row : row + 1], row), capture=True)
        assert out.layers is not None
        logits.append(out.logits[0])
        layers.append(out.layers[:, 0])
        done = row + 1
    return logits, layers
