"""The controller that settings ask for."""

from __future__ import annotations

from typing import Literal

from kvcache.storage import KVStorage
from model.interface import Executor
from specdec.draft_length.controller import DraftLengthController
from specdec.draft_length.measure import measure_step_cost

DraftLength = Literal["auto", "fixed"]


def make_controller(
    choice: DraftLength, executor: Executor, storage: KVStorage, max_rows: int
) -> DraftLengthController | None:
    """``auto``: a controller with the costs of ``executor``, to which ``storage`` is bound and in which nothing is in
    use. ``fixed``: none, so that every draft is verified as long as it was proposed."""
    if choice == "fixed":
        return None
    return DraftLengthController(measure_step_cost(executor, storage, max_rows=max_rows))
