"""Each part of the server made to fail on purpose: whose failure it is pays, the others get what they always get."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.faults.faults import POINTS, Fault
from server.resolve import THREAD_ABOVE_CHARS
from tests.server.builders import MODEL_NAME, metric
from tests.server.chat_builders import HELLO, save_chat_model
from tests.server.fault_builders import POISON, Answer, Failing, ask, failing_server, request
from tests.server.test_disconnect import assert_idle, wait_for
from tests.test_docs import ROOT, codes, table_rows

VICTIM = 4711  # its seed
MARK = "fail-on-this"

OTHERS = (
    request(prompt="the quick brown", seed=2, temperature=1.0, max_tokens=40),
    request(prompt="0 1 2 3 4 5", seed=3, temperature=0, stream=True, max_tokens=40),
    request(prompt="hello", seed=4, frequency_penalty=0.5, n=2),
    request(prompt="{", seed=5, structured_outputs={"regex": "[a-f]{4,20};"}, stream=True),
    request(messages=HELLO, seed=6),
)
PLAIN = request(prompt="the lazy dog", seed=VICTIM, max_tokens=24)
BATCHED = {**PLAIN, "logit_bias": None, "temperature": 0}
GRAMMAR = {**PLAIN, "structured_outputs": {"regex": "[a-z]{6,30};"}}
CHAT = request(messages=[{"role": "user", "content": MARK}], seed=VICTIM)

# Faults that are one request's own: the fault, the request that it falls on, what that one is answered.
OWN: dict[str, tuple[Fault, dict[str, Any], int]] = {
    "sample": (Fault("sample", match=VICTIM, after=4), PLAIN, 500),
    "sample, many at once": (Fault("sample", match=VICTIM, after=4), BATCHED, 500),
    "grammar": (Fault("grammar", match=VICTIM, after=8), GRAMMAR, 500),
    "detokenize": (Fault("detokenize", match=VICTIM, after=1), PLAIN, 500),
    "verify, in prefill": (Fault("verify", match=POISON), {**PLAIN, "prompt": [70, POISON, 71]}, 500),
    "verify, in decode": (
        Fault("verify", match=POISON, after=1),
        {**PLAIN, "logit_bias": None, "allowed_token_ids": [POISON], "cache_salt": "own"},
        500,
    ),
    "tokenize": (Fault("tokenize", match=MARK), {**PLAIN, "prompt": ["a", MARK]}, 500),
    "tokenize, of a chat": (Fault("tokenize", match=MARK), CHAT, 500),
    "tokenize, hanging": (
        Fault("tokenize", "hang", match=MARK),
        {**PLAIN, "prompt": MARK + "a" * THREAD_ABOVE_CHARS, "truncate_prompt_tokens": 9, "timeout": 1.0},
        504,
    ),
    "template": (Fault("template", match=MARK), CHAT, 500),
    "template, dying": (Fault("template", "exit", match=MARK), CHAT, 500),
    "template, hanging": (Fault("template", "hang", match=MARK), CHAT, 400),
    "compile": (Fault("compile", match=MARK), {**PLAIN, "structured_outputs": {"choice": [MARK]}}, 400),
    "compile, dying": (Fault("compile", "exit", match=MARK), {**PLAIN, "structured_outputs": {"regex": MARK}}, 400),
    "compile, hanging": (Fault("compile", "hang", match=MARK), {**PLAIN, "structured_outputs": {"regex": MARK}}, 400),
}
BEFORE_THE_ANSWER = ("tokenize", "template", "compile")


@pytest.fixture(scope="module")
def chat_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tiny_model, tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture(scope="module")
def failing(chat_model: Path, model_home: Path) -> Iterator[Failing]:
    with failing_server(chat_model, model_home, template_timeout=1.0, grammar_timeout=1.0) as server:
        yield server


@pytest.fixture(scope="module")
def without_faults(failing: Failing) -> list[Answer]:
    """What each of the others is answered, alone."""
    return [asyncio.run(together(failing, [body]))[0] for body in OTHERS]


@pytest.fixture(autouse=True)
def cleared(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("failing", "brittle"):
        if name in request.fixturenames:
            request.getfixturevalue(name).faults.clear()


async def together(server: Failing, bodies: list[dict[str, Any]]) -> list[Answer]:
    async with httpx.AsyncClient(base_url=server.base, timeout=60, trust_env=False) as client:
        return list(await asyncio.gather(*(ask(client, body) for body in bodies)))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", OWN)
def test_a_requests_own_failure_fails_it_alone_and_the_others_get_what_they_always_get(
    failing: Failing, without_faults: list[Answer], name: str, stream: bool
) -> None:
    fault, body, status = OWN[name]
    armed = failing.arm(fault)
    failed, *others = asyncio.run(together(failing, [{**body, "stream": stream}, *OTHERS]))
    assert armed.fired > 0
    assert others == without_faults
    assert failed.error is not None
    assert failed.ended
    assert failed.status == (200 if stream and fault.point not in BEFORE_THE_ANSWER else status)
    assert failed.error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert httpx.get(f"{failing.base}/health").status_code == 200
    assert_idle(failing.base)


def test_a_request_that_failed_leaves_nothing_that_the_same_request_would_meet(failing: Failing) -> None:
    (before,) = asyncio.run(together(failing, [PLAIN]))
    failing.arm(Fault("sample", match=VICTIM, after=4))
    (failed,) = asyncio.run(together(failing, [PLAIN]))
    failing.faults.clear()
    (after,) = asyncio.run(together(failing, [PLAIN]))
    assert failed.error is not None
    assert after == before
    assert after.error is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_drafter_that_fails_costs_nobody_anything_but_drafts(
    failing: Failing, without_faults: list[Answer], stream: bool
) -> None:
    body = {**PLAIN, "stream": stream, "speculation": {"num_speculative_tokens": 4}}
    (expected,) = asyncio.run(together(failing, [body]))
    armed = failing.arm(Fault("draft"))
    answer, *others = asyncio.run(together(failing, [body, *OTHERS]))
    assert armed.fired > 0
    assert answer == expected
    assert answer.error is None
    assert others == without_faults


def test_what_a_failed_request_held_is_accounted_for(failing: Failing) -> None:
    errors = metric(failing.base, "request_success_total", finished_reason="error")
    failing.arm(Fault("sample", match=VICTIM, after=4))
    asyncio.run(together(failing, [PLAIN, {**PLAIN, "stream": True}]))
    assert_idle(failing.base)
    assert metric(failing.base, "request_success_total", finished_reason="error") == errors + 2


# --- what is nobody's own ---


@pytest.fixture(scope="module")
def brittle(chat_model: Path, model_home: Path) -> Iterator[Failing]:
    with failing_server(chat_model, model_home, stall_timeout=1.0) as server:
        yield server


@pytest.mark.case("V 36130")
@pytest.mark.parametrize("point", ["draft", "verify", "sample", "grammar", "commit"])
def test_a_frozen_engine_is_neither_ready_nor_alive_until_it_goes_on(brittle: Failing, point: Any) -> None:
    armed = brittle.arm(Fault(point, "hang"))
    body = {**GRAMMAR, "max_tokens": 40, "speculation": {"num_speculative_tokens": 4}}

    async def main() -> Answer:
        async with httpx.AsyncClient(base_url=brittle.base, timeout=60, trust_env=False) as client:
            asking = asyncio.create_task(ask(client, body))
            while (health := await client.get("/health")).status_code == 200:
                assert not asking.done()
                await asyncio.sleep(0.02)
            live = await client.get("/live")
            assert armed.hanging == 1
            assert "no step has ended for" in health.json()["error"]["message"]
            assert (health.json()["error"]["code"], live.json()["error"]["code"]) == ("not_ready", "not_alive")
            assert live.status_code == 503
            brittle.faults.clear()
            return await asking

    answer = asyncio.run(main())
    assert answer.error is None  # it was slow, and no more
    wait_for(lambda: httpx.get(f"{brittle.base}/health").status_code == 200, "it is not ready again")
    assert_idle(brittle.base)


def test_a_commit_that_fails_fails_the_requests_of_its_step_and_the_server_goes_on(brittle: Failing) -> None:
    armed = brittle.arm(Fault("commit", match="own", times=1))
    (failed,) = asyncio.run(together(brittle, [{**PLAIN, "cache_salt": "own"}]))
    assert armed.fired == 1
    assert failed.status == 500
    (answer,) = asyncio.run(together(brittle, [PLAIN]))
    assert answer.error is None
    assert_idle(brittle.base)


@pytest.mark.parametrize(
    "fault", [Fault("allocate", after=20), Fault("verify", after=6)], ids=lambda fault: fault.point
)
def test_an_engine_that_has_failed_says_so_to_everybody(chat_model: Path, model_home: Path, fault: Fault) -> None:
    """``verify``: three steps in a row in which nobody gets through."""
    with failing_server(chat_model, model_home) as server:
        server.arm(fault)
        bodies = [
            request(prompt=[70 + i], ignore_eos=True, max_tokens=200, stream=i % 2 == 0, seed=i) for i in range(12)
        ]
        answers = asyncio.run(together(server, bodies))
        while httpx.get(f"{server.base}/health").status_code == 200:
            answers += asyncio.run(together(server, bodies[:1]))
        assert all(answer.error is not None and answer.ended for answer in answers)
        assert {answer.error["code"] for answer in answers if answer.error} <= {"server_error", "engine_failed"}
        assert {httpx.get(f"{server.base}{path}").status_code for path in ("/health", "/live")} == {503}
        refused = httpx.post(f"{server.base}/v1/completions", json={"model": MODEL_NAME, "prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
        assert refused.headers["retry-after"]


def test_every_part_that_can_fail_is_documented_and_no_other() -> None:
    page = (ROOT / "docs" / "failures.md").read_text("utf-8")
    table = page[page.index("| part |") : page.index("A request that fails")]
    assert set().union(*(codes(row[0]) for row in table_rows(table))) == set(POINTS)
