"""Early exit: running the first layers of a model alone. What all executors check in the same way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model.batch import PackedBatch
from model.errors import ModelError
from model.interface import ExitExecutor, ForwardOutput, ModelInfo, ReducedHead
from model.wrapped import WrappedExecutor


def check_depth(num_layers: int, info: ModelInfo) -> None:
    """Raise ModelError unless the model has so many layers."""
    if not 1 <= num_layers <= info.num_layers:
        raise ModelError(f"an exit after {num_layers} layers is not possible: {info.name} has {info.num_layers}")


def head_ids(token_ids: Sequence[int], vocab_size: int) -> Tensor:
    """``token_ids`` ascending, ``[n]`` int64. Raises ValueError unless they are distinct and within the vocabulary."""
    ids = sorted(token_ids)
    if not ids or ids[0] < 0 or ids[-1] >= vocab_size or len(set(ids)) != len(ids):
        raise ValueError(f"a head needs distinct ids of 0..{vocab_size - 1}, got {len(ids)}: {ids[:3]} .. {ids[-3:]}")
    return torch.tensor(ids, dtype=torch.int64)


class FirstLayers(WrappedExecutor):
    """The first layers of ``inner`` as an executor of its own: every forward stops there.

    With ``head``, its logits are those of that part of the vocabulary.
    """

    def __init__(self, inner: ExitExecutor, num_layers: int, head: ReducedHead | None = None) -> None:
        super().__init__(inner)
        self._num_layers = num_layers
        self._head = head

    @property
    def kind(self) -> str:
        """Says where it stops: it costs what no other executor does."""
        head = "" if self._head is None else f", head of {len(self._head.token_ids)}"
        return f"{self.inner.kind}, first {self._num_layers} layers{head}"

    def forward(
        self,
        batch: PackedBatch,
        *,
        capture_layers: bool = False,
        num_layers: int | None = None,
        head: ReducedHead | None = None,
    ) -> ForwardOutput:
        """``num_layers`` and ``head``, if given, go before its own."""
        return self.inner.forward(
            batch,
            capture_layers=capture_layers,
            num_layers=self._num_layers if num_layers is None else num_layers,
            head=self._head if head is None else head,
        )
