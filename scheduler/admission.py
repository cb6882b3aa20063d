"""Which requests are taken in: what could never run is refused before it is queued. scheduler.room bounds the rest."""

from __future__ import annotations

from kvcache.manager import KVCacheManager
from scheduler.config import SchedulerConfig
from scheduler.errors import RequestTooLarge
from scheduler.request import EngineRequest
from scheduler.roster import Roster


def check_form(request: EngineRequest, roster: Roster) -> None:
    """Raises ValueError for a malformed request or an id that is in use."""
    if request.request_id in roster.groups:
        raise ValueError(f"request id {request.request_id!r} is in use")
    indices = [spec.index for spec in request.choices]
    if not indices or len(set(indices)) != len(indices):
        raise ValueError(f"a request needs choices with different indices, got {indices}")


def check_size(request: EngineRequest, config: SchedulerConfig, manager: KVCacheManager) -> None:
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
    if not manager.fits(max(num_prompt, total - 1)):
        raise RequestTooLarge(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} can never fit the KV cache "
            f"of {manager.num_blocks} blocks of {manager.block_size} tokens",
            "kv_capacity",
        )
