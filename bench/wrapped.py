"""An executor around another one, for who wants to watch its forwards or to spoil them."""

from __future__ import annotations

from kvcache.storage import KVStorage, PlaneSpec
from model.batch import PackedBatch
from model.interface import Executor, ForwardOutput, ModelInfo


class WrappedExecutor:
    """``inner`` as it is; a subclass changes ``forward``."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner

    @property
    def info(self) -> ModelInfo:
        return self.inner.info

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        return self.inner.planes

    def bind(self, storage: KVStorage) -> None:
        self.inner.bind(storage)

    def forward(self, batch: PackedBatch, *, capture_layers: bool = False) -> ForwardOutput:
        return self.inner.forward(batch, capture_layers=capture_layers)
