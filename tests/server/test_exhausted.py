"""More sequences than the KV cache holds: they take turns, and nobody's answer shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.faults.faults import Fault
from tests.server.builders import metric
from tests.server.fault_builders import Answer, Failing, ask, failing_server, request
from tests.server.test_disconnect import assert_idle, wait_for

BODIES = [request(prompt=[70 + i] * 20, seed=i, max_tokens=100, ignore_eos=True, stream=i % 2 == 0) for i in range(4)]


@pytest.fixture(scope="module")
def cramped(tiny_model: Path, model_home: Path) -> Iterator[Failing]:
    """Two of them fit at their full length, all of them at their first."""
    with failing_server(tiny_model, model_home, num_blocks=16) as server:
        yield server


async def one_by_one(server: Failing) -> list[Answer]:
    async with httpx.AsyncClient(base_url=server.base, timeout=60, trust_env=False) as client:
        return [await ask(client, body) for body in BODIES]


async def all_at_once(server: Failing) -> list[Answer]:
    """The first step waits until all of them are there."""
    scheduler = server.service.engine.scheduler  # type: ignore[attr-defined]
    server.arm(Fault("verify", "hang"))
    async with httpx.AsyncClient(base_url=server.base, timeout=60, trust_env=False) as client:
        asking = [asyncio.create_task(ask(client, body)) for body in BODIES]
        await asyncio.to_thread(
            wait_for, lambda: scheduler.num_running + scheduler.num_waiting == len(BODIES), "they did not all come"
        )
        server.faults.clear()
        return list(await asyncio.gather(*asking))


def test_requests_that_do_not_fit_together_take_turns_and_get_what_they_always_get(cramped: Failing) -> None:
    alone = asyncio.run(one_by_one(cramped))
    assert metric(cramped.base, "num_preemptions_total") == 0
    assert asyncio.run(all_at_once(cramped)) == alone
    assert metric(cramped.base, "num_preemptions_total") > 0
    assert_idle(cramped.base)
