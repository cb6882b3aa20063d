"""More sequences than the KV cache holds: they take turns, and nobody's answer shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.builders import build_service, metric, running
from tests.server.fault_builders import Answer, ask, request
from tests.server.test_disconnect import assert_idle

BODIES = [request(prompt=[70 + i] * 20, seed=i, max_tokens=40, ignore_eos=True, stream=i % 2 == 0) for i in range(4)]


@pytest.fixture(scope="module")
def cramped(tiny_model: Path, model_home: Path) -> Iterator[str]:
    """Two of them fit at their full length, more of them at their first."""
    with running(build_service(tiny_model, model_home, num_blocks=10)) as base:
        yield base


async def answers(base: str, together: bool) -> list[Answer]:
    async with httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as client:
        if together:
            return list(await asyncio.gather(*(ask(client, body) for body in BODIES)))
        return [await ask(client, body) for body in BODIES]


def test_requests_that_do_not_fit_together_take_turns_and_get_what_they_always_get(cramped: str) -> None:
    alone = asyncio.run(answers(cramped, together=False))
    assert metric(cramped, "num_preemptions_total") == 0
    assert asyncio.run(answers(cramped, together=True)) == alone
    assert metric(cramped, "num_preemptions_total") > 0
    assert_idle(cramped)
