"""A tiny model to verify, and faults to plant in it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from model.batch import PackedBatch
from model.interface import Executor, ForwardOutput
from model.loader import LoadedModel, load_model
from model.wrapped import WrappedExecutor
from specdec.verification import Verdict
from tests.server.builders import save_tiny_model

Spoil = Callable[[PackedBatch, Tensor], None]  # may change the logits [R, V] in place


class FaultyExecutor(WrappedExecutor):
    """``inner`` with the logits of its whole forwards spoiled."""

    def __init__(self, inner: Executor, spoil: Spoil) -> None:
        super().__init__(inner)
        self._spoil = spoil

    def forward(self, batch: PackedBatch, **options: Any) -> ForwardOutput:
        output = super().forward(batch, **options)
        if options.get("num_layers") is not None:
            return output
        logits = output.logits.clone()
        self._spoil(batch, logits)
        return replace(output, logits=logits)


def load_tiny(folder: Path, home: Path) -> LoadedModel:
    """A random llama with a tokenizer."""
    return load_model(save_tiny_model(folder), home=home, name="tiny")


def with_fault(model: LoadedModel, spoil: Spoil) -> LoadedModel:
    return replace(model, executor=FaultyExecutor(model.executor, spoil))


def rows_at(batch: PackedBatch, position: int) -> list[int]:
    """Logits rows of the tokens at this position."""
    return [i for i, row in enumerate(batch.logits_rows.tolist()) if int(batch.positions[row]) == position]


def accept_one_too_many(
    drafts: Seq[int], target_token: Callable[[int], int], *, stop_token_ids: Collection[int], tokens_left: int
) -> Verdict:
    """A verification that takes the first rejected draft for the target's token, and ends there."""
    if tokens_left <= 0:
        return Verdict((), 0, "length")
    emitted: list[int] = []
    for row in range(len(drafts) + 1):
        token = target_token(row)
        wrong = row < len(drafts) and token != drafts[row]
        emitted.append(drafts[row] if wrong else token)
        if emitted[-1] in stop_token_ids:
            return Verdict(tuple(emitted), row, "stop", emitted[-1])
        if len(emitted) == tokens_left:
            return Verdict(tuple(emitted), row, "length")
        if wrong or row == len(drafts):
            break
    return Verdict(tuple(emitted), len(emitted) - 1)
