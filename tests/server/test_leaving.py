"""Clients that leave while a step is held: whatever their request was doing, no other step is run for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.faults.faults import Armed, Fault
from tests.server.builders import MODEL_NAME
from tests.server.fault_builders import POISON, Failing, failing_server
from tests.server.test_disconnect import assert_idle, send, wait_for

PROMPT = ([70] * 15 + [POISON]) * 24  # each chunk of it holds the marked token


@pytest.fixture(scope="module")
def failing(tiny_model: Path, model_home: Path) -> Iterator[Failing]:
    """Prompts take several steps, and two sequences run at once."""
    with failing_server(
        tiny_model, model_home, send_buffer=4096, max_num_seqs=2, max_num_batched_tokens=64, enable_prefix_cache=False
    ) as server:
        yield server


@pytest.fixture
def forwards(failing: Failing) -> Iterator[Armed]:
    """Counts the forwards that are fed the marked token, and never strikes."""
    yield failing.arm(Fault("verify", match=POISON, after=10**9))
    failing.faults.clear()


def held(failing: Failing, after: int) -> Armed:
    """A step of the marked request, the one behind so many others, which waits until the faults are cleared."""
    return failing.arm(Fault("verify", "hang", match=POISON, after=after))


def gone(failing: Failing) -> Callable[[], bool]:
    scheduler = failing.service.engine.scheduler  # type: ignore[attr-defined]
    return lambda: scheduler.num_running == 0 and scheduler.num_waiting == 0


IN_PREFILL: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 50}
IN_DECODE: dict[str, Any] = {"prompt": [POISON], "max_tokens": 400, "allowed_token_ids": [POISON]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("body", "after"), [(IN_PREFILL, 0), (IN_PREFILL, 3), (IN_DECODE, 0), (IN_DECODE, 5)],
    ids=["first chunk", "later chunk", "before the first token", "decode"],
)  # fmt: skip
def test_who_leaves_during_a_step_gets_no_other(
    failing: Failing, forwards: Armed, body: dict[str, Any], after: int, stream: bool
) -> None:
    hanging = held(failing, after)
    sock = send(failing.base, stream=stream, **body)
    wait_for(lambda: hanging.hanging == 1, "it never ran")
    run = forwards.passed
    sock.close()
    wait_for(gone(failing), "it was not aborted")
    hanging.released.set()
    assert_idle(failing.base)
    assert forwards.passed == run


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_who_leaves_while_queued_is_gone_at_once_and_never_runs(
    failing: Failing, forwards: Armed, stream: bool
) -> None:
    scheduler = failing.service.engine.scheduler  # type: ignore[attr-defined]
    hanging = failing.arm(Fault("verify", "hang", match=300))
    answers = []
    body = {"model": MODEL_NAME, "prompt": [300], "max_tokens": 8, "ignore_eos": True, "logit_bias": {"300": -100}}
    running = [
        threading.Thread(
            target=lambda: answers.append(httpx.post(f"{failing.base}/v1/completions", json=body, timeout=60))
        )
        for _ in range(2)
    ]
    for client in running:
        client.start()
    wait_for(lambda: hanging.hanging == 1 and scheduler.num_running + scheduler.num_waiting == 2, "they never ran")
    sock = send(failing.base, stream=stream, **IN_DECODE)
    wait_for(lambda: scheduler.num_running + scheduler.num_waiting == 3, "it was not queued")
    sock.close()
    wait_for(lambda: scheduler.num_running + scheduler.num_waiting == 2, "it was not aborted")
    assert hanging.hanging == 1  # the step still runs
    hanging.released.set()
    for client in running:
        client.join(60)
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [8, 8]
    assert forwards.passed == 0
    assert_idle(failing.base)


def test_who_leaves_while_its_stream_is_blocked_gets_no_other_step(failing: Failing, forwards: Armed) -> None:
    # One token a step, a kilobyte each: more than lies between the engine and the reader, who never reads.
    hanging = held(failing, after=120)
    long: dict[str, Any] = {**IN_DECODE, "logprobs": 20, "speculation": {"num_speculative_tokens": 0}}
    sock = send(failing.base, receive_buffer=4096, stream=True, **long)
    wait_for(lambda: hanging.hanging == 1, "it never came so far")
    (handle,) = failing.service.engine._readers._handles.values()  # type: ignore[attr-defined]
    assert len(handle._batches) > 10, "the stream is not blocked: nothing piles up"
    run = forwards.passed
    sock.close()
    wait_for(gone(failing), "it was not aborted")
    hanging.released.set()
    assert_idle(failing.base)
    assert forwards.passed == run
