"""The event loop's lag: a pause is seen in full, and a server's own loop is watched."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx

from server.loop_lag import watching
from tests.server.builders import build_service, running, save_tiny_model


def test_a_pause_of_the_loop_is_seen_and_nothing_behind_the_block() -> None:
    late: list[float] = []

    async def run() -> int:
        async with watching(late.append, every=0.01):
            await asyncio.sleep(0.03)
            time.sleep(0.3)  # noqa: ASYNC251 - the pause
            await asyncio.sleep(0.03)
        seen = len(late)
        await asyncio.sleep(0.05)
        return seen

    seen = asyncio.run(run())
    assert max(late) >= 0.28
    assert min(late) >= 0.0
    assert len(late) == seen > 1


def test_a_server_tells_the_lag_of_its_loop(tmp_path: Path) -> None:
    service = build_service(save_tiny_model(tmp_path / "model"), tmp_path / "home")
    with running(service) as url, httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        count = 0.0
        while not count:
            lines = client.get("/metrics").text.splitlines()
            [line] = [line for line in lines if line.startswith("truedraft_event_loop_lag_seconds_count")]
            count = float(line.split()[-1])
