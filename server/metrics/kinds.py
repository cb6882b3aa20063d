"""What is told of a metric, once: its name, kind, unit, labels and buckets, and what people need to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

PREFIX = "truedraft_"
VLLM_PREFIX = "vllm:"
ALWAYS_ONE = "always 1"  # the unit of a gauge that tells by its labels

Kind = Literal["counter", "gauge", "histogram"]
Buckets = tuple[float, ...] | Callable[[int], tuple[float, ...]]  # upper bounds, or these by the most draft tokens


@dataclass(frozen=True, slots=True)
class Label:
    """Never anything that a request sent. Without ``values`` they follow from how the server was started."""

    name: str
    meaning: str
    values: tuple[str, ...] = ()


MODEL_NAME = Label("model_name", "the first served name")
ENGINE = Label("engine", "`0`: a server has one")
COMMON_LABELS = (MODEL_NAME, ENGINE)  # of every metric


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``query``, ``worry``, ``more`` and ``absent`` are for docs/metrics.md."""

    name: str  # without prefix and, of a counter, without "_total"
    kind: Kind
    unit: str
    help: str  # the line in /metrics: one sentence
    query: str  # PromQL, one or more lines
    worry: str  # when to, and what then
    labels: tuple[Label, ...] = ()  # beyond the common ones
    buckets: Buckets = ()  # of a histogram
    more: str = ""  # what one line has no room for
    absent: str = ""  # when a server does not have it; empty: never
    vllm: bool = False  # vLLM has it too: the same name, kind and labels

    @property
    def full_name(self) -> str:
        """As Prometheus keeps it, a histogram without its suffixes."""
        return f"{PREFIX}{self.shown_name}"

    @property
    def shown_name(self) -> str:
        """The full name without the prefix, as docs and dashboards write it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Every name that a query can ask for."""
        if self.kind == "histogram":
            return tuple(f"{self.full_name}{suffix}" for suffix in ("_bucket", "_sum", "_count"))
        return (self.full_name,)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Of a series, ``le`` of a bucket left out."""
        return tuple(label.name for label in (*COMMON_LABELS, *self.labels))

    def bounds(self, max_speculative_tokens: int) -> tuple[float, ...]:
        """Upper bounds of the buckets, infinity left out."""
        return self.buckets(max_speculative_tokens) if callable(self.buckets) else self.buckets


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics that are read together."""

    title: str
    metrics: tuple[Metric, ...]
    intro: str = ""
