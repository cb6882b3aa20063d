"""Limits of the scheduler: frozen and validated."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.audit import AuditConfig


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Raises ValueError, with the values, for limits that contradict each other.

    ``max_num_batched_tokens`` bounds the rows of a step, drafts included. It must be at least ``max_num_seqs``,
    so that every running sequence can have a row in every step.
    """

    max_num_seqs: int = 16  # running choices
    max_num_batched_tokens: int = 512  # rows of one step: the token budget
    max_model_len: int = 2048  # prompt and output tokens of one choice
    num_speculative_tokens: int = 4  # most drafts of one sequence in one step; 0 turns speculation off
    max_waiting_requests: int = 256  # requests of which no choice has run yet
    max_waiting_tokens: int | None = None  # prompt tokens of these requests; None: no bound
    itl_slo: float | None = None  # seconds that a step with decoding sequences may take for prompts; None: no bound
    preempt_every_step: bool = False  # for tests: see scheduler.preemption
    audit: AuditConfig | None = None  # None: no audits, at no cost

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_waiting_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens must not be negative, got {self.num_speculative_tokens}")
        if self.itl_slo is not None and not self.itl_slo > 0:
            raise ValueError(f"itl_slo must be positive, got {self.itl_slo}")
        if self.max_waiting_tokens is not None and self.max_waiting_tokens < 1:
            raise ValueError(f"max_waiting_tokens must be at least 1, got {self.max_waiting_tokens}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence needs a row"
            )
