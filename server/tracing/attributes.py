"""What the spans of a request say, and when they begin and end: plain data, without OpenTelemetry.

Names are those of its semantic conventions where they have one, and ``truedraft.*`` where they have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler.request import ChoiceTiming
from scheduler.stats import FinishedChoice
from server.tracing.trace import AttributeValue, RequestTrace

MAX_CHOICES = 16  # of a request have spans of their own; the sums are of all
CLIENT_CLOSED = 499  # status of an answer that nobody waited for

Phase = tuple[str, float, float, dict[str, AttributeValue]]  # name, begin, end (seconds, monotonic), attributes


def span_name(trace: RequestTrace) -> str:
    return trace.operation if trace.model is None else f"{trace.operation} {trace.model}"


def first_choices(trace: RequestTrace) -> list[FinishedChoice]:
    """Those that have spans of their own."""
    return sorted(trace.finished, key=lambda each: each.index)[:MAX_CHOICES]


def outcome(trace: RequestTrace) -> str:
    """complete, refused (before it was queued), failed, aborted (its time was over, or the server's), client_left."""
    if trace.status == CLIENT_CLOSED or not trace.complete:
        return "client_left"
    if trace.model is None and trace.status >= 400 and trace.status != 500:
        return "refused"
    reasons = {finished.finish_reason for finished in trace.finished}
    if "error" in reasons or trace.status == 500:
        return "failed"
    return "aborted" if "abort" in reasons or trace.status >= 400 else "complete"


def problem_of(trace: RequestTrace) -> str | None:
    """Why the span's status is an error; None if it is none. What a client did wrong, or left, is no error here."""
    how = outcome(trace)
    if how in ("failed", "aborted") or (how == "refused" and trace.status >= 500):
        return how
    return None


def request_attributes(trace: RequestTrace) -> dict[str, AttributeValue]:
    """Of the request's own span."""
    how = outcome(trace)
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": trace.operation,
        "gen_ai.provider.name": "truedraft",
        "http.request.method": "POST",
        "http.route": trace.route,
        "url.path": trace.route,
        "truedraft.request_id": trace.request_id,
        "truedraft.outcome": how,
        **trace.asked,
    }
    if trace.status:
        attributes["http.response.status_code"] = trace.status
    if problem_of(trace) is not None:
        attributes["error.type"] = str(trace.status) if trace.status >= 400 else how
    if trace.key is not None:
        attributes["truedraft.key"] = trace.key
    if trace.model is None:
        return attributes
    attributes["gen_ai.response.model"] = trace.model
    if trace.answer_id is not None:
        attributes["gen_ai.response.id"] = trace.answer_id
    return attributes | _sums(trace)


def _sums(trace: RequestTrace) -> dict[str, AttributeValue]:
    """Of all choices that have ended."""
    finished = sorted(trace.finished, key=lambda each: each.index)
    timings = [each.timing for each in finished]
    sums: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": trace.num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(timing.num_output_tokens for timing in timings),
    }
    if not finished:
        return sums
    sums["gen_ai.response.finish_reasons"] = tuple(each.finish_reason for each in finished[:MAX_CHOICES])
    # Choices of one prompt share its blocks: what the first had not was cached for nobody.
    cached: dict[str, int] = {}
    for each in finished:
        known = cached.get(each.request_id)
        found = each.timing.num_cached_tokens
        cached[each.request_id] = found if known is None else min(known, found)
    sums["gen_ai.usage.cache_read.input_tokens"] = sum(cached.values())
    began = [timing.first_token_time for timing in timings if timing.num_output_tokens]
    if began and trace.asked.get("gen_ai.request.stream"):
        sums["gen_ai.response.time_to_first_chunk"] = round(min(began) - trace.arrival_time, 6)
    sums["truedraft.preemptions"] = sum(timing.num_preemptions for timing in timings)
    return sums | _speculation(timings)


def _speculation(timings: Sequence[ChoiceTiming]) -> dict[str, AttributeValue]:
    steps = sum(timing.num_spec_steps for timing in timings)
    accepted = sum(timing.num_accepted for timing in timings)
    speculation: dict[str, AttributeValue] = {
        "truedraft.speculation.steps": steps,
        "truedraft.speculation.drafted_tokens": sum(timing.num_drafted for timing in timings),
        "truedraft.speculation.accepted_tokens": accepted,
    }
    if steps:
        speculation["truedraft.speculation.acceptance_length"] = round(1 + accepted / steps, 6)
    return speculation


def phases(finished: FinishedChoice) -> Iterator[Phase]:
    """What a choice went through, as far as it came. What never happened has the time of the end in its timing."""
    timing = finished.timing
    choice: dict[str, AttributeValue] = {"truedraft.choice": finished.index}
    yield "queue", timing.arrival_time, timing.first_scheduled_time, choice
    has_tokens = timing.num_output_tokens > 0
    if not has_tokens and timing.first_scheduled_time >= finished.finish_time:
        return
    yield (
        "prefill",
        timing.first_scheduled_time,
        timing.first_token_time,
        {
            **choice,
            "gen_ai.usage.input_tokens": timing.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": timing.num_cached_tokens,
        },
    )
    if not has_tokens:
        return
    yield (
        "decode",
        timing.first_token_time,
        timing.last_token_time,
        {
            **choice,
            "gen_ai.usage.output_tokens": timing.num_output_tokens,
            "truedraft.finish_reason": finished.finish_reason,
            "truedraft.preemptions": timing.num_preemptions,
            "truedraft.speculation.acceptance_histogram": timing.acceptance_histogram,
            **_speculation([timing]),
        },
    )
