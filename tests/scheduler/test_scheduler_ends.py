"""How choices end and what is kept of it: aborts, failures, times. One invariant each, on small cases."""

from __future__ import annotations

import pytest

from scheduler.request import TextDecision
from scheduler.scheduler import Scheduler
from specdec.plan import SequenceOutput, StepResult, StepStats
from tests.scheduler.builders import Bench, ToyFilter, build_request, config, prompt


class TestAbort:
    @pytest.mark.case("V 28473")
    def test_abort_during_a_step_frees_the_blocks_when_it_is_applied(self) -> None:
        bench = Bench()
        bench.add(build_request(n=2))
        bench.run_step()
        plan = bench.schedule()
        assert plan is not None
        bench.abort("r")
        assert bench.manager.stats().used_blocks > 0
        assert bench.scheduler.num_running == 0
        bench.run_and_apply(plan)
        bench.check_all_free()
        assert not bench.scheduler.has_work
        assert [bench.finish("r", j).finish_reason for j in range(2)] == ["abort", "abort"]

    def test_an_aborted_choice_hears_nothing_of_the_step_that_ran(self) -> None:
        bench = Bench()
        bench.add(build_request())
        plan = bench.schedule()
        assert plan is not None
        bench.abort("r")
        bench.run_and_apply(plan)
        assert bench.token_ids("r") == []
        assert bench.scheduler.take_record(None).num_generation_tokens == 0

    def test_an_unknown_id_is_fine(self) -> None:
        assert Bench().scheduler.abort("nobody") == []


class TestFailure:
    def test_an_output_with_an_error_ends_that_choice_alone(self) -> None:
        bench = Bench()
        bench.step.fail_seq_ids = {0}
        bench.add(build_request("a"))
        bench.add(build_request("b"))
        bench.drain()
        assert bench.finish("a").finish_reason == "error"
        assert bench.finish("a").error == "planted"
        bench.check_output("b")

    def test_a_text_filter_that_fails_ends_that_choice_alone(self) -> None:
        class Failing(ToyFilter):
            def push(self, token_ids: object, is_last: bool) -> TextDecision:
                raise UnicodeError("secret")

        bench = Bench()
        bench.scheduler = Scheduler(
            bench.manager, bench.config, lambda r, i: (Failing if r.request_id == "a" else ToyFilter)(r, i)
        )
        bench.add(build_request("a"))
        bench.add(build_request("b"))
        bench.drain()
        assert bench.finish("a").error == "the text of the choice failed (UnicodeError)"
        bench.check_output("b")
        bench.check_all_free()

    def test_a_filter_may_not_swallow_tokens(self) -> None:
        class Swallowing(ToyFilter):
            def push(self, token_ids: object, is_last: bool) -> TextDecision:
                return TextDecision(0, "")

        bench = Bench()
        bench.scheduler = Scheduler(bench.manager, bench.config, Swallowing)
        bench.add(build_request())
        bench.drain()
        assert bench.finish("r").finish_reason == "error"

    def test_a_raising_step_ends_the_requests_of_its_plan_and_no_others(self) -> None:
        bench = Bench(config=config(max_num_seqs=1))
        bench.add(build_request("a", n=2))
        bench.add(build_request("b"))
        plan = bench.schedule()
        assert plan is not None
        bench.take(bench.scheduler.fail(plan, "broken"))
        assert [bench.finish("a", j).error for j in range(2)] == ["broken", "broken"]
        bench.drain()
        bench.check_output("b")
        bench.check_all_free()

    def test_a_result_of_another_plan_is_refused(self) -> None:
        bench = Bench()
        bench.add(build_request())
        plan = bench.schedule()
        assert plan is not None
        with pytest.raises(ValueError, match="not those of the plan"):
            bench.scheduler.apply(plan, StepResult((SequenceOutput(99),), StepStats()))

    def test_a_step_must_be_applied_before_the_next(self) -> None:
        bench = Bench()
        bench.add(build_request())
        assert bench.schedule() is not None
        with pytest.raises(RuntimeError, match="not applied"):
            bench.scheduler.schedule()


class TestTiming:
    def test_times_are_in_order_and_counts_agree(self) -> None:
        bench = Bench(accept=0.7)
        bench.add(build_request(max_tokens=20, num_speculative_tokens=3))
        bench.drain()
        timing = bench.finish("r").timing
        assert timing is not None
        times = [
            timing.arrival_time,
            timing.first_scheduled_time,
            timing.first_token_time,
            timing.last_token_time,
        ]
        assert times == sorted(times)
        assert len(timing.acceptance_histogram) == 4
        assert sum(timing.acceptance_histogram) == timing.num_spec_steps == len(timing.per_step_drafted)
        assert sum(i * n for i, n in enumerate(timing.acceptance_histogram)) == timing.num_accepted
        assert sum(timing.per_step_drafted) == timing.num_drafted
        assert sum(timing.per_step_accepted) == timing.num_accepted

    def test_a_record_counts_each_thing_once(self) -> None:
        bench = Bench()
        for i in range(3):
            bench.add(build_request(f"r{i}", prompt(9, i), n=2, max_tokens=5, seed=i))
        records = []
        while bench.scheduler.has_work:
            plan = bench.run_step()
            assert plan is not None
            records.append(bench.scheduler.take_record(StepStats()))
        assert sum(record.num_prompt_tokens for record in records) == 27
        assert sum(record.num_generation_tokens for record in records) == 30
        assert sum(len(record.first_token_seconds) for record in records) == 6
        assert sum(len(record.finished) for record in records) == 6
        assert sum(finished.last_of_request for record in records for finished in record.finished) == 3
        gaps = sum(len(record.inter_token_seconds) for record in records)
        assert gaps == sum(len(events) for events in bench.got.values()) - 6
