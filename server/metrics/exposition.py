"""Prometheus' text format of the numbers, under our names and, if wanted, under vLLM's.

Alone imports prometheus_client. The alias costs no second set of observations: the same numbers are written twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from server.metrics.cells import Cell, Family, Histogram
from server.metrics.kinds import PREFIX, VLLM_PREFIX
from server.metrics.schema import SCHEMA

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CACHE_CONFIG = "cache_config_info"
# vLLM's labels of this one, from ours: it has no model's name there, and tells the capacity.
VLLM_CACHE_LABELS = (
    "engine", "block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching", "cache_dtype",
)  # fmt: skip


class Exposition(Collector):
    """The families of ``families`` that have a series, in the schema's order."""

    def __init__(self, families: Mapping[str, Family], *, vllm: bool) -> None:
        self._families = families
        self._vllm = vllm

    def collect(self) -> Iterator[Metric]:
        present = [self._families[name] for name in SCHEMA if name in self._families]
        for family in present:
            yield _written(family, PREFIX, family.metric.label_names, family.series.items())
        if self._vllm:
            yield from map(_as_vllm, (family for family in present if family.metric.vllm))


def render(exposition: Exposition) -> bytes:
    return generate_latest(exposition)


def _as_vllm(family: Family) -> Metric:
    if family.metric.name != CACHE_CONFIG:
        return _written(family, VLLM_PREFIX, family.metric.label_names, family.series.items())
    names = family.metric.label_names
    series = (
        (_vllm_cache_labels(dict(zip(names, values, strict=True))), cell) for values, cell in family.series.items()
    )
    return _written(family, VLLM_PREFIX, VLLM_CACHE_LABELS, series)


def _vllm_cache_labels(ours: Mapping[str, str]) -> tuple[str, ...]:
    blocks, size = ours["num_blocks"], ours["block_size"]
    capacity = str(int(blocks) * int(size))
    return (ours["engine"], size, blocks, capacity, ours["enable_prefix_cache"], ours["cache_dtype"])


def _written(
    family: Family, prefix: str, label_names: tuple[str, ...], series: Iterable[tuple[tuple[str, ...], Cell]]
) -> Metric:
    name, text = f"{prefix}{family.metric.name}", family.metric.help
    if family.metric.kind == "histogram":
        histogram = HistogramMetricFamily(name, text, labels=label_names)
        for values, cell in series:
            assert isinstance(cell, Histogram), name
            histogram.add_metric(values, list(zip(_bounds(cell), accumulate(cell.counts), strict=True)), cell.total)
        return histogram
    written = (CounterMetricFamily if family.metric.kind == "counter" else GaugeMetricFamily)(
        name, text, labels=label_names
    )
    for values, cell in series:
        assert not isinstance(cell, Histogram), name
        written.add_metric(values, cell.value)
    return written


def _bounds(cell: Histogram) -> Iterator[str]:
    yield from map(floatToGoString, cell.bounds)
    yield "+Inf"
