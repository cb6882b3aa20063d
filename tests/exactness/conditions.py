"""The conditions under which an answer must not change by a bit: one table, used on every executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.offline import OfflineConfig


@dataclass(frozen=True, slots=True)
class Condition:
    """How the same requests are run: the engine's configuration, and who runs beside whom."""

    name: str
    config: OfflineConfig = field(default_factory=OfflineConfig)
    batch: int = 8  # requests in flight together
    threads: int = 2
    reverse: bool = False  # order of arrival
    warm: bool = False  # run twice in one engine: the second time from the prefix cache
    tight_pool: bool = False  # room for little more than the longest request
    oracle_errors: float | None = None  # drafts are the known answer, each token spoiled with this probability
    max_output: int | None = None  # compare only so many output tokens (where a condition is slow)


def _c(name: str, config: dict[str, Any] | None = None, **how: Any) -> Condition:
    return Condition(name, OfflineConfig(**(config or {})), **how)


def _k(num_speculative_tokens: int, drafter: str = "ngram", **config: Any) -> dict[str, Any]:
    return {"num_speculative_tokens": num_speculative_tokens, "drafter": drafter, **config}


_ORACLES = ((0.0, 1), (0.0, 8), (0.15, 3), (0.3, 8))

REFERENCE = _c("alone, no speculation", _k(0, prefix_cache=False), batch=1)

CONDITIONS: tuple[Condition, ...] = (
    *(_c(f"batch {n}", _k(0), batch=n) for n in (2, 3, 8, 16)),
    _c("batch 16, reversed arrival", _k(0), batch=16, reverse=True),
    *(_c(f"chunks of {n}", _k(0, max_num_batched_tokens=n)) for n in (5, 16, 33, 128)),
    *(_c(f"block size {n}", _k(4, block_size=n)) for n in (1, 4, 64)),
    _c("one thread", _k(4), threads=1),
    _c("one thread, alone", _k(0), threads=1, batch=1),
    _c("warm prefix cache", _k(4), warm=True),
    # Each length, by one of two drafters in turn.
    *(_c(f"n-gram drafts, k = {k}", _k(k)) for k in (2, 4, 6, 8)),
    *(_c(f"random drafts, k = {k}", _k(k, "random")) for k in (1, 3, 5, 7)),
    _c("random drafts, alone, k = 8", _k(8, "random"), batch=1),
    _c("random drafts, k = 8 over blocks of 4", _k(8, "random", block_size=4)),
    _c("n-gram drafts, k = 8 over blocks of 1, small chunks", _k(8, block_size=1, max_num_batched_tokens=40)),
    _c("a pool so small that requests are preempted", _k(4, block_size=1), batch=16, tight_pool=True),
    *(_c(f"drafts of which {e:.0%} are wrong, k = {k}", _k(k, block_size=4), oracle_errors=e) for e, k in _ORACLES),
    _c("drafts of the first layer, preempted", _k(4, "exit", exit_layers=1, block_size=1), batch=16, tight_pool=True),
    _c("preempted at every step", _k(0, preempt_every_step=True), max_output=6),
    _c("preempted at every step, with drafts", _k(3, "random", preempt_every_step=True), max_output=6),
)
