"""What the spans of a request say, and when they begin and end."""

from __future__ import annotations

from typing import Any

import pytest

from server.tracing.attributes import MAX_CHOICES, first_choices, outcome, phases, problem_of, request_attributes
from tests.server.tracing.builders import finished, timing, trace

ABORTED = finished(finish_reason="abort")
FAILED = finished(finish_reason="error")


@pytest.mark.parametrize(
    ("changes", "how", "is_error"),
    [
        ({}, "complete", False),
        ({"complete": False, "finished": [ABORTED]}, "client_left", False),
        ({"status": 499, "finished": [ABORTED]}, "client_left", False),
        ({"status": 0, "complete": False, "model": None, "finished": []}, "client_left", False),
        ({"status": 200, "finished": [ABORTED]}, "aborted", True),  # in a stream: its time was over
        ({"status": 504, "finished": [ABORTED]}, "aborted", True),
        ({"status": 503, "finished": [ABORTED]}, "aborted", True),  # the server's time was over
        ({"status": 200, "finished": [finished(), FAILED]}, "failed", True),
        ({"status": 500, "finished": [FAILED]}, "failed", True),
        ({"status": 500, "model": None, "finished": []}, "failed", True),
        ({"status": 400, "model": None, "finished": []}, "refused", False),
        ({"status": 429, "model": None, "finished": []}, "refused", False),
        ({"status": 503, "model": None, "finished": []}, "refused", True),
        ({"status": 400, "finished": [FAILED]}, "failed", True),  # a grammar that cannot go on
    ],
)
def test_how_a_request_ended(changes: dict[str, Any], how: str, is_error: bool) -> None:
    ended = trace(**changes)
    assert outcome(ended) == how
    assert (problem_of(ended) is not None) is is_error
    attributes = request_attributes(ended)
    assert attributes["truedraft.outcome"] == how
    assert ("error.type" in attributes) is is_error


def test_an_error_has_its_status_as_its_type_or_how_it_ended() -> None:
    assert request_attributes(trace(status=503, model=None, finished=[]))["error.type"] == "503"
    assert request_attributes(trace(finished=[FAILED]))["error.type"] == "failed"


def test_the_phases_are_what_the_metrics_call_queue_prefill_and_decode() -> None:
    spans = {name: (begin, end) for name, begin, end, _ in phases(finished())}
    assert spans == {"queue": (10.0, 11.0), "prefill": (11.0, 13.0), "decode": (13.0, 17.0)}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_output_tokens": 5}, ["queue", "prefill", "decode"]),
        ({"num_output_tokens": 1, "last_token_time": 13.0}, ["queue", "prefill", "decode"]),
        ({"num_output_tokens": 0, "first_token_time": 17.0}, ["queue", "prefill"]),
        ({"num_output_tokens": 0, "first_token_time": 17.0, "first_scheduled_time": 17.0}, ["queue"]),
    ],
    ids=["whole", "one token", "ended in its prompt", "ended in the queue"],
)
def test_a_choice_has_the_phases_that_it_came_to(changes: dict[str, Any], names: list[str]) -> None:
    assert [name for name, *_ in phases(finished(timing=timing(**changes)))] == names


def test_the_sums_are_of_all_choices_and_prompts_count_once() -> None:
    ends = [
        finished("cmpl-1-0", 0, timing=timing(num_cached_tokens=4)),
        finished("cmpl-1-0", 1, timing=timing(num_cached_tokens=6), finish_reason="stop"),
        finished("cmpl-1-1", 2, timing=timing(num_cached_tokens=1)),
    ]
    attributes = request_attributes(trace(finished=ends[::-1], num_prompt_tokens=14))
    assert attributes["gen_ai.usage.input_tokens"] == 14
    assert attributes["gen_ai.usage.output_tokens"] == 15
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 4 + 1
    assert attributes["gen_ai.response.finish_reasons"] == ("length", "stop", "length")
    assert attributes["truedraft.speculation.drafted_tokens"] == 12
    assert attributes["truedraft.speculation.accepted_tokens"] == 9
    assert attributes["truedraft.speculation.acceptance_length"] == 1 + 9 / 6


def test_without_drafts_there_is_no_acceptance_length() -> None:
    plain = timing(num_spec_steps=0, num_drafted=0, num_accepted=0, acceptance_histogram=())
    attributes = request_attributes(trace(finished=[finished(timing=plain)]))
    assert attributes["truedraft.speculation.steps"] == 0
    assert "truedraft.speculation.acceptance_length" not in attributes


def test_the_first_chunk_is_timed_where_there_are_chunks() -> None:
    asked = {"gen_ai.request.stream": True}
    assert request_attributes(trace(asked=asked))["gen_ai.response.time_to_first_chunk"] == 3.0
    assert "gen_ai.response.time_to_first_chunk" not in request_attributes(trace())


def test_a_request_with_very_many_choices_has_a_bounded_number_of_spans() -> None:
    ends = [finished(index=i) for i in range(100)]
    many = trace(finished=ends[::-1])
    assert [each.index for each in first_choices(many)] == list(range(MAX_CHOICES))
    attributes = request_attributes(many)
    assert attributes["gen_ai.usage.output_tokens"] == 500
    assert len(attributes["gen_ai.response.finish_reasons"]) == MAX_CHOICES  # type: ignore[arg-type]
