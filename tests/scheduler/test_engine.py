"""The engine in a real event loop with a real model thread. No test depends on how long anything takes."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.errors import EngineUnhealthy, QueueFull, ShuttingDown
from scheduler.request import ChoiceEvent
from scheduler.stats import StepRecord
from specdec.plan import StepPlan
from tests.scheduler.builders import Bench, build_request, expected
from tests.scheduler.engine_builders import Gate, Harness, check_complete, collect, ids, run, until


def test_concurrent_requests_get_what_they_would_get_alone() -> None:
    async def test(h: Harness) -> None:
        requests = [build_request(f"r{i}", range(3 + i), n=1 + i % 3, max_tokens=9, seed=i) for i in range(8)]
        handles = [h.engine.submit(request) for request in requests]
        for request, got in zip(requests, await asyncio.gather(*map(collect, handles)), strict=True):
            check_complete(request, got)

    h = run(test)
    assert sum(record.num_generation_tokens for record in h.records) == 15 * 9
    assert sum(finished.last_of_request for record in h.records for finished in record.finished) == 8


def test_an_arrival_during_a_step_runs_in_the_next() -> None:
    async def test(h: Harness) -> None:
        gate = h.step.before_run = Gate()
        plans: list[int] = []
        first = h.engine.submit(build_request("a", max_tokens=30))
        await gate.wait_entered()
        second = h.engine.submit(build_request("b", max_tokens=1))
        h.step.before_run = lambda plan: plans.append(len(plan.items))
        gate.open()
        await collect(second)
        await collect(first)
        assert plans[0] == 2

    run(test)


class TestAbort:
    def test_while_queued(self) -> None:
        async def test(h: Harness) -> None:
            gate = h.step.before_run = Gate()
            h.engine.submit(build_request("running"))
            await gate.wait_entered()
            queued = h.engine.submit(build_request("queued", n=3))
            queued.abort()
            assert [e[-1].finish_reason for e in (await collect(queued)).values()] == ["abort"] * 3
            assert h.engine.scheduler.num_waiting == 0
            gate.open()
            await h.settled()

        run(test)

    def test_in_prefill_between_chunks(self) -> None:
        async def test(h: Harness) -> None:
            handle = h.engine.submit(build_request(prompt=[i % 40 for i in range(50)]))

            def abort_from_the_loop(plan: StepPlan) -> None:
                asyncio.run_coroutine_threadsafe(aborted(), loop).result(60)

            async def aborted() -> None:
                handle.abort()

            loop = asyncio.get_running_loop()
            h.step.before_run = abort_from_the_loop
            got = await collect(handle)
            assert [event.finish_reason for event in got[0]] == ["abort"]
            await h.settled()
            assert len([record for record in h.records if record.step is not None]) == 1

        run(test)

    def test_in_decode(self) -> None:
        async def test(h: Harness) -> None:
            request = build_request(max_tokens=50)
            handle = h.engine.submit(request)
            got = list(await anext(handle))
            handle.abort()
            async for batch in handle:
                got += batch
            assert got[-1].finish_reason == "abort"
            assert ids(got) == expected(request, 0)[0][: len(ids(got))]
            await h.settled()

        run(test)

    def test_during_a_step_the_blocks_are_back_when_it_ends(self) -> None:
        async def test(h: Harness) -> None:
            gate = h.step.before_run = Gate()
            handle = h.engine.submit(build_request(n=2))
            await gate.wait_entered()
            handle.abort()
            assert handle.finished
            gate.open()
            await h.settled()
            assert len([record for record in h.records if record.step is not None]) == 1

        run(test)

    def test_by_leaving_the_context(self) -> None:
        async def test(h: Harness) -> None:
            async with h.engine.submit(build_request(max_tokens=50)) as handle:
                await anext(handle)
            assert handle.finished
            await h.settled()

        run(test)

    def test_a_finished_request_stays_finished(self) -> None:
        async def test(h: Harness) -> None:
            async with h.engine.submit(build_request()) as handle:
                got = await collect(handle)
            handle.abort()
            assert got[0][-1].finish_reason == "length"

        run(test)

    def test_is_reported_even_if_no_step_follows(self) -> None:
        async def test(h: Harness) -> None:
            h.step.before_run = Gate()
            handle = h.engine.submit(build_request())
            handle.abort()  # before the loop has run once
            await h.settled()
            await until(lambda: bool(h.records))
            assert h.records[-1].step is None
            assert [finished.finish_reason for finished in h.records[-1].finished] == ["abort"]

        run(test)


class TestFailure:
    def test_a_raising_step_fails_its_requests_and_the_loop_goes_on(self) -> None:
        async def test(h: Harness) -> None:
            def fail(plan: StepPlan) -> None:
                raise MemoryError("0xdeadbeef in /secret/path")

            h.step.before_run = fail
            got = await collect(h.engine.submit(build_request("a", n=2)))
            assert [events[-1].finish_reason for events in got.values()] == ["error", "error"]
            assert got[0][-1].error == "the model step failed (MemoryError)"
            h.step.before_run = lambda plan: None
            request = build_request("b")
            check_complete(request, await collect(h.engine.submit(request)))
            assert h.engine.healthy

        h = run(test)
        assert h.records[0].error == "the model step failed (MemoryError)"

    def test_a_sequence_error_fails_that_choice_alone(self) -> None:
        async def test(h: Harness) -> None:
            h.step.fail_seq_ids = {0}
            a, b = h.engine.submit(build_request("a")), h.engine.submit(build_request("b"))
            got, _ = await asyncio.gather(collect(a), collect(b))
            assert got[0][-1].error == "planted"
            check_complete(build_request("b"), _)

        run(test)

    def test_a_success_between_failures_resets_the_count(self) -> None:
        async def test(h: Harness) -> None:
            def fail(plan: StepPlan) -> None:
                raise RuntimeError

            for i in range(6):
                h.step.before_run = fail if i % 3 else lambda plan: None
                await collect(h.engine.submit(build_request(f"r{i}", max_tokens=1)))
            assert h.engine.healthy

        run(test)

    def test_failures_in_a_row_turn_the_engine_unhealthy_and_fail_everything(self) -> None:
        async def main() -> None:
            h = Harness(config=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=64))

            def fail(plan: StepPlan) -> None:
                raise RuntimeError

            h.step.before_run = fail
            h.engine.start()
            handles = [h.engine.submit(build_request(f"r{i}")) for i in range(5)]
            gots = await asyncio.gather(*map(collect, handles))
            assert [got[0][-1].finish_reason for got in gots] == ["error"] * 5
            assert not h.engine.healthy
            assert "3 steps in a row failed" in (h.engine.unhealthy_reason or "")
            with pytest.raises(EngineUnhealthy, match="3 steps"):
                h.engine.submit(build_request("late"))
            h.bench.check_all_free()
            await h.engine.shutdown()

        asyncio.run(main())

    def test_a_fault_of_the_scheduler_ends_every_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def main() -> None:
            h = Harness()

            def broken(*args: object) -> list[ChoiceEvent]:
                raise AssertionError("planted")

            monkeypatch.setattr(h.bench.scheduler, "apply", broken)
            h.engine.start()
            got = await collect(h.engine.submit(build_request(n=2)))
            assert [events[-1].finish_reason for events in got.values()] == ["error", "error"]
            assert not h.engine.healthy
            await h.engine.shutdown()

        asyncio.run(main())

    def test_a_failing_observer_does_not_stop_the_service(self) -> None:
        async def test(h: Harness) -> None:
            def broken(record: StepRecord) -> None:
                raise KeyError("planted")

            h.engine.on_step = broken
            request = build_request()
            check_complete(request, await collect(h.engine.submit(request)))

        run(test)

    def test_a_refused_request_leaves_no_handle(self) -> None:
        async def test(h: Harness) -> None:
            gate = h.step.before_run = Gate()
            handles = [h.engine.submit(build_request(f"r{i}")) for i in range(2)]
            with pytest.raises(QueueFull):
                h.engine.submit(build_request("one too many"))
            gate.open()
            await asyncio.gather(*map(collect, handles))

        config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, max_waiting_requests=2)
        run(test, Harness(config=config))


class TestReader:
    def test_a_slow_reader_loses_nothing_within_the_bound(self) -> None:
        async def test(h: Harness) -> None:
            request = build_request(max_tokens=40)
            handle = h.engine.submit(request)
            await until(lambda: handle.finished)
            check_complete(request, await collect(handle))

        run(test)

    def test_a_reader_beyond_the_bound_gets_an_error_and_its_blocks_go_back(self) -> None:
        async def test(h: Harness) -> None:
            handle = h.engine.submit(build_request(max_tokens=40, num_speculative_tokens=0))
            await h.settled()
            got = await collect(handle)
            assert got[0][-1].finish_reason == "error"
            assert "fell behind by more than 5 steps" in (got[0][-1].error or "")

        run(test, Harness(max_buffered_batches=5))

    def test_a_slow_reader_does_not_hold_up_others(self) -> None:
        async def test(h: Harness) -> None:
            slow = h.engine.submit(build_request("slow", max_tokens=40))
            request = build_request("fast", max_tokens=40)
            check_complete(request, await collect(h.engine.submit(request)))
            check_complete(build_request("slow", max_tokens=40), await collect(slow))

        run(test)


class TestShutdown:
    def test_drain_finishes_what_runs_and_refuses_what_comes(self) -> None:
        async def main() -> None:
            h = Harness()
            h.engine.start()
            request = build_request(max_tokens=30)
            handle = h.engine.submit(request)
            closing = asyncio.create_task(h.engine.shutdown(drain=True, timeout=60))
            await asyncio.sleep(0)
            with pytest.raises(ShuttingDown):
                h.engine.submit(build_request("late"))
            assert not h.engine.accepting
            assert await closing
            check_complete(request, await collect(handle))
            h.bench.check_all_free()

        asyncio.run(main())

    def test_without_drain_the_rest_is_aborted(self) -> None:
        async def main() -> None:
            h = Harness()
            h.engine.start()
            handle = h.engine.submit(build_request(max_tokens=50))
            await anext(handle)
            assert not await h.engine.shutdown(drain=False)
            got = await collect(handle)
            assert got[0][-1].finish_reason == "abort"
            h.bench.check_all_free()

        asyncio.run(main())

    def test_a_drain_that_takes_too_long_aborts(self) -> None:
        async def main() -> None:
            h = Harness()
            gate = h.step.before_run = Gate()
            h.engine.start()
            handle = h.engine.submit(build_request(max_tokens=50))
            await gate.wait_entered()
            closing = asyncio.create_task(h.engine.shutdown(drain=True, timeout=0.01, grace=60))
            got = await collect(handle)
            gate.open()
            assert not await closing
            assert got[0][-1].finish_reason == "abort"
            h.bench.check_all_free()

        asyncio.run(main())

    def test_a_step_that_hangs_does_not_hang_the_shutdown(self) -> None:
        async def main() -> None:
            h = Harness()
            gate = h.step.before_run = Gate()
            h.engine.start()
            h.engine.submit(build_request())
            await gate.wait_entered()
            assert h.engine.seconds_since_progress > 0
            assert not await h.engine.shutdown(drain=False, grace=0.01)
            gate.open()

        asyncio.run(main())

    def test_an_idle_engine_stops(self) -> None:
        run(lambda h: asyncio.sleep(0))


def test_an_idle_engine_sleeps() -> None:
    async def test(h: Harness) -> None:
        await collect(h.engine.submit(build_request()))
        await h.settled()
        task = h.engine._task
        assert task is not None
        for _ in range(10):
            await asyncio.sleep(0)
        assert h.engine.seconds_since_progress == 0.0
        assert h.engine._idle.is_set()
        assert not h.engine._wake.is_set()

    run(test)


def test_steps_and_releases_run_in_one_thread_with_its_own_settings() -> None:
    async def main() -> None:
        threads: list[int] = []
        bench = Bench()
        engine = Engine(bench.scheduler, bench.step, thread_init=lambda: threads.append(threading.get_ident()))
        bench.step.before_run = lambda plan: threads.append(threading.get_ident())
        engine.start()
        await asyncio.gather(*(collect(engine.submit(build_request(f"r{i}"))) for i in range(3)))
        threads.append(await engine.call(threading.get_ident))
        await engine.shutdown()
        assert len(set(threads)) == 1
        assert threads[0] != threading.get_ident()

    asyncio.run(main())


@pytest.mark.case("V 28473", "sglang-jax 1147")
def test_500_requests_with_random_aborts_leave_nothing_behind() -> None:
    rng = random.Random(7)

    async def client(h: Harness, i: int) -> None:
        request = build_request(
            f"r{i}",
            [rng.randrange(40) for _ in range(rng.randint(1, 20))] if i % 2 else range(1 + i % 20),
            n=rng.choice([1, 1, 1, 2, 3]),
            max_tokens=rng.randint(0, 20),
            priority=rng.choice([0, 0, 1]),
            seed=i % 5,
        )
        leave_after = rng.choice([None, None, 0, 1, 3])
        async with h.engine.submit(request) as handle:
            if leave_after is None:
                check_complete(request, await collect(handle))
                return
            for _ in range(leave_after):
                if (await anext(handle, None)) is None:
                    break

    async def test(h: Harness) -> None:
        clients = []
        for i in range(500):
            clients.append(asyncio.create_task(client(h, i)))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        await asyncio.gather(*clients)
        await h.settled()
        assert h.engine.scheduler.num_running == h.engine.scheduler.num_waiting == 0
        assert h.engine.scheduler.num_waiting_requests == 0

    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64, max_waiting_requests=500)
    harness = Harness(config=config)
    run(test, harness)
    finished = [finished for record in harness.records for finished in record.finished]
    assert sum(one.last_of_request for one in finished) == 500
    assert sum(one.timing.num_output_tokens for one in finished) == sum(
        record.num_generation_tokens for record in harness.records
    )
