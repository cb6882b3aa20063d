"""Mixture-of-experts products in fixed tiles for each expert, so that who shares an expert changes no bit.

A row goes to a few experts, and how many rows an expert gets depends on the batch. transformers multiplies exactly
those rows, and torch's products round differently for different numbers of rows. Here an expert's rows are cut into
tiles of ``EXPERT_TILE`` rows, the last one filled with zeros::

    expert 3 gets rows 0, 2, 5, 9 of 16   ->   one product of 16 rows: 0 2 5 9 and 12 of zeros

A row's experts are added up in the order of its router, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

EXPERTS_NAME = "truedraft_tiled"
EXPERT_TILE = 16


def tile_experts(model: PreTrainedModel) -> bool:
    """Make the experts of ``model`` run in tiles from now on; False if it has none that transformers can switch."""
    if not _has_switchable_experts(model):
        return False
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS_NAME, _tiled_experts)
    model.set_experts_implementation(EXPERTS_NAME)
    return True


def untile_experts(model: PreTrainedModel) -> None:
    """Let the experts of ``model`` run in the model's own code, for a comparison; :func:`tile_experts` goes back."""
    if _has_switchable_experts(model):
        model.set_experts_implementation("eager")


def _has_switchable_experts(model: PreTrainedModel) -> bool:
    # The decorator of transformers.integrations.moe leaves these on every module whose forward it dispatches.
    return any(
        hasattr(module, "has_post_expert_norm") and hasattr(module, "is_transposed") for module in model.modules()
    )


def _tiled_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """``[T, H]``, its experts ``[T, k]`` and their weights ``[T, k]`` -> ``[T, H]``, as transformers' own functions."""
    rows, places = top_k_index.shape
    parts = hidden_states.new_zeros((rows, places, hidden_states.shape[-1]), dtype=torch.float32)
    # An id beyond the experts is how a router says "none".
    for expert in sorted({e for e in top_k_index.flatten().tolist() if e < module.num_experts}):
        where, place = torch.where(top_k_index == expert)
        outputs = [_one_expert(module, expert, hidden_states[part]) for part in where.split(EXPERT_TILE)]
        weights = top_k_weights[where, place, None].float()
        parts[where, place] = torch.cat(outputs).float() * weights
    total = parts[:, 0]
    for j in range(1, places):
        total = total + parts[:, j]
    return total.to(hidden_states.dtype)


def _one_expert(module: Any, expert: int, rows: Tensor) -> Tensor:
    """``[n, H]`` with n up to EXPERT_TILE through one expert: ``[n, H]``."""
    count = len(rows)
    x = F.pad(rows, (0, 0, 0, EXPERT_TILE - count))
    name = "gate_up_proj" if module.has_gate else "up_proj"
    x = _product(module, name, expert, x)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = _product(module, "down_proj", expert, x)
    if module.has_post_expert_norm:
        x = module.post_expert_norm(x)
    return x[:count]


def _product(module: nn.Module, name: str, expert: int, x: Tensor) -> Tensor:
    weight: Tensor = getattr(module, name)[expert]
    x = x @ weight if module.is_transposed else F.linear(x, weight)
    return x + getattr(module, f"{name}_bias")[expert] if module.has_bias else x
