"""The fused executor: Llama-shaped models from a declarative description, on kernels of our own.

Two backends compute the same decoder: the compiled CPU kernels (:mod:`model.fused_cpu`), and plain torch operations
in fixed tiles (:mod:`model.fused_torch`) for any device and for machines without the kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvcache.storage import TARGET_PLANES, KVStorage, PlaneSpec
from model.batch import PackedBatch
from model.exits import check_depth, head_ids
from model.fused_cpu import CpuStack
from model.fused_spec import FusedSpec, UnsupportedModel, supports, unsupported_reason
from model.fused_torch import TorchStack
from model.fused_weights import collect_weights
from model.int8 import Quantize
from model.interface import ForwardOutput, ModelInfo, ReducedHead
from model.kernels import KernelsChoice, find_kernels

__all__ = ["FusedExecutor", "FusedSpec", "UnsupportedModel", "supports", "unsupported_reason"]

_log = logging.getLogger(__name__)


class Stack(Protocol):
    """What a backend computes."""

    @property
    def name(self) -> str: ...

    @property
    def mask_seconds(self) -> float:
        """What attention masks took in the last run; 0 without any."""

    def run(
        self,
        batch: PackedBatch,
        planes: list[Tensor],
        *,
        capture: bool,
        num_layers: int | None = None,
        head: ReducedHead | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits ``[R, V]`` float32 on the CPU, final hidden states ``[R, H]``, layer outputs ``[L, T, H]``.

        ``planes`` are K and V of layer 0, then of layer 1, and so on; the rows' slots are written. Only the first
        ``num_layers`` layers run, if given.
        """

    def reduced_head(self, token_ids: Tensor) -> Any:
        """What a ReducedHead for ``token_ids`` ``[n]`` holds."""


class FusedExecutor:
    """Implements model.interface.Executor. Its planes are named ``{plane_prefix}.{layer}.k`` and ``.v``."""

    def __init__(self, spec: FusedSpec, stack: Stack, info: ModelInfo, *, plane_prefix: str = TARGET_PLANES) -> None:
        self.spec = spec
        self._stack = stack
        self._info = info
        self._plane_prefix = plane_prefix
        self._planes: list[Tensor] | None = None

    @classmethod
    def from_hf(
        cls,
        source: Mapping[str, Tensor] | nn.Module,
        config: Any,
        *,
        info: ModelInfo,
        device: str = "cpu",
        num_threads: int | None = None,
        kernels: KernelsChoice | None = None,
        plane_prefix: str = TARGET_PLANES,
        quantize: Quantize = "none",
    ) -> FusedExecutor:
        """Build from a state dict (or a Hugging Face model) and its config.

        The dtype is the embedding's. ``num_threads`` None follows torch's thread count. ``kernels`` "torch" takes the
        torch path even where the compiled kernels could run. The compiled path keeps only the embedding of ``source``.
        ``quantize`` "int8" makes all products int8 (model.int8), the head's included.
        Raises UnsupportedModel for the config and ModelError for the weights.
        """
        spec = FusedSpec.from_config(config)
        state = source.state_dict() if isinstance(source, nn.Module) else source
        weights = collect_weights(spec, state)
        stack: Stack | None = None
        if torch.device(device).type == "cpu" and weights.dtype in (torch.bfloat16, torch.float32):
            found, reason = find_kernels(kernels)
            if found is not None:
                stack = CpuStack(spec, weights, found, num_threads=num_threads, quantize=quantize)
            else:
                _log.info("no compiled kernels (%s): the fused executor runs on torch", reason)
        if stack is None:
            tiled = TorchStack(spec, weights, device=device, quantize=quantize)
            return TiledFusedExecutor(spec, tiled, info, plane_prefix=plane_prefix)
        return cls(spec, stack, info, plane_prefix=plane_prefix)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def kind(self) -> str:
        return f"fused/{self._stack.name}"

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        shape = (self.spec.num_kv_heads, self.spec.head_dim)
        dtype = torch.bfloat16 if self._info.dtype == "bfloat16" else torch.float32
        return tuple(
            PlaneSpec(f"{self._plane_prefix}.{layer}.{part}", shape, dtype)
            for layer in range(self.spec.num_layers)
            for part in "kv"
        )

    @property
    def weight_bytes(self) -> int:
        """Of the products, the head's included: what a forward of one row has to read."""
        size = 2 if self._info.dtype == "bfloat16" else 4
        return self.spec.num_weights * (1 if self._info.quantization == "int8" else size)

    def bind(self, storage: KVStorage) -> None:
        planes = []
        for spec in self.planes:
            plane = storage.plane(spec.name)
            if tuple(plane.shape[1:]) != spec.shape or plane.dtype != spec.dtype:
                raise ValueError(f"plane {spec.name} holds {tuple(plane.shape[1:])} {plane.dtype}, expected {spec}")
            planes.append(plane)
        self._planes = planes

    @torch.inference_mode()
    def forward(
        self,
        batch: PackedBatch,
        *,
        capture_layers: bool = False,
        num_layers: int | None = None,
        head: ReducedHead | None = None,
    ) -> ForwardOutput:
        """Raises RuntimeError for ids, positions, slots or blocks outside of the model or the storage."""
        if self._planes is None:
            raise RuntimeError("bind a storage before the first forward")
        if num_layers is not None:
            check_depth(num_layers, self._info)
        logits, hidden, layers = self._stack.run(
            batch, self._planes, capture=capture_layers, num_layers=num_layers, head=head
        )
        return ForwardOutput(logits=logits, hidden=hidden, layers=layers, mask_seconds=self._stack.mask_seconds)

    def check_exit(self, num_layers: int) -> None:
        """The layers are ours: any number of them can run."""
        check_depth(num_layers, self._info)

    @torch.inference_mode()
    def reduce_head(self, token_ids: Sequence[int]) -> ReducedHead:
        ids = head_ids(token_ids, self._info.vocab_size)
        return ReducedHead(ids, self._stack.reduced_head(ids))


class TiledFusedExecutor(FusedExecutor):
    """On torch operations: implements model.interface.TiledExecutor."""

    def __init__(
        self, spec: FusedSpec, stack: TorchStack, info: ModelInfo, *, plane_prefix: str = TARGET_PLANES
    ) -> None:
        super().__init__(spec, stack, info, plane_prefix=plane_prefix)
        self._torch = stack

    @property
    def inner_padding(self) -> str:
        return ""

    @property
    def tile_classes(self) -> tuple[int, ...]:
        return self._torch.tile_classes

    @tile_classes.setter
    def tile_classes(self, classes: tuple[int, ...]) -> None:
        self._torch.tile_classes = classes
