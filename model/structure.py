"""What a Hugging Face model looks like from outside: its decoder layers, attention modules and KV geometry.

Learnt by running one row through it, not from its config: configs do not say which module calls what.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcache.storage import TARGET_PLANES, PlaneSpec
from model.attach import AttentionCall, attach, detach
from model.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelStructure:
    """``attentions[i]`` is called by ``layers[i]``, exactly once a forward; its planes are named by ``i``."""

    stack: nn.ModuleList  # the decoder layers, as the model runs through them
    layers: tuple[nn.Module, ...]
    attentions: tuple[nn.Module, ...]
    planes: tuple[PlaneSpec, ...]  # target.0.k, target.0.v, target.1.k, ...; a draft model's begin with "draft"
    head: nn.Module  # hidden state -> logits
    vocab_size: int  # width of a logits row
    keeps_logits: bool  # forward() takes logits_to_keep


class _Recorder:
    """Notes who calls the attention function, and with which shapes. One row attends to itself: its own value."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, AttentionCall]] = []

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        self.calls.append((module, call))
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)


def examine(model: PreTrainedModel, plane_prefix: str = TARGET_PLANES) -> ModelStructure:
    """Run one row through ``model`` and describe it; its planes are named ``{plane_prefix}.{layer}.k`` and ``.v``.

    Raises ModelError unless each decoder layer calls the attention function exactly once; leaves no state on the model.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ModelError(f"{type(model).__name__} has no output head, so it is not a language model")
    recorder = _Recorder()
    modules = list(model.modules())
    for module in modules:
        attach(module, recorder)
    try:
        with torch.inference_mode():
            zero = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
            logits = model(input_ids=zero, position_ids=zero, use_cache=False).logits
    finally:
        for module in modules:
            detach(module)
    stack = _decoder_stack(model)
    layers = tuple(stack)
    attentions = _attention_of_each(layers, recorder)
    planes = []
    for i, (_, call) in enumerate(_in_layer_order(attentions, recorder)):
        planes.append(PlaneSpec(f"{plane_prefix}.{i}.k", tuple(call.key.shape[1:]), call.key.dtype))
        planes.append(PlaneSpec(f"{plane_prefix}.{i}.v", tuple(call.value.shape[1:]), call.value.dtype))
    return ModelStructure(
        stack=stack,
        layers=layers,
        attentions=attentions,
        planes=tuple(planes),
        head=head,
        vocab_size=int(logits.shape[-1]),
        keeps_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
    )


def _decoder_stack(model: PreTrainedModel) -> nn.ModuleList:
    count = model.config.get_text_config().num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    # named from the outside in: the first list of that length is the stack, others (experts) lie inside its layers
    if not stacks:
        raise ModelError(f"{type(model).__name__} has no stack of {count} decoder layers")
    return stacks[0]


def _attention_of_each(layers: tuple[nn.Module, ...], recorder: _Recorder) -> tuple[nn.Module, ...]:
    attentions = []
    remaining = [module for module, _ in recorder.calls]
    for i, layer in enumerate(layers):
        inside = {id(module) for module in layer.modules()}
        calls = [module for module in remaining if id(module) in inside]
        if len(calls) != 1:
            raise ModelError(
                f"decoder layer {i} ({type(layer).__name__}) calls the attention function {len(calls)} times, not 1: "
                "it keeps state that paged KV cannot hold, or bypasses the attention interface"
            )
        attentions.append(calls[0])
        remaining.remove(calls[0])
    if remaining:
        raise ModelError(f"{type(remaining[0]).__name__} calls the attention function outside of the decoder layers")
    if len({id(module) for module in attentions}) != len(attentions):
        raise ModelError("decoder layers share an attention module, so their KV would overwrite each other")
    return tuple(attentions)


def _in_layer_order(attentions: tuple[nn.Module, ...], recorder: _Recorder) -> list[tuple[nn.Module, AttentionCall]]:
    by_module = {id(module): call for module, call in recorder.calls}
    return [(module, by_module[id(module)]) for module in attentions]
