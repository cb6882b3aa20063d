"""An executor around another one, for who wants to watch its forwards or to spoil them."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.storage import KVStorage, PlaneSpec
from model.batch import PackedBatch
from model.errors import ModelError
from model.interface import Executor, ExitExecutor, ForwardOutput, ModelInfo, ReducedHead


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

    def check_exit(self, num_layers: int) -> None:
        self._exit().check_exit(num_layers)

    def reduce_head(self, token_ids: Sequence[int]) -> ReducedHead:
        return self._exit().reduce_head(token_ids)

    def forward(
        self,
        batch: PackedBatch,
        *,
        capture_layers: bool = False,
        num_layers: int | None = None,
        head: ReducedHead | None = None,
    ) -> ForwardOutput:
        if num_layers is None and head is None:
            return self.inner.forward(batch, capture_layers=capture_layers)
        return self.inner.forward(batch, capture_layers=capture_layers, num_layers=num_layers, head=head)

    def _exit(self) -> ExitExecutor:
        if not isinstance(self.inner, ExitExecutor):
            raise ModelError(f"{self.kind} cannot stop after its first layers")
        return self.inner
