"""How our attention gets into a Hugging Face model: one registered function, and a state on each attention module.

The function is registered without a mask function, so transformers builds no mask. State travels as an attribute of
the attention module, not as a forward keyword, because some models drop keywords.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from model.errors import ModelError

ATTENTION_NAME = "truedraft_paged"  # transformers gives names with "flash", "sdpa", "flex_attention" or "/" a meaning
_STATE = "truedraft_state"

# Keywords that models pass along and that change nothing for packed rows without a cache.
_HARMLESS = frozenset(
    {
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention function, with the batch dimension (always 1) taken off."""

    query: Tensor  # [T, H, D]
    key: Tensor  # [T, H_kv, D]
    value: Tensor  # [T, H_kv, D_v]
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [H]


class AttentionState(Protocol):
    """What :func:`attach` puts on an attention module."""

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """Returns ``[T, H, D_v]``."""


def attach(module: nn.Module, state: AttentionState) -> None:
    """Calls of the attention function by ``module`` go to ``state`` from now on."""
    object.__setattr__(module, _STATE, state)  # not a submodule: keep nn.Module's registries out of it


def detach(module: nn.Module) -> None:
    if _STATE in module.__dict__:
        object.__delattr__(module, _STATE)


def register() -> None:
    """Make ``attn_implementation=ATTENTION_NAME`` known to transformers. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered function. Raises ModelError for whatever it would otherwise have to ignore."""
    kind = type(module).__name__
    if attention_mask is not None:
        raise ModelError(f"{kind} passes an attention mask, which packed rows cannot honour")
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _HARMLESS)
    if unknown:
        raise ModelError(f"{kind} passes {', '.join(unknown)} to its attention, which is not supported")
    if dropout:
        raise ModelError(f"{kind} asks for attention dropout {dropout}, but the model is not in training")
    if is_causal is False:
        raise ModelError(f"{kind} attends in both directions, so its tokens cannot be decoded one by one")
    if query.dim() != 4 or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise ModelError(
            f"{kind} attends from {tuple(query.shape)} to {tuple(key.shape)}, "
            "expected [1, heads, rows, dim] of the same rows"
        )
    if query.shape[1] % key.shape[1]:
        raise ModelError(f"{kind} has {query.shape[1]} query heads for {key.shape[1]} KV heads")
    state: AttentionState | None = module.__dict__.get(_STATE)
    if state is None:
        raise ModelError(f"{kind} calls its attention outside of the decoder layers")
    call = AttentionCall(
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=None if sliding_window is None else int(sliding_window),
        softcap=None if softcap is None else float(softcap),
        sinks=s_aux,
    )
    return state.attend(module, call)[None], None
