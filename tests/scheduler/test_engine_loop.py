"""Whatever ends the engine's loop, nobody waits for it for ever and nobody takes it for a healthy one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scheduler.errors import EngineUnhealthy
from tests.scheduler.builders import build_request
from tests.scheduler.engine_builders import Harness, collect


class Panic(BaseException):
    """As libraries raise that are not written in Python."""


@pytest.mark.parametrize(
    ("place", "ending"),
    [
        ("step", Panic),  # an Exception of the step's is dealt with: see test_isolation
        ("schedule", Panic),
        ("apply", Panic),
        ("apply", RuntimeError),
        ("take_released", asyncio.CancelledError),
    ],
)
def test_an_engine_whose_loop_has_ended_fails_everybody_and_is_unhealthy(
    place: str, ending: type[BaseException]
) -> None:
    def end(*args: Any, **kwargs: Any) -> Any:
        raise ending

    async def main() -> None:
        h = Harness()
        if place == "step":
            h.step.before_run = end
        else:
            setattr(h.engine.scheduler, place, end)
        h.engine.start()
        handles = [h.engine.submit(build_request(f"r{i}", max_tokens=30)) for i in range(3)]
        async with asyncio.timeout(60):
            for handle in handles:
                got = await collect(handle)
                assert {events[-1].finish_reason for events in got.values()} == {"error"}
                assert f"the engine failed ({ending.__name__})" in {events[-1].error for events in got.values()}
        assert not h.engine.healthy
        with pytest.raises(EngineUnhealthy):
            h.engine.submit(build_request("late"))
        await h.engine.shutdown(drain=False)

    asyncio.run(main())


def test_one_that_is_told_to_end_is_not_unhealthy() -> None:
    async def main() -> None:
        h = Harness()
        h.engine.start()
        handle = h.engine.submit(build_request(max_tokens=30))
        await anext(handle)
        assert not await h.engine.shutdown(drain=False)
        assert h.engine.healthy

    asyncio.run(main())
