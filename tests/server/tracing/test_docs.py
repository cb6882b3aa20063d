"""docs/tracing.md names every attribute, and no other; names of the conventions are really theirs."""

from __future__ import annotations

import re
from pathlib import Path

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, url_attributes

from scheduler.request import ChoiceSpec, EngineRequest
from server.schemas import CompletionRequest
from server.tracing.asked import asked_for
from server.tracing.attributes import phases, request_attributes
from specdec.params import SamplingParams
from tests.server.tracing.builders import finished, timing, trace

PAGE = (Path(__file__).parents[3] / "docs" / "tracing.md").read_text("utf-8")


def all_attributes() -> set[str]:
    """Of a request that has every one of them, in one way or another."""
    body = {
        "model": "tiny",
        "prompt": ["a", "b"],
        "n": 2,
        "stream": True,
        "top_k": 3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "speculation": {"num_speculative_tokens": 2},
    }
    choice = ChoiceSpec(0, SamplingParams(seed=1, max_tokens=5))
    engine_requests = [EngineRequest(f"cmpl-{i}", (1,), (choice,), 0.0) for i in range(2)]
    asked = asked_for(CompletionRequest.model_validate(body), engine_requests)
    ended = trace(asked=asked, key="alice", finished=[finished(), finished("b", 1, finish_reason="error")])
    names = set(request_attributes(ended))
    for _, _, _, attributes in phases(finished(timing=timing())):
        names |= set(attributes)
    return names


def test_every_attribute_is_documented_and_no_other() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([a-z0-9_]+(?:\.[a-z0-9_]+)+)`", row)}
    assert documented == all_attributes()


def test_names_that_are_not_ours_are_those_of_the_conventions() -> None:
    known = {
        value
        for module in (gen_ai_attributes, error_attributes, http_attributes, url_attributes)
        for value in vars(module).values()
        if isinstance(value, str)
    }
    theirs = {name for name in all_attributes() if not name.startswith("truedraft.")}
    assert theirs <= known
