"""The generic executor: any Hugging Face causal LM that passes the gate, on packed rows.

The whole forward runs on tiles of a fixed number of rows, because torch's matrix products pick other kernels (other
rounding) for other numbers of rows. A batch of 21 rows with tile classes 8, 16 and 64::

    rows     0 ............... 15 | 16 .. 20  dummy x 3
    tile     0                    | 1

Tiles run one after the other through all layers: a later tile reads the K and V that an earlier one wrote. Dummy rows
see nothing, write nothing, and nobody reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcache.storage import KVStorage, PlaneSpec
from model.attach import ATTENTION_NAME, AttentionCall, attach
from model.attention import AttentionTile, paged_attention, tile_sequences
from model.batch import PackedBatch, RowSpan
from model.errors import ModelError
from model.exits import check_depth, head_ids
from model.experts import EXPERT_TILE, tile_experts, untile_experts
from model.interface import ForwardOutput, ModelInfo, ReducedHead
from model.kernels import INSTRUCTION_SET, Kernels
from model.linear_weight import LaidOutLinears
from model.structure import ModelStructure
from model.wide_head import WideHead, select_columns

BASE_TILE = 16
TILE_CLASSES = (4, 8, BASE_TILE, 64, 256)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The tile that a forward works on."""

    count: int  # real rows, the rest are dummies
    slots: Tensor  # [count] int64
    attention: AttentionTile


class _LayerState:
    """What the attention function needs in one layer: its planes, and the tile that runs."""

    def __init__(self, executor: GenericExecutor, index: int) -> None:
        self._executor = executor
        self._names = tuple(plane.name for plane in executor.structure.planes[2 * index : 2 * index + 2])

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        storage, rows = self._executor.storage, self._executor.rows
        keys, values = (storage.plane(name) for name in self._names)
        keys.index_copy_(0, rows.slots, call.key[: rows.count])
        values.index_copy_(0, rows.slots, call.value[: rows.count])
        return paged_attention(
            call.query,
            keys,
            values,
            rows.attention,
            scaling=call.scaling,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )


