"""An engine in a real event loop with a real model thread, which a test can hold inside a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.handle import RequestHandle
from scheduler.request import ChoiceEvent, EngineRequest
from scheduler.stats import StepRecord
from specdec.plan import StepPlan
from tests.scheduler.builders import Bench, expected


class Gate:
    """Holds the model thread inside a step until the test opens it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self.entered.set()
        assert self._open.wait(timeout=30)

    async def wait_entered(self) -> None:
        await asyncio.to_thread(self.entered.wait, 60)
        assert self.entered.is_set()

    def open(self) -> None:
        self._open.set()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until ``condition`` holds. Raises AssertionError if it never does."""
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("waited in vain")


class Harness:
    def __init__(self, *, max_buffered_batches: int = 4096, config: SchedulerConfig | None = None) -> None:
        self.bench = Bench(config=config)
        self.step = self.bench.step
        self.records: list[StepRecord] = []
        self.engine = Engine(
            self.bench.scheduler,
            self.step,
            on_step=self.records.append,
            max_buffered_batches=max_buffered_batches,
        )

    async def settled(self) -> None:
        """Wait until the engine has nothing to do."""
        await until(lambda: not self.engine.scheduler.has_work and not self.step.known)
        self.bench.check_all_free()
        self.engine.scheduler.check_integrity()


def run(test: Callable[[Harness], Awaitable[None]], harness: Harness | None = None) -> Harness:
    """Run ``test`` against a started engine; afterwards everything must be free."""

    async def main() -> Harness:
        h = harness or Harness()
        h.engine.start()
        try:
            await asyncio.wait_for(test(h), timeout=60)
        except BaseException:
            await h.engine.shutdown(drain=False)
            raise
        assert await h.engine.shutdown(drain=True, timeout=60)
        h.bench.check_all_free()
        return h

    return asyncio.run(main())


async def collect(handle: RequestHandle) -> dict[int, list[ChoiceEvent]]:
    got: dict[int, list[ChoiceEvent]] = {}
    async for batch in handle:
        for event in batch:
            got.setdefault(event.index, []).append(event)
    return got


def ids(events: list[ChoiceEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


def check_complete(request: EngineRequest, got: dict[int, list[ChoiceEvent]]) -> None:
    for position, spec in enumerate(request.choices):
        tokens, reason, _ = expected(request, position)
        assert ids(got[spec.index]) == tokens
        assert [event.finish_reason for event in got[spec.index]].count(reason) == 1
        assert got[spec.index][-1].finish_reason == reason
