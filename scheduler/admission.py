"""Which requests are taken in: what could never run is refused before it is queued. scheduler.room bounds the rest."""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from scheduler.config import SchedulerConfig
from scheduler.errors import RequestTooLarge
from scheduler.request import EngineRequest


class Capacity(Protocol):
    """The size of a KV cache: a KVCacheManager, or what is known of one elsewhere."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def fits(self, num_tokens: int) -> bool:
        """Could an empty pool hold a sequence of ``num_tokens``?"""


def check_form(request: EngineRequest, ids_in_use: Container[str]) -> None:
    """Raises ValueError for a malformed request or an id that is in use."""
    if request.request_id in ids_in_use:
        raise ValueError(f"request id {request.request_id!r} is in use")
    indices = [spec.index for spec in request.choices]
    if not indices or len(set(indices)) != len(indices):
        raise ValueError(f"a request needs choices with different indices, got {indices}")


def check_size(request: EngineRequest, config: SchedulerConfig, capacity: Capacity) -> None:
    """Raises RequestTooLarge if a choice could never run."""
    num_prompt = len(request.prompt_token_ids)
    max_tokens = max(spec.params.max_tokens for spec in request.choices)
    total = num_prompt + max_tokens
    if total > config.max_model_len:
        raise RequestTooLarge(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} exceed "
            f"the context of {config.max_model_len} tokens",
            "context_length",
        )
    # The last output token needs no slot: nothing follows it.
    if not capacity.fits(max(num_prompt, total - 1)):
        raise RequestTooLarge(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} can never fit the KV cache "
            f"of {capacity.num_blocks} blocks of {capacity.block_size} tokens",
            "kv_capacity",
        )
