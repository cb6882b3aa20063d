"""What every executor offers, and what the rest of the system may know of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kvcache.storage import KVStorage, PlaneSpec
from model.batch import PackedBatch
from model.int8 import Quantize


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a loaded model. Plain data: picklable, no tensor in it."""

    name: str  # what it was loaded from, for people
    architecture: str  # e.g. "LlamaForCausalLM"
    model_type: str  # e.g. "llama"
    dtype: str  # "bfloat16" or "float32"
    device: str
    num_layers: int
    hidden_size: int
    vocab_size: int  # width of a logits row
    embedding_rows: int  # a token id must be below this
    max_model_len: int  # positions
    eos_token_ids: tuple[int, ...]  # generation_config's and the tokenizer's stop ids
    weights_hash: str  # hex SHA-256 over names, shapes and bytes of the weights
    quantization: Quantize = "none"  # of the products' weights (model.int8); ``dtype`` is that of all else

    @property
    def num_token_ids(self) -> int:
        """Ids below this can be sampled and are fit for input again."""
        return min(self.vocab_size, self.embedding_rows)


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What one forward returns; the caller owns it."""

    logits: Tensor  # [R, V] float32 on the CPU, one row per batch.logits_rows
    hidden: Tensor | None = None  # [R, H]: final (normed) hidden state of the logits rows
    layers: Tensor | None = None  # [L, T, H]: output of each decoder layer, only with capture_layers
    mask_seconds: float = 0.0  # wall time of it that went into attention masks; 0 where there are none


@dataclass(frozen=True, slots=True)
class ReducedHead:
    """The head for a part of the vocabulary, in the form of the executor that made it (``reduce_head``)."""

    token_ids: Tensor  # [n] int64 on the CPU, ascending: column i of the logits is this id's
    weight: Any


class Executor(Protocol):
    """Runs the target model on packed rows. One thread at a time may call it."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def kind(self) -> str:
        """ "generic" or "fused", with the path: e.g. "fused/cpu-avx512bf16", "fused/torch", "generic/torch"."""

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        """The KV planes this executor reads and writes; the storage must have been built from them."""

    def bind(self, storage: KVStorage) -> None:
        """Use ``storage`` from now on. Called once before the first forward, again to replace it."""

    def forward(
        self,
        batch: PackedBatch,
        *,
        capture_layers: bool = False,
        num_layers: int | None = None,
        head: ReducedHead | None = None,
    ) -> ForwardOutput:
        """Write the rows' K/V into their slots, attend through the block tables, return logits.

        Row-invariant: a row's logits are bit-equal whatever else the batch holds.

        With ``num_layers`` only the first so many layers run, then the final norm and the head. The K and V that
        they write are the very bits that a whole forward writes in these layers, as long as what they read is. With
        ``head`` the logits are ``[R, n]``, of its ids alone. Both need an :class:`ExitExecutor`.
        """


@runtime_checkable
class ExitExecutor(Executor, Protocol):
    """An executor whose first layers can run alone."""

    def check_exit(self, num_layers: int) -> None:
        """Raises ModelError, one line, if ``forward`` cannot stop after ``num_layers`` layers. May run a forward."""

    def reduce_head(self, token_ids: Sequence[int]) -> ReducedHead:
        """A head for ``token_ids`` alone, for this executor's ``forward``; takes memory of its own.

        Raises ValueError for ids that are not distinct ids of logits columns, ModelError if the head cannot be cut.
        """


@runtime_checkable
class TiledExecutor(Executor, Protocol):
    """An executor on torch operations, which round differently for different numbers of rows: it runs fixed tiles.

    ``tile_classes`` are the tile sizes it may use, ascending; all must give the bits of BASE_TILE (model.probe).
    """

    tile_classes: tuple[int, ...]

    @property
    def inner_padding(self) -> str:
        """What is padded beside the rows of a forward, for people; empty if nothing is."""