class GenericExecutor:
    """Owns ``model`` from now on (it must have been loaded with ``attn_implementation=attach.ATTENTION_NAME``).

    ``kernels`` compute the head of a bfloat16 model, if given. ``tile_classes`` are the tile sizes it may use; all must
    give the same bits as BASE_TILE (see model.probe).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        structure: ModelStructure,
        info: ModelInfo,
        *,
        tile_classes: Sequence[int] = (BASE_TILE,),
        kernels: Kernels | None = None,
    ) -> None:
        self.model = model.eval()
        self.has_tiled_experts = tile_experts(model)
        self.structure = structure
        self.tile_classes = tuple(sorted(tile_classes))
        self._info = info
        self._storage: KVStorage | None = None
        self._rows: _Rows | None = None
        self._layers: list[Tensor] | None = None  # outputs of the decoder layers, while they are wanted
        self._head_input: Tensor | None = None
        self._layers_run = 0  # of the tile
        for i, module in enumerate(self.structure.attentions):
            attach(module, _LayerState(self, i))
        for layer in self.structure.layers:
            layer.register_forward_hook(self._note_layer)
        self.structure.head.register_forward_pre_hook(self._note_head_input)
        head = self.structure.head
        self._kernels_name = ""
        self._wide_head: WideHead | None = None
        if info.dtype != "float32" and isinstance(head, nn.Linear):
            self._wide_head = WideHead(head, kernels)
            self._kernels_name = f"+{INSTRUCTION_SET}" if kernels is not None else ""
        self._linears = LaidOutLinears(model, but=None if self._wide_head is None else head)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def kind(self) -> str:
        return f"generic/torch{self._kernels_name}"

    @property
    def inner_padding(self) -> str:
        return f"each expert's rows to tiles of {EXPERT_TILE}" if self.has_tiled_experts else ""

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        return self.structure.planes

    @property
    def storage(self) -> KVStorage:
        if self._storage is None:
            raise RuntimeError("bind a storage before the first forward")
        return self._storage

    @property
    def rows(self) -> _Rows:
        if self._rows is None:
            raise RuntimeError("attention outside of a forward")
        return self._rows

    def bind(self, storage: KVStorage) -> None:
        for plane in self.planes:
            found = storage.plane(plane.name)
            if tuple(found.shape[1:]) != plane.shape or found.dtype != plane.dtype:
                raise ValueError(f"plane {plane.name} holds {tuple(found.shape[1:])} {found.dtype}, expected {plane}")
        self._storage = storage

    @contextmanager
    def own_code(self) -> Iterator[None]:
        """Inside, the model runs as Hugging Face wrote it, with a float32 head: what forwards are compared with."""
        self.model.set_attn_implementation("eager")
        untile_experts(self.model)
        self._linears.leave()
        if self._wide_head is not None:
            self._wide_head.plain = True
        try:
            yield
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)
            tile_experts(self.model)
            self._linears.use()
            if self._wide_head is not None:
                self._wide_head.plain = False

    @contextmanager
    def _stopped(self, num_layers: int | None) -> Iterator[None]:
        """Inside, the model has its first ``num_layers`` layers only."""
        # Not by config.num_hidden_layers: many models (gpt2, opt, stablelm, gpt_oss) run through their list unasked.
        stack = self.structure.stack
        modules = stack._modules
        stack._modules = dict(list(modules.items())[:num_layers])
        try:
            yield
        finally:
            stack._modules = modules

    @contextmanager
    def _with_head(self, reduced: ReducedHead | None) -> Iterator[None]:
        """Inside, the head computes the columns of ``reduced`` alone."""
        head = self.structure.head
        if reduced is None:
            yield
        elif self._wide_head is not None:
            self._wide_head.reduced = reduced.weight
            try:
                yield
            finally:
                self._wide_head.reduced = None
        else:
            own = head.__dict__.get("forward")
            object.__setattr__(head, "forward", reduced.weight.on_torch)
            try:
                yield
            finally:
                if own is None:
                    object.__delattr__(head, "forward")
                else:
                    object.__setattr__(head, "forward", own)

    def check_exit(self, num_layers: int) -> None:
        """Runs one row through the layers, as far as that goes, and through all."""
        check_depth(num_layers, self._info)
        bound = self._storage
        storage = KVStorage(self.planes, num_blocks=1, block_size=1, device=self._info.device)
        batch = PackedBatch.build([RowSpan([0], 0, [0], 0)], block_size=1, scratch_block=storage.scratch_block)
        self.bind(storage)
        try:
            whole = self.forward(batch, capture_layers=True).layers
            cut = self.forward(batch, capture_layers=True, num_layers=num_layers).layers
        except Exception as error:  # whatever a model's own code raises when layers are missing
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ModelError(f"{self._info.model_type} cannot stop after {num_layers} layers ({reason})") from error
        finally:
            self._storage = bound
        if whole is None or cut is None or not torch.equal(cut, whole[:num_layers]):
            raise ModelError(
                f"{self._info.model_type} cannot stop after {num_layers} layers: they compute something else than in "
                "a whole forward"
            )

    @torch.inference_mode()
    def reduce_head(self, token_ids: Sequence[int]) -> ReducedHead:
        ids = head_ids(token_ids, self._info.vocab_size)
        head = self.structure.head
        if not isinstance(head, nn.Linear):
            kind = f"{self._info.model_type}'s head is a {type(head).__name__}"
            raise ModelError(f"{kind}, so its logits cannot be computed for a part of the vocabulary")
        if self._wide_head is not None:
            return ReducedHead(ids, self._wide_head.select(ids))
        return ReducedHead(ids, select_columns(head.weight.detach(), head.bias, ids))

    @torch.inference_mode()
    def forward(
        self,
        batch: PackedBatch,
        *,
        capture_layers: bool = False,
        num_layers: int | None = None,
        head: ReducedHead | None = None,
    ) -> ForwardOutput:
        if num_layers is None and head is None:
            return self._forward(batch, capture_layers)
        depth = self._info.num_layers if num_layers is None else num_layers
        check_depth(depth, self._info)
        with self._stopped(depth), self._with_head(head):
            output = self._forward(batch, capture_layers)
            if self._layers_run != depth:
                raise RuntimeError(f"{self._layers_run} layers ran, not the first {depth}")
        return output

    def _forward(self, batch: PackedBatch, capture_layers: bool) -> ForwardOutput:
        logits: list[Tensor] = []
        hidden: list[Tensor] = []
        layers: list[Tensor] = []
        mask_seconds = 0.0
        wanted = batch.logits_rows
        for first, count, size in plan_tiles(batch.num_rows, self.tile_classes):
            rows = wanted[(wanted >= first) & (wanted < first + count)] - first
            self._layers = [] if capture_layers else None
            try:
                tile_logits, tile_hidden = self._run(batch, first, count, size, rows)
                mask_seconds += self.rows.attention.mask_seconds
                if self._layers is not None:
                    layers.append(torch.stack(self._layers)[:, :count].cpu())
            finally:
                self._rows = self._layers = self._head_input = None
                if self._wide_head is not None:
                    self._wide_head.rows = None
            logits.append(tile_logits)
            hidden.append(tile_hidden)
        return ForwardOutput(
            logits=logits[0] if len(logits) == 1 else torch.cat(logits),
            hidden=torch.cat(hidden),
            layers=torch.cat(layers, dim=1) if capture_layers else None,
            mask_seconds=mask_seconds,
        )

    def _run(self, batch: PackedBatch, first: int, count: int, size: int, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Run rows ``[first, first + count)`` as a tile of ``size`` rows; ``wanted`` counts from ``first``."""
        device = self.model.device
        last = first + count
        input_ids = torch.zeros((1, size), dtype=torch.int64)
        positions = torch.zeros((1, size), dtype=torch.int64)
        input_ids[0, :count] = batch.input_ids[first:last]
        positions[0, :count] = batch.positions[first:last]
        self._rows = _Rows(
            count=count,
            slots=batch.slot_mapping[first:last].to(device),
            attention=AttentionTile(
                size, tile_sequences(batch, first, last), batch.block_size, torch.device(device), self.tile_classes
            ),
        )
        # The head's rows come in classes too. When nobody wants logits, one row keeps the model's code path alive.
        head_rows = next((c for c in self.tile_classes if 0 < len(wanted) <= c), 1)
        keep = torch.zeros(head_rows, dtype=torch.int64)
        keep[: len(wanted)] = wanted
        keep = keep.to(device)
        arguments: dict[str, Any] = {"logits_to_keep": keep} if self.structure.keeps_logits else {}
        if self._wide_head is not None:
            # A model that returns the logits of all rows has the wanted ones anywhere.
            self._wide_head.rows = len(wanted) if self.structure.keeps_logits or not len(wanted) else None
        self._layers_run = 0
        output = self.model(
            input_ids=input_ids.to(device), position_ids=positions.to(device), use_cache=False, **arguments
        )
        logits, hidden = output.logits[0], self._head_input
        assert hidden is not None
        if not self.structure.keeps_logits:
            logits, hidden = logits[keep], hidden[keep]
        return logits[: len(wanted)].float().cpu(), hidden[: len(wanted)].cpu()

    def _note_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        self._layers_run += 1
        if self._layers is not None:
            self._layers.append((output[0] if isinstance(output, tuple) else output)[0])

    def _note_head_input(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._head_input = args[0].reshape(-1, args[0].shape[-1])


def plan_tiles(num_rows: int, classes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut ``num_rows`` rows into (first row, real rows, tile size).

    Up to BASE_TILE rows are one tile, the smallest that holds them, as each tile reads all weights. More are cut into
    large tiles while they fill at least half of one.
    """
    first = 0
    while first < num_rows:
        left = num_rows - first
        small = next((c for c in classes if left <= c <= BASE_TILE), None)
        size = small or max((c for c in classes if 2 * left >= c), default=classes[0])
        count = min(left, size)
        yield first, count, size
        first += count
