"""Every token that was generated is somebody's: of who read it, or of who left."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from tests.server.builders import CONTEXT, MODEL_NAME, metric
from tests.server.test_disconnect import assert_idle, send, wait_for


def logged(caplog: pytest.LogCaptureFixture) -> list[int | None]:
    """The tokens that the access log has for each generating request that has ended."""
    return [
        getattr(record, "completion_tokens", None)
        for record in caplog.records
        if record.name == "truedraft.access" and record.getMessage().startswith("POST ")
    ]


@pytest.mark.case("S 39826")
def test_tokens_of_choices_that_ended_add_up_to_the_generated_ones(base: str, http: httpx.Client) -> None:
    generated = metric(base, "generation_tokens_total")
    aborted = metric(base, "ended_generation_tokens_total", finished_reason="abort")
    http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": ["a", "b"], "n": 2, "max_tokens": 7})
    sock = send(base, prompt="the quick", max_tokens=CONTEXT - 20, stream=True)
    wait_for(lambda: metric(base, "generation_tokens_total") > generated + 30, "it never decoded")
    sock.close()
    assert_idle(base)
    assert metric(base, "ended_generation_tokens_total") == metric(base, "generation_tokens_total")
    assert metric(base, "ended_generation_tokens_total", finished_reason="abort") > aborted


@pytest.mark.parametrize("stream", [False, True])
def test_the_access_log_has_the_usage_of_an_answer(
    base: str, http: httpx.Client, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": ["a", "b"], "n": 2, "max_tokens": 9, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    with caplog.at_level(logging.INFO, "truedraft.access"):
        answer = http.post("/v1/completions", json=body)
        wait_for(lambda: logged(caplog), "nothing was logged")
    last = answer.text.strip().split("\n\n")[-2].removeprefix("data: ") if stream else answer.text
    assert logged(caplog) == [json.loads(last)["usage"]["completion_tokens"]]


@pytest.mark.parametrize("stream", [False, True])
def test_the_access_log_has_what_was_generated_for_a_client_who_left(
    base: str, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    assert_idle(base)
    before = metric(base, "generation_tokens_total")
    with caplog.at_level(logging.INFO, "truedraft.access"):
        sock = send(base, prompt="the quick", max_tokens=CONTEXT - 20, stream=stream)
        wait_for(lambda: metric(base, "generation_tokens_total") > before + 20, "it never decoded")
        sock.close()
        wait_for(lambda: logged(caplog), "nothing was logged")
    assert_idle(base)
    assert logged(caplog) == [metric(base, "generation_tokens_total") - before]
