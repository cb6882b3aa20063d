"""The engine in a process of its own: the same answers, the same numbers, and a clear end whoever ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from server.assemble import build_service
from server.remote.process import ChildProcess
from server.service import Service
from tests.server.builders import CONTEXT, MODEL_NAME, build_settings, joined, metric, running, sse_events
from tests.server.chat_builders import HELLO, joined_chat, save_chat_model
from tests.server.test_disconnect import assert_idle, send, wait_for
from tests.server.test_equality import BODIES, MIXED, answer
from tests.server.test_openai_client import GROUPS, ask_async, ask_sync
from tests.server.test_step_trace import BODY as TRACED
from tests.server.test_step_trace import check_steps, traced
from tests.server.test_worker import is_running
from tests.server.ui.records import feed_of

K = 4
STALL_SECONDS = 5.0  # of this server: a process that says nothing for so long is not healthy


@pytest.fixture(scope="module")
def chat_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tiny_model, tmp_path_factory.mktemp("chat") / "model")


def build(model: Path, home: Path, **changes: Any) -> Service:
    options = {
        "model": str(model),
        "executor": "generic",
        "kernels": "torch",
        "num_speculative_tokens": K,
        "audit_rate": 1.0,
        "audit_share": 1.0,
        "stall_timeout": STALL_SECONDS,
        **changes,
    }
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRUEDRAFT_HOME", str(home))
        patch.delenv("TRUEDRAFT_API_KEYS", raising=False)
        service = build_service(build_settings(**options), lines.append)
    assert any("loading" in line for line in lines)
    return service


@pytest.fixture(scope="module")
def here(chat_model: Path, model_home: Path) -> Iterator[httpx.Client]:
    with (
        running(build(chat_model, model_home)) as base,
        httpx.Client(base_url=base, timeout=60, trust_env=False) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def remote(chat_model: Path, model_home: Path) -> Service:
    return build(chat_model, model_home, engine_process=True)


@pytest.fixture(scope="module")
def child(remote: Service) -> ChildProcess:
    return remote.engine._process  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(scope="module")
def base(remote: Service, child: ChildProcess) -> Iterator[str]:
    with running(remote) as url:
        yield url
    assert not is_running(child.pid)


@pytest.fixture(scope="module")
def there(base: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base, timeout=60, trust_env=False) as client:
        yield client


def test_the_engine_is_another_process(here: httpx.Client, there: httpx.Client, child: ChildProcess) -> None:
    assert child.pid != os.getpid()
    assert is_running(child.pid)
    for http in (here, there):
        wait_for(lambda http=http: http.get("/health").status_code == 200, "it is not ready")


def test_the_server_tells_the_same_of_itself(here: httpx.Client, there: httpx.Client) -> None:
    def told(http: httpx.Client) -> dict[str, Any]:
        info: dict[str, Any] = http.get("/v1/server_info").json()
        assert info["settings"].pop("engine_process") is (http is there)
        info["exactness"] = {
            name: value for name, value in info["exactness"].items() if name not in ("cached", "summary")
        }
        speculation = info["speculation"]
        assert speculation.pop("step_seconds")  # measured by each, and refined by every step
        assert any(drafter["max_memory_bytes"] for drafter in speculation["drafters"])
        for drafter in speculation["drafters"]:
            del drafter["memory_bytes"]
        return info

    assert told(there) == told(here)


@pytest.mark.parametrize(
    ("ask", "body"),
    [*((ask_sync, body) for body in GROUPS), (ask_async, GROUPS[0])],
    ids=[*(",".join(body)[:40] for body in GROUPS), "async"],
)
def test_the_openai_client_gets_the_same_answers(
    here: httpx.Client, there: httpx.Client, ask: Any, body: dict[str, Any]
) -> None:
    body = {name: value for name, value in body.items() if name != "best_of"}  # which cannot be streamed

    def asked(http: httpx.Client) -> Any:
        whole, chunks = ask(str(http.base_url).rstrip("/"), body)
        counts = {name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        assert joined(chunks) == whole["choices"]
        return whole["choices"], whole["seed"], whole["system_fingerprint"], counts

    assert asked(there) == asked(here)


# No shrinking: each try is several requests.
@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(body=BODIES, k=st.integers(0, K))
def test_any_combination_gives_the_same_answer(
    here: httpx.Client, there: httpx.Client, body: dict[str, Any], k: int
) -> None:
    if body.get("stream") is not True:
        body.pop("stream_options", None)
    body["speculation"] = {"num_speculative_tokens": k}
    assert answer(there, body) == answer(here, body)


def test_a_batch_of_all_kinds_gives_what_each_gives_alone(here: httpx.Client, there: httpx.Client) -> None:
    bodies = [{"prompt": "0 1 2 0 1 2 0 1", "max_tokens": 20, "return_token_ids": True, **more} for more in MIXED]
    alone = [answer(here, body) for body in bodies]
    assert {found["status"] for found in alone} == {200}
    with ThreadPoolExecutor(len(bodies)) as threads:
        assert list(threads.map(lambda body: answer(there, body), bodies)) == alone


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": True, "top_logprobs": 2},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "required"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_chats_are_the_same_whole_and_streamed(here: httpx.Client, there: httpx.Client, more: dict[str, Any]) -> None:
    body = {"model": MODEL_NAME, "messages": HELLO, "seed": 5, "max_tokens": 30, "return_token_ids": True, **more}

    def asked(http: httpx.Client) -> list[dict[str, Any]]:
        whole = http.post("/v1/chat/completions", json=body)
        assert whole.status_code == 200, whole.text
        choices: list[dict[str, Any]] = whole.json()["choices"]
        streamed = joined_chat(sse_events(http.post("/v1/chat/completions", json={**body, "stream": True}).content))
        for choice in (*choices, *streamed):
            for call in choice["message"].get("tool_calls") or ():
                del call["id"]
        assert streamed == choices
        return choices

    assert asked(there) == asked(here)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * (CONTEXT + 1)},
        {"prompt": "a", "max_tokens": CONTEXT},
        {"prompt": "a", "model": "other"},
        {"prompt": "a", "bad_words": ["a"], "allowed_token_ids": [70], "logit_bias": {"70": -100}, "min_tokens": 2},
        {"prompt": "a", "structured_outputs": {"regex": "("}},
        {"prompt": "a", "speculation": {"drafter": "oracle"}},
    ],
    ids=str,
)
def test_errors_are_the_same(here: httpx.Client, there: httpx.Client, body: dict[str, Any]) -> None:
    def asked(http: httpx.Client) -> tuple[int, Any]:
        response = http.post("/v1/completions", json={"model": MODEL_NAME, "seed": 1, **body})
        return response.status_code, response.json().get("error")

    assert asked(there) == asked(here)


def test_a_grammar_that_was_compiled_is_not_checked_again(there: httpx.Client, base: str) -> None:
    body = {"model": MODEL_NAME, "prompt": "a", "structured_outputs": {"regex": "(yes|no|maybe)"}}
    before = metric(base, "grammar_checks_total", result="accepted")
    for _ in range(3):
        assert there.post("/v1/completions", json=body).json()["choices"][0]["text"] in ("yes", "no", "maybe")
    assert metric(base, "grammar_checks_total", result="accepted") == before + 1
    told = there.get("/v1/server_info").json()["structured_output"]
    assert told["cached_grammars"] > 0
    assert 0 < told["memory_bytes"] <= told["max_memory_bytes"]


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_ends_the_request(base: str, stream: bool) -> None:
    before = metric(base, "request_success_total", finished_reason="abort")
    generated = metric(base, "generation_tokens_total")
    sock = send(base, prompt="the quick", max_tokens=CONTEXT - 20, stream=stream)
    wait_for(lambda: metric(base, "generation_tokens_total") > generated, "it never decoded")
    sock.close()
    wait_for(lambda: metric(base, "request_success_total", finished_reason="abort") == before + 1, "it was not aborted")
    assert_idle(base)


def test_metrics_count_what_was_answered(there: httpx.Client, base: str) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total")
    before = [metric(base, name) for name in names]
    usage = [0, 0]
    for n in (1, 3):
        found = there.post(
            "/v1/completions", json={"model": MODEL_NAME, "prompt": "the quick", "n": n, "max_tokens": 9}
        )
        usage[0] += found.json()["usage"]["prompt_tokens"]
        usage[1] += found.json()["usage"]["completion_tokens"]
    assert [metric(base, name) - was for name, was in zip(names, before, strict=True)] == usage
    assert metric(base, "drafter_memory_bytes", drafter="suffix") > 0
    assert metric(base, "batch_build_seconds_sum", part="slots") > 0
    assert_idle(base)


def test_audits_find_no_difference(there: httpx.Client, base: str) -> None:
    def told() -> dict[str, Any]:
        audit: dict[str, Any] = there.get("/v1/server_info").json()["audit"]
        return audit

    wait_for(lambda: told()["num_waiting"] == told()["num_running"] == 0, "audits do not end")
    results = told()["results"]
    assert results["match"] > 0
    assert results["mismatch"] == results["near_tie"] == 0
    for result, count in results.items():
        assert metric(base, "equivalence_audits_total", result=result) == count


@pytest.mark.case("V 36130")
def test_where_tokens_come_from_is_told(there: httpx.Client) -> None:
    answer = there.post("/v1/completions", json=traced({**TRACED, "model": MODEL_NAME})).json()
    (choice,) = answer["choices"]
    check_steps(choice["speculation"]["steps"], choice["token_ids"])


def test_the_page_sees_its_steps_and_its_blocks(there: httpx.Client) -> None:
    state = there.get("/ui/state").json()
    assert state["acceptance"]["break_even"]
    with there.stream("GET", "/ui/feed", params={"after": 0}) as response:
        events: dict[str, Any] = {}
        for name, data in feed_of(response):
            events.setdefault(name, data)
            if {"steps", "requests", "blocks"} <= set(events):
                break
    assert events["steps"]["seq"] >= state["seq"] > 0
    assert events["requests"]["requests"]
    assert len(events["blocks"]["map"]) == state["server"]["num_blocks"]
    assert "c" in events["blocks"]["map"]


def test_a_process_that_is_stopped_is_not_healthy_until_it_goes_on(
    there: httpx.Client, base: str, child: ChildProcess
) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: there.get("/health").status_code == 503, "a stopped engine is healthy")
        assert metric(base, "ready") == 0
        assert metric(base, "engine_step_age_seconds") > STALL_SECONDS
    finally:
        os.kill(child.pid, signal.SIGCONT)
    wait_for(lambda: there.get("/health").status_code == 200, "it is not healthy again")
    assert metric(base, "ready") == 1
    found = there.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "a", "max_tokens": 3})
    assert found.status_code == 200


def test_a_process_that_dies_fails_every_request_clearly(there: httpx.Client, base: str, child: ChildProcess) -> None:
    """The last test of this file: this server serves nobody afterwards."""
    body = {"model": MODEL_NAME, "prompt": "a", "max_tokens": CONTEXT - 20, "ignore_eos": True}
    with ThreadPoolExecutor(1) as threads:
        generated = metric(base, "generation_tokens_total")
        whole = threads.submit(httpx.post, f"{base}/v1/completions", json=body, timeout=60, trust_env=False)
        with there.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            pieces = response.iter_raw()
            received = next(pieces)
            wait_for(lambda: metric(base, "generation_tokens_total") > generated, "nothing runs")
            os.kill(child.pid, signal.SIGKILL)
            received += b"".join(pieces)
        *_, failed = sse_events(received)
        assert failed["error"]["type"] == "server_error"  # type: ignore[index]
        assert "the engine's process has ended" in failed["error"]["message"]  # type: ignore[index]
        assert whole.result().status_code == 500
    for path in ("/health", "/live"):
        assert there.get(path).status_code == 503
        assert "the engine's process has ended" in there.get(path).json()["error"]["message"]
    for stream in (False, True):
        refused = there.post("/v1/completions", json={**body, "stream": stream})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
        assert refused.headers["retry-after"]
    began = time.monotonic()
    assert there.get("/metrics").status_code == there.get("/v1/server_info").status_code == 200
    assert time.monotonic() - began < STALL_SECONDS
