"""Early exit: running the first layers of a model alone. What all executors check in the same way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model.errors import ModelError
from model.interface import ModelInfo


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
