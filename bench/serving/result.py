"""The report as plain data: an object for each cell and variant, with vLLM's names on top and ours below."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.json_numbers import rounded
from bench.serving.engine import engine_figures
from bench.serving.figures import acceptance_of_answers, client_figures, outcome_figures, round_figures
from bench.serving.options import Load, Options
from bench.serving.plan import Results
from bench.serving.runner import BenchRun
from bench.serving.target import Target
from bench.serving.workloads import describe
from bench.speculation.ratios import median_interval

SCHEMA = 1
SPREAD_OF = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_itl_ms", "median_e2el_ms")


def result_objects(run: BenchRun, options: Options, date: str) -> list[dict[str, Any]]:
    """One object for each cell and variant, in the order in which they ran. The first variant of a cell is what the
    others are compared with."""
    objects = []
    for results in run.results:
        base = next((one for one in run.results if one.cell == results.cell), results)
        objects.append(_object(results, base, options, date))
    return [rounded(one, 6) for one in objects]


def whole_report(
    run: BenchRun,
    objects: Sequence[Mapping[str, Any]],
    options: Options,
    targets: Sequence[tuple[Target, str]],
    date: str,
    machine: Mapping[str, Any],
) -> dict[str, Any]:
    """What report.json holds. ``targets`` with how each was started; ``machine``: where the client ran."""
    agreement = run.agreement
    failures = sum(sum(one["truedraft"]["failures"].values()) for one in objects)
    refused = sum(sum(one["truedraft"]["refused"].values()) for one in objects)
    return {
        "schema": SCHEMA,
        "tool": "truedraft bench",
        "date": date,
        "command": options.command,
        "seconds": round(run.seconds, 1),
        "stopped": run.stopped,
        "machine": dict(machine),
        "targets": [_target(target, how) for target, how in targets],
        "settings": {
            "rounds": options.size.rounds,
            "tokens": options.size.tokens,
            "temperature": options.size.temperature,
            "seed": options.size.seed,
            "ignore_eos": options.size.ignore_eos,
            "api": "chat" if options.size.chat else "completions",
            "slos": [str(slo) for slo in options.slos],
            "block_sizes": list(options.block_sizes),
        },
        "workloads": {one.cell.workload: describe(one.cell.prompts) for one in run.results},
        "equivalence": {
            "compared": agreement.compared,
            "different": agreement.different,
            "differences": [str(difference) for difference in agreement.differences],
        },
        "failures": failures,
        "refused": refused,
        "passed": bool(objects) and not run.stopped and not agreement.different and not failures,
        "results": list(objects),
    }


def _object(results: Results, base: Results, options: Options, date: str) -> dict[str, Any]:
    cell, variant, size = results.cell, results.variant, options.size
    traces = [trace for run in results.runs for trace in run.traces]
    engine, missing = engine_figures(results.accounts) if results.accounts else ({}, {})
    if not results.accounts:
        why = variant.target.why_no_metrics or "its /metrics could not be read around the runs"
        missing = dict.fromkeys(("draft cost", "alignment overhead", "KV fragmentation"), why)
    acceptance = engine.get("acceptance") or acceptance_of_answers(traces)
    if acceptance is None:
        missing.setdefault("acceptance length", f"{variant.target.why_no_metrics or 'not in its metrics'}, and its "
                           "answers do not tell")  # fmt: skip
    else:
        missing.pop("acceptance length", None)
    rounds = [round_figures(run) for run in results.runs]
    requests = size.requests_of(cell.load)
    return {
        "date": date,
        "backend": "openai-chat" if size.chat else "openai",
        "label": variant.name,
        "model_id": variant.target.model,
        "tokenizer_id": variant.target.model,
        "num_prompts": requests * len(results.runs),
        "request_rate": cell.load.rate if cell.load.rate is not None else "inf",
        "burstiness": 1.0,
        "max_concurrency": cell.load.seats,
        **client_figures(results.runs, options.slos),
        **_vllm_speculation(acceptance),
        "truedraft": {
            "workload": cell.workload,
            "load": _load(cell.load),
            "variant": variant.name,
            "mode": variant.mode.name,
            "target": variant.target.name,
            "block_size": variant.block_size,
            "requests_a_round": requests,
            "rounds": rounds,
            "spread": _spread(rounds),
            "ratio": _ratio(results, base),
            "equivalence": {
                "compared": results.tally.compared,
                "different": results.tally.different,
                "unfinished": results.tally.unfinished,
                "by": results.tally.by,
            },
            **outcome_figures(traces, options.slos),
            **engine,
            "acceptance": acceptance,
            "missing": missing,
        },
    }


def _load(load: Load) -> dict[str, Any]:
    return {
        "kind": "closed" if load.seats is not None else "open",
        "text": str(load),
        "short": load.short,
        "seats": load.seats,
        "rate": load.rate,
    }


def _vllm_speculation(acceptance: Mapping[str, Any] | None) -> dict[str, Any]:
    if acceptance is None or not acceptance["drafts"]:
        return {}
    return {
        "spec_decode_acceptance_rate": 100.0 * (acceptance["rate"] or 0.0),  # percent, as there
        "spec_decode_acceptance_length": acceptance["length"],
        "spec_decode_num_drafts": acceptance["drafts"],
        "spec_decode_draft_tokens": acceptance["draft_tokens"],
        "spec_decode_accepted_tokens": acceptance["accepted_tokens"],
        "spec_decode_per_position_acceptance_rates": acceptance["by_position"],
    }


def _spread(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median, least and most of the rounds."""
    found = {}
    for name in SPREAD_OF:
        values = [one[name] for one in rounds if one[name] is not None]
        if values:
            found[name] = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return found


def _ratio(results: Results, base: Results) -> dict[str, Any] | None:
    """Output tokens a second over those of the first variant in the same round, with a bootstrap interval."""
    if results is base:
        return None
    pairs = zip(results.runs, base.runs, strict=False)
    ratios = []
    for mine, other in pairs:
        a, b = round_figures(mine)["output_throughput"], round_figures(other)["output_throughput"]
        if a > 0 and b > 0:
            ratios.append(a / b)
    if not ratios:
        return None
    interval = median_interval(ratios)
    return {"over": base.variant.name, "median": interval.median, "low": interval.low, "high": interval.high}


def _target(target: Target, how: str) -> dict[str, Any]:
    info = target.info
    exactness, model = info.get("exactness") or {}, info.get("model") or {}
    return {
        "name": target.name,
        "url": target.client.url,
        "started": how,
        "kind": "truedraft" if target.ours else "OpenAI-compatible",
        "model": target.model,
        "model_path": model.get("name"),
        "dtype": model.get("dtype"),
        "kernels": info.get("kernels"),
        "exactness_level": exactness.get("level"),
        "exactness_detail": exactness.get("detail"),
        "fields": list(target.fields),
        "metrics": target.prefix,
        "why_no_metrics": target.why_no_metrics,
    }
