"""What one cell of the comparison is: a load at a concurrency, in rounds, by a server with its engine here or apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.client import RequestTrace
from bench.event_loop.probe import Lag

HERE, APART = "here", "apart"
MODES = (HERE, APART)
COLUMNS = (
    "load", "conc.", "engine", "tokens/s", "ratio", "TTFT ms", "ITL p50", "ITL p99", "ITL max", "lag p50", "lag p99",
    "lag max",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a cell by one server."""

    traces: tuple[RequestTrace, ...]
    wall: float  # seconds
    lag: Lag  # of the server's event loop

    @property
    def tokens_per_second(self) -> float:
        return sum(trace.num_tokens for trace in self.traces) / self.wall


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Milliseconds, but for the first two numbers; gaps between chunks (ITL) of all rounds
    together, the rest medians over the rounds; ``max`` is the worst of all."""

    load: str
    concurrency: int
    engine: str
    tokens_per_second: float
    ratio: float | None  # to the engine here: the median of the rounds' own ratios
    ttft: float
    itl_p50: float
    itl_p99: float
    itl_max: float
    lag_p50: float
    lag_p99: float
    lag_max: float


def rows_of(load: str, concurrency: int, here: Sequence[Round], apart: Sequence[Round]) -> list[Row]:
    """Of rounds in pairs that were run one after the other."""
    pairs = zip(here, apart, strict=True)
    ratio = statistics.median(there.tokens_per_second / one.tokens_per_second for one, there in pairs)
    return [_row(load, concurrency, HERE, here, None), _row(load, concurrency, APART, apart, ratio)]


def _row(load: str, concurrency: int, engine: str, rounds: Sequence[Round], ratio: float | None) -> Row:
    traces = [trace for each in rounds for trace in each.traces]
    gaps = sorted(1e3 * gap for trace in traces for gap in trace.gaps)
    return Row(
        load=load,
        concurrency=concurrency,
        engine=engine,
        tokens_per_second=statistics.median(each.tokens_per_second for each in rounds),
        ratio=ratio,
        ttft=1e3 * statistics.median(trace.ttft for trace in traces),
        itl_p50=quantile(gaps, 0.5),
        itl_p99=quantile(gaps, 0.99),
        itl_max=quantile(gaps, 1.0),
        lag_p50=statistics.median(each.lag.p50_ms for each in rounds),
        lag_p99=statistics.median(each.lag.p99_ms for each in rounds),
        lag_max=max(each.lag.max_ms for each in rounds),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """NaN of nothing."""
    return ordered[int(share * (len(ordered) - 1))] if ordered else float("nan")


def differences(here: Sequence[Round], apart: Sequence[Round]) -> tuple[int, int]:
    """(requests compared, those whose token ids differ)."""
    pairs = [
        (a.token_ids, b.token_ids)
        for one, there in zip(here, apart, strict=True)
        for a, b in zip(one.traces, there.traces, strict=True)
    ]
    return len(pairs), sum(a != b for a, b in pairs)


def table(rows: Sequence[Row]) -> str:
    lines: list[tuple[str, ...]] = [COLUMNS]
    for row in rows:
        times = (row.itl_p50, row.itl_p99, row.itl_max, row.lag_p50, row.lag_p99, row.lag_max)
        lines.append(
            (
                row.load,
                str(row.concurrency),
                row.engine,
                f"{row.tokens_per_second:.1f}",
                "" if row.ratio is None else f"{row.ratio:.3f}",
                f"{row.ttft:.0f}",
                *(f"{value:.1f}" for value in times),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
