"""docs/metrics.md, made from the schema: ``python -m server.metrics.page > docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterator

from server.metrics.exposition import VLLM_CACHE_LABELS
from server.metrics.kinds import ALWAYS_ONE, COMMON_LABELS, VLLM_PREFIX, Group, Label, Metric
from server.metrics.schema import GROUPS, SCHEMA

_INTRO = """# Metrics

`GET /metrics` answers in Prometheus' text format 0.0.4, whatever a scraper asks for. Every name begins with `truedraft_`, which the tables and headings leave out; where vLLM
has the same metric, the rest is vLLM's name. Scrape every server by itself, never through a load balancer: a counter that jumps between servers has no rate.

This page is made from the code (`python -m server.metrics.page > docs/metrics.md`). For each metric it says what it means, what to ask Prometheus, and when to worry.
Dashboards and alerts that do the asking are in [monitoring.md](monitoring.md); what to do when an alert fires is in [runbook.md](runbook.md).
"""

_NOT_PAYING = """## When speculation does not pay

The output is right all the same; only time is lost. Look at the [measured gain](#spec_decode_plain_seconds_total) and the queries beside it, in this order:

| what it shows | what it means | what to do |
|---|---|---|
| measured gain below 1 for minutes | speculation costs more than it brings. A mean chosen draft length near 0 beside it: what is lost is the time of drafting. Far above 0: `--draft-length fixed`, or requests that name `speculation.num_speculative_tokens`, which are drafted whether or not it pays | `--draft-length auto`; `--drafter ngram`, or `--num-speculative-tokens 0`; then compare again |
| measured gain about 1, mean draft length near 0 | nothing to gain at this load or with these texts: the controller has turned drafts off, as it should | nothing |
| tokens measured / expected far below 1 | drafts come true less often than the controller learnt: the traffic has changed within minutes | wait; it follows within some hundred steps |
| seconds measured / expected far above 1 | steps take longer than measured: another program on the machine, longer contexts, too many threads | look at the machine; `step_duration_seconds{stage="verify"}` says since when |
| acceptance of one drafter far below the others' | that drafter does not suit the traffic | name another one with `--drafter`, or in the requests (`speculation.drafter`) |
| memory of a drafter at its bound | past outputs are forgotten, the oldest first; no fault | nothing |
"""

_VLLM = """## vLLM's names

`--metrics-alias vllm` tells the metrics that vLLM has too a second time, under its prefix `vllm:`, so that dashboards, autoscalers and the Gateway API's endpoint picker made for it work
unchanged. Names, kinds and labels are vLLM's; the numbers are counted once. What to know when reading them:

- `vllm:num_requests_running` and `vllm:num_requests_waiting` count choices, as here, so a request with `n = 2` is two.
- The buckets are those of this page: a few more at the low end than vLLM has.
- `vllm:cache_config_info` has vLLM's labels that mean something here ({cache_labels}) and, as there, no `model_name`.

{names}.
"""


_COST = """## What it costs

```sh
.venv/bin/python -m bench.observing
```

runs the engine's steps in blocks that take turns: in one each step is observed as in a server (its record is made, and heard by the metrics, the buffer of the page `/ui` and the rest), in the
next it is not. It fails if observing takes more than 2 % of a step's time. Numbers are plain Python in the event loop's thread, added up after a step and written only when somebody reads
`/metrics`.

With the default model on 2 cores of an AMD EPYC 9004 (`--batch 1 --batch 8 --pairs 60`) observing took 116 us of a step of 10.8 ms with one sequence (1.1 %) and 110 us of 34.7 ms with eight
(0.3 %), and `/metrics` was written in 5.6 ms.
"""


def metrics_markdown() -> str:
    """docs/metrics.md, whole."""
    parts = [_INTRO, _labels_section(), _overview()]
    for group in GROUPS:
        parts.append(_group(group))
        if group.title == "Speculation":
            parts.append(_NOT_PAYING)
    names = ", ".join(f"`{VLLM_PREFIX}{metric.shown_name}`" for metric in SCHEMA.values() if metric.vllm)
    labels = ", ".join(f"`{name}`" for name in VLLM_CACHE_LABELS)
    parts += [_VLLM.format(names=names, cache_labels=labels), _COST]
    return "\n".join(parts)


def _labels_section() -> str:
    common = ", ".join(f"`{label.name}` ({label.meaning})" for label in COMMON_LABELS)
    return (
        f"Every metric has the labels {common}. No label ever comes from a request. A labelled series with fixed words "
        "is there from the start, at 0, so that a rate is right from its first event.\n"
    )


def _overview() -> str:
    lines = ["## All metrics", "", "| metric | kind | unit | meaning |", "|---|---|---|---|"]
    for group in GROUPS:
        for metric in group.metrics:
            name = f"[`{metric.shown_name}`](#{metric.shown_name})"
            lines.append(f"| {name} | {metric.kind} | {metric.unit} | {_meaning(metric)} |")
    return "\n".join(lines) + "\n"


def _meaning(metric: Metric) -> str:
    labels = "".join(f" By `{label.name}`." for label in metric.labels if metric.unit != ALWAYS_ONE)
    return metric.help + labels


def _group(group: Group) -> str:
    lines = [f"## {group.title}", ""]
    for metric in group.metrics:
        lines += [*_details(metric), ""]
    return "\n".join(lines)


def _details(metric: Metric) -> Iterator[str]:
    yield f"### `{metric.shown_name}`"
    yield ""
    yield " ".join(filter(None, [f"A {metric.kind}. {metric.help}", metric.more, _absence(metric)]))
    if metric.labels:
        yield ""
        yield from (f"- {_label(label)}" for label in metric.labels)
    if isinstance(metric.buckets, tuple) and metric.buckets:
        yield ""
        yield "Buckets: " + " ".join(f"{bound:.15f}".rstrip("0").rstrip(".") for bound in metric.buckets)
    yield ""
    yield "```promql"
    yield metric.query
    yield "```"
    yield ""
    yield f"**When to worry.** {metric.worry}"


def _absence(metric: Metric) -> str:
    return f"Absent {metric.absent}." if metric.absent else ""


def _label(label: Label) -> str:
    values = f": {', '.join(f'`{value}`' for value in label.values)}" if label.values else ""
    return f"`{label.name}`, {label.meaning}{values}"


if __name__ == "__main__":
    print(metrics_markdown(), end="")
