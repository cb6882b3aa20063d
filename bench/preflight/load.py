"""How many requests run at once: from arrivals by Little's law, L = arrival rate x time in the system."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.preflight.cost import StepCost
from bench.preflight.traffic import RecordedRequest

MIN_SPAN = 1e-6  # seconds from the first arrival to the last; less is no rate


@dataclass(frozen=True, slots=True)
class Load:
    """``concurrency`` is None where it cannot be known; ``how`` says from what it comes, or why there is none."""

    num_requests: int
    prompt_tokens: float  # medians
    output_tokens: float
    requests_per_second: float | None
    concurrency: float | None
    how: str
    saturated: bool = False  # more arrives than plain decoding here can serve


def find_load(requests: Sequence[RecordedRequest], cost: StepCost) -> Load:
    """The load of ``requests``, on this machine where the traffic does not say how long its requests took."""
    prompt = statistics.median(len(request.prompt) for request in requests)
    output = statistics.median(request.num_output_tokens for request in requests)
    arrivals = sorted(request.arrival for request in requests if request.arrival is not None)

    def load(rate: float | None, concurrency: float | None, how: str, saturated: bool = False) -> Load:
        return Load(len(requests), prompt, output, rate, concurrency, how, saturated)

    if len(arrivals) < 2 or arrivals[-1] - arrivals[0] < MIN_SPAN:
        told = f"{len(arrivals)} of {len(requests)} lines have an arrival; at least 2 are needed, at different times"
        return load(None, None, told)
    # n arrivals span n - 1 gaps.
    rate = (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])
    latencies = [request.latency for request in requests if request.latency is not None]
    if latencies:
        mean = statistics.fmean(latencies)
        return load(rate, rate * mean, f"{rate:.3g} requests/s x {mean:.3g} s, the recorded latency")
    batch = _batch_for(rate, output, cost)
    if batch is None:
        most = max(requests_per_second(b, output, cost) for b in cost.batches)
        how = f"{rate:.3g} requests/s arrive; plain decoding here serves {most:.3g} at batch {cost.batches[-1]}"
        return load(rate, float(cost.batches[-1]), how, saturated=True)
    return load(rate, batch, f"{rate:.3g} requests/s, with the step times measured here")


def requests_per_second(batch: float, output_tokens: float, cost: StepCost) -> float:
    """What plain decoding serves with ``batch`` requests at once: each needs its decode steps, and all its prefill."""
    round_seconds = max(0.0, output_tokens - 1) * cost.seconds(batch, 0) + batch * cost.prefill_seconds
    return batch / round_seconds


def _batch_for(rate: float, output_tokens: float, cost: StepCost) -> float | None:
    """The smallest batch that serves ``rate``, below 1 for a server that idles between requests; None: none does."""
    alone = requests_per_second(1, output_tokens, cost)
    if rate <= alone:
        return rate / alone
    steps = 64
    low, high = 1.0, float(cost.batches[-1])
    for i in range(1, steps + 1):
        batch = low + (high - low) * i / steps
        if requests_per_second(batch, output_tokens, cost) >= rate:
            return batch
    return None
