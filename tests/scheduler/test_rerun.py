"""What an audit compares: whatever its reader got, and each of it decides alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from scheduler.audit import AuditCase, AuditConfig, AuditFinding
from scheduler.request import ChoiceSpec, ChoiceTiming, EngineRequest
from scheduler.rerun import Rerun
from specdec.params import SamplingParams
from specdec.plan import SequenceOutput, TokenLogprobs
from tests.scheduler.builders import ToyFilter, build_request, token_text

TIMING = ChoiceTiming(0.0, 0.0, 0.0, 0.0, 3, 0, 2)
ENTRY = TokenLogprobs(8, -1.0, 1, ((8, -1.0),))
REQUEST = build_request("a", (1, 2, 4), max_tokens=2, logprobs=1)
CASE = AuditCase(
    REQUEST, 0, REQUEST.choices[0].params, (7, 8), "length", None, (replace(ENTRY, token_id=7), ENTRY), (), TIMING
)


def rerun(outputs: list[SequenceOutput], case: AuditCase = CASE, **config: Any) -> AuditFinding:
    one = Rerun(case, ToyFilter(case.request, 0), AuditConfig(**{"rate": 1.0, **config}))
    found = [finding for output in outputs if (finding := one.take(output)) is not None]
    assert len(found) == 1
    return found[0]


def output(token_id: int, *, entry: TokenLogprobs = ENTRY, last: bool = False, gap: float | None = None) -> Any:
    return SequenceOutput(
        0,
        (token_id,),
        logprobs=(replace(entry, token_id=token_id),),
        finish_reason="length" if last else None,
        rival_gap=gap,
    )


BELOW = {"exact": False, "near_tie": 0.1}


@pytest.mark.parametrize(
    ("outputs", "config", "expected"),
    [
        ([output(7), output(8, last=True)], {}, ("match", None, None)),
        ([output(7), output(9, last=True, gap=0.05)], {}, ("mismatch", "token_ids", 1)),
        ([output(7), output(9, last=True, gap=0.05)], {"near_tie": 0.1}, ("mismatch", "token_ids", 1)),  # at L0
        ([output(7), output(9, last=True, gap=0.05)], BELOW, ("near_tie", "token_ids", 1)),
        ([output(7), output(9, last=True, gap=0.2)], BELOW, ("mismatch", "token_ids", 1)),
        ([output(9, gap=0.05), output(9, last=True, gap=5.0)], BELOW, ("near_tie", "token_ids", 0)),
        ([output(9, gap=5.0), output(9, last=True, gap=0.05)], BELOW, ("mismatch", "token_ids", 0)),
        ([output(7), output(8)], {}, ("mismatch", "finish_reason", 2)),
        ([output(7), output(8)], BELOW, ("mismatch", "finish_reason", 2)),
        ([output(7, last=True)], {}, ("mismatch", "finish_reason", 1)),
        ([output(7), output(8, entry=replace(ENTRY, logprob=-1.0000001), last=True)], {}, ("mismatch", "logprobs", 1)),
        ([output(7), output(8, entry=replace(ENTRY, top=()), last=True)], {}, ("mismatch", "logprobs", 1)),
        ([output(7), output(8, entry=replace(ENTRY, logprob=-1.05), last=True)], BELOW, ("match", None, None)),
        ([output(7), output(8, entry=replace(ENTRY, logprob=-1.2), last=True)], BELOW, ("mismatch", "logprobs", 1)),
        ([output(7), SequenceOutput(0, error="no token left")], BELOW, ("mismatch", "error", 1)),
    ],
)
def test_what_counts_as_equal(
    outputs: list[SequenceOutput], config: dict[str, Any], expected: tuple[str, str | None, int | None]
) -> None:
    found = rerun(outputs, **config)
    assert (found.result, found.what, found.position) == expected


SCORED = replace(CASE, prompt_logprobs=(ENTRY, replace(ENTRY, logprob=-3.0)))
PROMPT = SequenceOutput(0, prompt_logprobs=SCORED.prompt_logprobs[:1], prompt_start=1)
FIRST = replace(output(7), prompt_logprobs=SCORED.prompt_logprobs[1:], prompt_start=2)
LAST = output(8, last=True)
OTHER: dict[str, Any] = {"token_id": 9, "logprob": -1.5, "rank": 2, "top": ((8, -1.0), (3, -2.0))}

# What the rerun gives instead of PROMPT, FIRST, LAST, and where that differs.
DIFFERENCES: dict[str, tuple[list[SequenceOutput], str, int]] = {
    "a token": ([PROMPT, FIRST, output(9, last=True)], "token_ids", 1),
    "a token less": ([PROMPT, replace(FIRST, finish_reason="length")], "finish_reason", 1),
    "a token more": (
        [PROMPT, FIRST, replace(LAST, token_ids=(8, 8), logprobs=(ENTRY, ENTRY))],
        "finish_reason",
        3,
    ),
    "the end": ([PROMPT, FIRST, replace(LAST, finish_reason=None)], "finish_reason", 2),
    "the finish reason": ([PROMPT, FIRST, replace(LAST, finish_reason="stop")], "finish_reason", 2),
    "the stop reason": ([PROMPT, FIRST, replace(LAST, stop_token_id=8)], "stop_reason", 2),
    "an error": ([PROMPT, FIRST, SequenceOutput(0, error="no token left")], "error", 1),
    "logprobs that are missing": ([PROMPT, FIRST, replace(LAST, logprobs=None)], "logprobs", 1),
    "too few logprobs": ([PROMPT, FIRST, replace(LAST, logprobs=())], "logprobs", 1),
    "prompt logprobs that are missing": ([replace(FIRST, prompt_logprobs=None), LAST], "prompt_logprobs", 1),
    "too few prompt logprobs": ([PROMPT, replace(FIRST, prompt_logprobs=None), LAST], "prompt_logprobs", 2),
    "too many prompt logprobs": (
        [PROMPT, replace(FIRST, prompt_logprobs=(*SCORED.prompt_logprobs[1:], ENTRY)), LAST],
        "prompt_logprobs",
        3,
    ),
    **{
        f"{name} of a logprob": (
            [PROMPT, FIRST, replace(LAST, logprobs=(replace(ENTRY, **{name: value}),))],
            "logprobs",
            1,
        )
        for name, value in OTHER.items()
    },
    **{
        f"{name} of a prompt logprob": (
            [PROMPT, replace(FIRST, prompt_logprobs=(replace(SCORED.prompt_logprobs[1], **{name: value}),)), LAST],
            "prompt_logprobs",
            2,
        )
        for name, value in OTHER.items()
    },
}


def test_nothing_differs_if_the_same_comes() -> None:
    assert rerun([PROMPT, FIRST, LAST], SCORED).result == "match"
    assert set(OTHER) == {field.name for field in fields(TokenLogprobs)}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_each_thing_that_a_reader_got_is_compared(name: str) -> None:
    outputs, what, position = DIFFERENCES[name]
    found = rerun(outputs, SCORED)
    assert (found.result, found.what, found.position) == ("mismatch", what, position)


def test_logprobs_that_nobody_got_are_a_difference_too() -> None:
    found = rerun([PROMPT, FIRST, LAST], replace(SCORED, logprobs=()))
    assert (found.what, found.position) == ("logprobs", 0)
    found = rerun([PROMPT, FIRST, LAST], replace(SCORED, prompt_logprobs=()))
    assert (found.what, found.position) == ("prompt_logprobs", 1)


STRING = token_text(8)


@pytest.mark.parametrize(
    ("sent", "outputs", "what"),
    [
        (STRING, [output(7), output(8)], None),
        (STRING, [output(7), output(8, last=True)], None),
        ("zz", [output(7), output(8)], "stop_reason"),  # another string of the request
        (8, [output(7), output(8)], "stop_reason"),
        (None, [output(7), output(8)], "stop_reason"),
    ],
)
def test_the_stop_string_that_ended_it_is_compared(
    sent: int | str | None, outputs: list[SequenceOutput], what: str | None
) -> None:
    request = replace(REQUEST, stop=(STRING, "zz"))
    assert rerun(outputs, replace(CASE, request=request, finish_reason="stop", stop_reason=sent)).what == what


@pytest.mark.parametrize("sent", [8, 9, None, "i"])
def test_the_stop_token_that_ended_it_is_compared(sent: int | str | None) -> None:
    end = replace(output(8), finish_reason="stop", stop_token_id=8)
    found = rerun([output(7), end], replace(CASE, finish_reason="stop", stop_reason=sent))
    assert found.what == (None if sent == 8 else "stop_reason")


GROWN: dict[str, Callable[[AuditCase], AuditCase]] = {
    **{
        f"params.{name}": lambda case, name=name, value=value: replace(  # type: ignore[misc]
            case, params=replace(case.params, **{name: value})
        )
        for name, value in {
            "logit_bias": tuple((i, 1.0) for i in range(300)),
            "stop_token_ids": frozenset(range(300)),
            "allowed_token_ids": tuple(range(300)),
            "bad_words": ((1,) * 150, (2,) * 150),
            "grammar": "g" * 1200,
        }.items()
    },
    **{
        f"request.{name}": lambda case, name=name, value=value: replace(  # type: ignore[misc]
            case, request=replace(case.request, **{name: value})
        )
        for name, value in {
            "request_id": "r" * 300,
            "prompt_token_ids": (1,) * 300,
            "prediction_token_ids": (1,) * 300,
            "cache_salt": "s" * 300,
            "stop": ("a" * 200, "b" * 100),
            "shown_special_ids": frozenset(range(300)),
        }.items()
    },
    **{
        f"timing.{name}": lambda case, name=name: replace(  # type: ignore[misc]
            case, timing=replace(case.timing, **{name: (1,) * 300})
        )
        for name in ("acceptance_histogram", "per_step_drafted", "per_step_accepted")
    },
    "token_ids": lambda case: replace(case, token_ids=(1,) * 300),
    "logprobs": lambda case: replace(case, token_ids=(1,) * 150, logprobs=(replace(ENTRY, top=()),) * 150),
    "prompt_logprobs": lambda case: replace(case, prompt_logprobs=(ENTRY,) * 150),
    "stop_reason": lambda case: replace(case, stop_reason="s", request=replace(case.request, stop=("s" * 300,))),
}
# Constant in size, or words of the engine's own; the other choices share what is large.
_SMALL = {"params.drafter", "request.choices", "finish_reason"}


@pytest.mark.parametrize("name", GROWN)
def test_whatever_a_case_holds_more_of_takes_more_of_the_queues_bound(name: str) -> None:
    assert GROWN[name](CASE).size >= CASE.size + 250


def test_nothing_that_can_grow_is_left_out() -> None:
    assert CASE.request.choices == (ChoiceSpec(0, CASE.params),)
    growing = {
        prefix + field.name
        for prefix, kind in (
            ("", AuditCase),
            ("request.", EngineRequest),
            ("params.", SamplingParams),
            ("timing.", ChoiceTiming),
        )
        for field in fields(kind)
        if any(word in str(field.type) for word in ("tuple", "str", "frozenset", "list", "dict"))
    }
    assert growing - _SMALL == set(GROWN)
