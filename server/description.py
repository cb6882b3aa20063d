"""What the wire has to know of its engine, wherever that runs. Plain data: no tensor, nothing that changes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from model.exactness import ExactnessReport
from model.interface import ModelInfo
from scheduler.config import SchedulerConfig
from server.resolve import ModelFacts
from server.settings import Settings
from server.version import VERSION

# Paths of the machine, addresses behind it, and secrets: nobody's business. The models' names are told elsewhere.
PRIVATE = {
    "model", "draft_model", "audit_store", "api_keys_file",
    "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "otlp_endpoint",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """Decided when the engine was built. Can cross the border to another process."""

    names: tuple[str, ...]  # served; answers carry the first
    model: ModelInfo
    exactness: ExactnessReport
    fingerprint: str
    created: int  # seconds since the epoch: when the model was loaded
    executor: str  # its kind
    kernels: dict[str, str]
    scheduler: SchedulerConfig
    num_blocks: int
    audit_blocks: int  # behind them
    block_size: int
    kv_bytes: int
    num_planes: int
    drafters: tuple[str, ...]  # that a request may name
    drafting: tuple[str, ...]  # those that draft, by the names that metrics give them
    remembering: tuple[str, ...]  # those of them that keep past texts
    no_grammars: str | None  # why there is no structured output; None if there is

    @property
    def facts(self) -> ModelFacts:
        """What requests are checked against."""
        return ModelFacts(
            names=self.names,
            max_model_len=self.scheduler.max_model_len,
            vocab_size=self.model.vocab_size,
            embedding_rows=self.model.embedding_rows,
            eos_token_ids=frozenset(self.model.eos_token_ids),
            kv_capacity=self.num_blocks * self.block_size,
            num_speculative_tokens=self.scheduler.num_speculative_tokens,
            drafters=self.drafters,
        )

    def info(self, settings: Settings) -> dict[str, Any]:
        """For /v1/server_info: what does not change."""
        exactness = self.exactness
        return {
            "version": VERSION,
            "model": {**asdict(self.model), "served_names": list(self.names)},
            "exactness": {
                "level": exactness.level,
                "summary": exactness.summary,
                "detail": exactness.detail,
                "padding": exactness.padding,
                "cached": exactness.cached,
                "checks": [asdict(check) for check in exactness.checks],
            },
            "executor": self.executor,
            "kernels": self.kernels,
            "system_fingerprint": self.fingerprint,
            "kv_cache": {
                "num_blocks": self.num_blocks,
                "audit_blocks": self.audit_blocks,
                "block_size": self.block_size,
                "capacity_tokens": self.num_blocks * self.block_size,
                "bytes": self.kv_bytes,
                "planes": self.num_planes,
            },
            "limits": {
                "max_model_len": self.scheduler.max_model_len,
                "max_n": settings.max_n,
                "max_stop": settings.max_stop,
                "max_prompts": settings.max_prompts,
                "max_choices": settings.max_choices,
                "max_body_bytes": settings.max_body_bytes,
                "max_waiting": settings.max_waiting,
                "max_waiting_tokens": settings.max_waiting_tokens,
                "request_timeout": settings.request_timeout,
            },
            "settings": settings.model_dump(mode="json", exclude=PRIVATE),
        }
