"""A target whose logits are a table: its law is known at every position, and a forward costs next to nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.storage import KVStorage, PlaneSpec
from model.batch import PackedBatch
from model.interface import ForwardOutput, ModelInfo


class TableExecutor:
    """Logits of a row are ``table[position % len(table), token]``: the last token and its place decide.

    With ``periods`` above 1, a row read at a wrong position has another law.
    """

    def __init__(self, vocab_size: int, *, periods: int = 3, seed: int = 7, scale: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        self.table = (scale * rng.standard_normal((periods, vocab_size, vocab_size))).astype(np.float32)
        self.planes = (PlaneSpec("target.0.k", (1,), torch.float32),)
        self.kind = "generic/table"
        self.info = ModelInfo(
            name="table",
            architecture="Table",
            model_type="table",
            dtype="float32",
            device="cpu",
            num_layers=1,
            hidden_size=1,
            vocab_size=vocab_size,
            embedding_rows=vocab_size,
            max_model_len=4096,
            eos_token_ids=(),
            weights_hash="",
        )

    def bind(self, storage: KVStorage) -> None:
        """It remembers nothing of what it read."""

    def forward(self, batch: PackedBatch, *, capture_layers: bool = False) -> ForwardOutput:
        rows = batch.logits_rows.numpy()
        positions, ids = batch.positions.numpy()[rows], batch.input_ids.numpy()[rows]
        return ForwardOutput(torch.from_numpy(self.table[positions % len(self.table), ids]))

    def logits_of(self, tokens: Seq[int]) -> NDArray[np.float32]:
        """``[V]``: the row that decides what follows ``tokens``."""
        row: NDArray[np.float32] = self.table[(len(tokens) - 1) % len(self.table), tokens[-1]]
        return row
