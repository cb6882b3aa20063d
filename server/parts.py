"""What a service is assembled from, where it can be exchanged: by whoever wants faults on purpose, for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvcache.manager import KVCacheManager
from model.interface import Executor
from model.tokenizer import Tokenizer
from scheduler.request import TextFilterFactory
from server.worker import WorkerProcess
from specdec.constraint import TokenConstraint
from specdec.drafters.base import Drafter
from specdec.sampling import Sampler

T = TypeVar("T")


def unchanged(part: T) -> T:
    return part


@dataclass(frozen=True, slots=True)
class Parts:
    """How :func:`server.assemble.assemble` gets each part; the defaults are the parts themselves.

    A function from a part to a part is called once, when the part has been measured, and what it returns is used in
    its place; classes are called with what the class itself takes.
    """

    executor: Callable[[Executor], Executor] = unchanged  # of the target
    drafter: Callable[[Drafter], Drafter] = unchanged  # each; it must be scoring or costly if the part is
    sampler: type[Sampler] = Sampler
    manager: type[KVCacheManager] = KVCacheManager
    constraint: Callable[[TokenConstraint], TokenConstraint] = unchanged
    text_filters: Callable[[TextFilterFactory], TextFilterFactory] = unchanged
    tokenizer: Callable[[Tokenizer], Tokenizer] = unchanged  # of prompts; outputs have their text from text_filters
    worker: Callable[..., WorkerProcess] = WorkerProcess  # for grammars and for the chat template


PLAIN = Parts()
