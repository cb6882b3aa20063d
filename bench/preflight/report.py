"""What preflight found, as text for a person and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.preflight.acceptance import Replay
from bench.preflight.checklist import Line, passed
from bench.preflight.cost import StepCost
from bench.preflight.gain import Gain
from bench.preflight.load import Load
from bench.preflight.traffic import BadLine

MAX_BAD_LINES_SHOWN = 10
_SIGNS = {"yes": "\u2713", "no": "\u2717", "unknown": "?"}


@dataclass
class Findings:
    """Everything that was found; what was not looked at stays empty."""

    source: str
    model: str
    fit: Line
    checklist: list[Line]
    bad_lines: Sequence[BadLine] = ()
    load: Load | None = None
    cost: StepCost | None = None
    outputs: str = ""  # whose outputs the acceptance is of
    replays: Sequence[Replay] = ()
    gains: Sequence[Gain] = ()
    server: dict[str, Any] = field(default_factory=dict)  # numbers of a server's metrics

    @property
    def passed(self) -> bool:
        return passed([self.fit, *self.checklist])

    def as_json(self) -> dict[str, Any]:
        """Plain data, schema 1."""
        return {
            "schema": 1,
            "tool": "truedraft preflight",
            "source": self.source,
            "model": self.model,
            "passed": self.passed,
            "fit": asdict(self.fit),
            "checklist": [asdict(line) for line in self.checklist],
            "bad_lines": [asdict(line) for line in self.bad_lines],
            "load": None if self.load is None else asdict(self.load),
            "cost": None if self.cost is None else _cost_json(self.cost),
            "outputs": self.outputs,
            "acceptance": [_replay_json(replay) for replay in self.replays],
            "gains": [asdict(gain) for gain in self.gains],
            "server": self.server,
        }

    def as_text(self) -> str:
        """For a terminal of 100 columns or more."""
        parts = [f"truedraft preflight: {self.model}, {self.source}", *self._bad_lines()]
        if self.load is not None:
            parts += ["", "Load", f"  {_load_text(self.load)}"]
        if self.server:
            parts += ["", "Server", *(f"  {line}" for line in _server_text(self.server))]
        if self.cost is not None:
            parts += ["", *_cost_text(self.cost)]
        if self.replays:
            parts += [
                "",
                f"Acceptance, exact match, {self.outputs}",
                *_table(_REPLAY_HEAD, map(_replay_row, self.replays)),
            ]
        if self.gains:
            parts += ["", "Expected gain: tokens/s with speculation / without (bound, if every draft were accepted)"]
            parts += _gain_text(self.gains)
        parts += ["", "Go-live checklist", *(_line_text(line) for line in self.checklist), "", _line_text(self.fit)]
        return "\n".join(parts)

    def _bad_lines(self) -> list[str]:
        if not self.bad_lines:
            return []
        shown = [f"    line {bad.line}: {bad.reason}" for bad in self.bad_lines[:MAX_BAD_LINES_SHOWN]]
        more = len(self.bad_lines) - len(shown)
        return [f"  {len(self.bad_lines)} lines cannot be used:", *shown, *([f"    and {more} more"] if more else [])]


def _line_text(line: Line) -> str:
    return f"  {_SIGNS[line.answer]} {line.answer:<8}{line.name}: {line.reason}"


def _load_text(load: Load) -> str:
    tokens = f"{load.prompt_tokens:g} prompt and {load.output_tokens:g} output tokens (medians)"
    size = f"{load.num_requests} requests, {tokens}"
    if load.concurrency is None:
        return f"{size}; concurrency unknown: {load.how}"
    least = "at least " if load.saturated else ""
    return f"{size}; {least}{load.concurrency:.2g} at once: {load.how}"


def _server_text(numbers: dict[str, Any]) -> list[str]:
    def shown(name: str, value: Any) -> str:
        if value is None:
            return "unknown"
        if name.startswith(("ttft", "itl", "verify")):
            return f"{1e3 * value:.1f} ms"
        return f"{value:,.1f}"

    names = {
        "running": "requests running, mean",
        "waiting": "requests waiting, mean",
        "tokens_per_second": "tokens a second",
        "rows_per_step": "rows a step, drafts included",
        "verify_seconds": "forward of a step",
        "ttft_p50": "TTFT, median",
        "ttft_p95": "TTFT, 95th percentile",
        "itl_p50": "ITL, median",
        "itl_p95": "ITL, 95th percentile",
        "preemptions": "preemptions",
    }
    lines = [f"{names[name]}: {shown(name, numbers[name])}" for name in names if name in numbers]
    return [str(numbers["window"]), *lines] if "window" in numbers else lines


def _cost_text(cost: StepCost) -> list[str]:
    rounds = next(iter(cost.timings.values())).rounds
    title = (
        f"Time of a step in ms at {cost.context} tokens of context: median [quartiles] of {rounds} interleaved rounds; "
        "rows = batch x (k + 1)"
    )
    rows = []
    for batch in cost.batches:
        cells = [cost.timings[batch, k] for k in cost.ks]
        rows.append([str(batch), *(f"{1e3 * t.median:.1f} [{1e3 * t.low:.1f} {1e3 * t.high:.1f}]" for t in cells)])
    return [title, *_table(["batch", *(f"k = {k}" for k in cost.ks)], rows)]


_REPLAY_HEAD = ["drafter", "k", "steps", "drafted", "accepted", "rate", "acc. length", "tokens/step", "by position"]


def _replay_row(replay: Replay) -> list[str]:
    return [
        replay.drafter,
        _most(replay.k, replay.batch is not None),
        str(replay.steps),
        str(replay.drafted),
        str(replay.accepted),
        _percent(replay.acceptance_rate),
        f"{replay.acceptance_length:.2f}",
        f"{replay.tokens_per_step:.2f}",
        " ".join(_percent(rate) for rate in replay.rate_at),
    ]


def _gain_text(gains: Sequence[Gain]) -> list[str]:
    batches = sorted({gain.batch for gain in gains})
    rows: dict[tuple[str, int, bool], dict[int, str]] = {}
    for gain in gains:
        cells = rows.setdefault((gain.drafter, gain.k, gain.controlled), {})
        cells[gain.batch] = f"{gain.expected:.2f} ({gain.bound:.2f})"
    lines = [
        [drafter, _most(k, controlled), *(cells.get(batch, "-") for batch in batches)]
        for (drafter, k, controlled), cells in rows.items()
    ]
    return _table(["drafter", "k", *(f"batch {batch}" for batch in batches)], lines)


def _most(k: int, controlled: bool) -> str:
    return f"up to {k}" if controlled else str(k)


def _table(head: Sequence[str], rows: Any) -> list[str]:
    lines = [list(head), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def _cost_json(cost: StepCost) -> dict[str, Any]:
    cells = [
        {"batch": batch, "k": k, "rows": batch * (k + 1), **asdict(timing), "bound": cost.bound(batch, k)}
        for (batch, k), timing in sorted(cost.timings.items())
    ]
    return {"context": cost.context, "prefill_seconds": cost.prefill_seconds, "steps": cells}


def _replay_json(replay: Replay) -> dict[str, Any]:
    return {
        **asdict(replay),
        "acceptance_rate": replay.acceptance_rate,
        "acceptance_length": replay.acceptance_length,
        "tokens_per_step": replay.tokens_per_step,
        "rate_at": replay.rate_at,
    }
