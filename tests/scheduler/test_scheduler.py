"""One invariant of the scheduler each, on small cases; everything at once is in test_state_machine."""

from __future__ import annotations

import pickle

import pytest

from scheduler.errors import QueueFull, RequestTooLarge
from scheduler.request import EngineRequest
from tests.scheduler.builders import STOP_ID, Bench, build_request, config, expected, prompt, seq_ids


class TestOutput:
    @pytest.mark.parametrize("accept", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize("budget", [4, 7, 32])
    def test_output_does_not_depend_on_drafts_chunks_or_batch_mates(self, accept: float, budget: int) -> None:
        bench = Bench(accept=accept, config=config(max_num_batched_tokens=budget))
        for i in range(6):
            bench.add(build_request(f"r{i}", prompt(3 + 5 * i, i), max_tokens=20, seed=i))
        bench.drain()
        for i in range(6):
            bench.check_output(f"r{i}")
        bench.check_all_free()

    @pytest.mark.case("V 28558")
    def test_output_survives_preemption_at_every_step(self) -> None:
        bench = Bench(accept=0.8, config=config(preempt_every_step=True))
        for i in range(3):
            bench.add(build_request(f"r{i}", prompt(6, i), max_tokens=12, seed=i))
        bench.drain()
        for i in range(3):
            bench.check_output(f"r{i}")
            timing = bench.finish(f"r{i}").timing
            assert timing is not None
            assert timing.num_preemptions >= 2

    def test_forced_preemption_leaves_speculation_on(self) -> None:
        bench = Bench(accept=1.0, config=config(preempt_every_step=True))
        bench.add(build_request(max_tokens=20))
        bench.drain()
        timing = bench.finish("r").timing
        assert timing is not None
        assert timing.num_accepted > 0

    @pytest.mark.case("V 47616")
    def test_stop_string_cuts_what_follows_in_the_same_step(self) -> None:
        request = build_request(max_tokens=20, stop=("zzz",))
        tokens, _, _ = expected(request, 0)
        stop = "".join(chr(ord("a") + token % 26) for token in tokens[5:7])
        request = build_request(max_tokens=20, stop=(stop,), logprobs=0)
        bench = Bench(accept=1.0, config=config(num_speculative_tokens=9))
        bench.add(request)
        bench.drain()
        bench.check_output("r")
        last = bench.finish("r")
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)
        logprobs = [entry.token_id for event in bench.got["r", 0] for entry in event.logprobs or ()]
        assert logprobs == bench.token_ids("r")
        record = bench.scheduler.take_record(None)
        assert record.num_generation_tokens == len(bench.token_ids("r"))
        timing = last.timing
        assert timing is not None
        # The first step emits one token; the second verifies 9 drafts, all right, and is cut.
        assert timing.per_step_drafted == (9,)
        assert timing.num_accepted == len(bench.token_ids("r")) - 1 < 9

    def test_stop_string_at_the_length_cap_wins(self) -> None:
        tokens, _, _ = expected(build_request(max_tokens=6), 0)
        stop = chr(ord("a") + tokens[-1] % 26)
        position = next(i for i, token in enumerate(tokens) if chr(ord("a") + token % 26) == stop)
        bench = Bench()
        bench.add(build_request(max_tokens=position + 1, stop=(stop,)))
        bench.drain()
        assert bench.finish("r").finish_reason == "stop"
        assert bench.finish("r").stop_reason == stop

    def test_stop_token_id_is_passed_through(self) -> None:
        ids = frozenset(range(0, 40, 3))
        assert STOP_ID in ids
        bench = Bench()
        bench.add(build_request(max_tokens=30, stop_token_ids=ids))
        bench.drain()
        bench.check_output("r")
        assert bench.finish("r").stop_reason in ids

    def test_prompt_logprobs_come_whole_with_the_first_event(self) -> None:
        bench = Bench(config=config(max_num_batched_tokens=5))
        bench.add(build_request("warm", prompt(17), max_tokens=1))
        bench.drain()
        bench.add(build_request("r", prompt(17), max_tokens=0, prompt_logprobs=0))
        bench.drain()
        (event,) = bench.got["r", 0]
        assert [entry.token_id for entry in event.prompt_logprobs or ()] == prompt(17)[1:]
        assert event.finish_reason == "length"
        assert event.token_ids == ()

    def test_events_are_picklable(self) -> None:
        bench = Bench()
        bench.add(build_request(logprobs=0, prompt_logprobs=0))
        bench.drain()
        events = bench.got["r", 0]
        assert pickle.loads(pickle.dumps(events)) == events


class TestOrder:
    def test_first_come_first_served(self) -> None:
        bench = Bench(config=config(max_num_seqs=1))
        for name in "abc":
            bench.add(build_request(name, max_tokens=2))
        ended = []
        while bench.scheduler.has_work:
            bench.run_step()
            ended += [finished.request_id for finished in bench.scheduler.take_record(None).finished]
        assert ended == ["a", "b", "c"]

    def test_lower_priority_number_goes_first(self) -> None:
        bench = Bench(config=config(max_num_seqs=1))
        for name, priority in (("a", 1), ("b", 0), ("c", -1)):
            bench.add(build_request(name, max_tokens=2, priority=priority))
        ended = []
        while bench.scheduler.has_work:
            bench.run_step()
            ended += [finished.request_id for finished in bench.scheduler.take_record(None).finished]
        assert ended == ["c", "b", "a"]

    def test_a_small_request_does_not_overtake_a_large_one_that_finds_no_room(self) -> None:
        bench = Bench(num_blocks=8, block_size=4, prefix_cache=False, config=config(num_speculative_tokens=0))
        bench.add(build_request("running", prompt(12), max_tokens=12))
        bench.run_step()
        bench.add(build_request("large", prompt(20, 7), max_tokens=4))
        bench.add(build_request("small", prompt(2, 9), max_tokens=2))
        first_event: dict[str, int] = {}
        for step in range(100):
            if not bench.scheduler.has_work:
                break
            bench.run_step()
            for name in ("large", "small"):
                if bench.got[name, 0]:
                    first_event.setdefault(name, step)
        assert first_event["large"] <= first_event["small"]

    def test_a_preempted_choice_returns_before_a_waiting_one(self) -> None:
        bench = Bench(num_blocks=6, block_size=2, prefix_cache=False, config=config(num_speculative_tokens=0))
        bench.add(build_request("a", prompt(4), max_tokens=8))
        bench.add(build_request("b", prompt(4, 5), max_tokens=8))
        while not bench.scheduler.take_record(None).num_preemptions:
            bench.run_step()
        bench.add(build_request("c", prompt(2, 9), max_tokens=1))
        before = len(bench.got["b", 0])
        while not bench.got["c", 0]:
            bench.run_step()
        assert len(bench.got["b", 0]) > before
        bench.drain()
        bench.check_output("b")

    def test_the_worst_in_rank_is_preempted(self) -> None:
        bench = Bench(num_blocks=6, block_size=2, prefix_cache=False, config=config(num_speculative_tokens=0))
        bench.add(build_request("a", prompt(4), max_tokens=8, priority=1))
        bench.add(build_request("b", prompt(4, 5), max_tokens=8, priority=0))
        bench.drain()
        timings = {name: bench.finish(name).timing for name in "ab"}
        assert timings["a"] is not None
        assert timings["b"] is not None
        assert (timings["a"].num_preemptions, timings["b"].num_preemptions) == (1, 0)

    def test_drafts_are_dropped_before_anybody_is_preempted(self) -> None:
        # In the third step a's 5 known tokens and 4 drafts want 5 of the 7 blocks, and b's known tokens want 3.
        bench = Bench(num_blocks=7, block_size=2, prefix_cache=False, accept=0.0)
        bench.add(build_request("a", prompt(3), max_tokens=12))
        bench.add(build_request("b", prompt(3, 5), max_tokens=3))
        bench.drain()
        assert bench.finish("a").timing.num_drafted > 0  # type: ignore[union-attr]
        assert bench.scheduler.take_record(None).num_preemptions == 0

    def test_nobody_comes_in_only_to_be_preempted(self) -> None:
        # The second would take the last block, and the first needs one in the step after.
        bench = Bench(num_blocks=6, block_size=2, prefix_cache=False, config=config(num_speculative_tokens=0))
        bench.add(build_request("first", prompt(3), max_tokens=6))
        bench.run_step()
        bench.add(build_request("second", prompt(8, 9), max_tokens=2))
        bench.drain()
        assert bench.scheduler.take_record(None).num_preemptions == 0

    def test_drafts_do_not_starve_a_prompt(self) -> None:
        bench = Bench(
            accept=0.0, config=config(max_num_seqs=4, max_num_batched_tokens=8, num_speculative_tokens=8), num_blocks=99
        )
        for i in range(3):
            bench.add(build_request(f"r{i}", prompt(2, i), max_tokens=40))
        while any(not bench.got[f"r{i}", 0] for i in range(3)):
            bench.run_step()
        bench.add(build_request("new", prompt(12, 20), max_tokens=1))
        # 8 rows, 3 of them decode, at most 2 drafts: at least 3 prompt rows a step.
        for _ in range(4):
            bench.run_step()
        bench.check_output("new")


class TestChoices:
    def test_choices_share_the_prompt_blocks(self) -> None:
        bench = Bench(block_size=4)
        bench.add(build_request(prompt=prompt(17), n=4, max_tokens=6))
        plan = bench.run_step()
        assert len(seq_ids(plan)) == 1
        plan = bench.schedule()
        assert plan is not None
        assert len(plan.items) == 4
        tables = [item.sequence.table.blocks[:4] for item in plan.items]
        assert all(blocks == tables[0] for blocks in tables)
        bench.run_and_apply(plan)
        bench.drain()
        bench.check_output("r")
        record = bench.scheduler.take_record(None)
        assert record.prefix_hits == 3 * 16
        assert record.num_prompt_tokens == 17

    def test_choices_do_not_wait_for_one_that_failed(self) -> None:
        bench = Bench()
        bench.step.fail_seq_ids = {0, 1}
        bench.add(build_request(n=3, max_tokens=3))
        bench.drain()
        assert [bench.finish("r", j).finish_reason for j in range(3)] == ["error", "error", "length"]
        bench.check_all_free()

    def test_choices_do_not_wait_for_ever_for_one_that_was_preempted(self) -> None:
        bench = Bench(
            num_blocks=10, block_size=2, prefix_cache=False, config=config(max_num_batched_tokens=4, max_num_seqs=3)
        )
        bench.add(build_request("old", prompt(4), max_tokens=14))
        bench.run_step()
        bench.add(build_request("new", prompt(10, 9), n=3, max_tokens=2))
        bench.drain()
        bench.check_output("old")
        bench.check_output("new")

    def test_choices_do_not_wait_if_nothing_may_be_shared(self) -> None:
        bench = Bench()
        bench.add(build_request(n=3, read_prefix_cache=False))
        assert len(seq_ids(bench.run_step())) == 3
        bench.drain()
        assert bench.scheduler.take_record(None).prefix_queries == 0

    def test_a_hit_leaves_one_row_to_compute(self) -> None:
        bench = Bench(block_size=4)
        for name in "ab":
            bench.add(build_request(name, prompt(16), max_tokens=1))
            bench.drain()
        timing = bench.finish("b").timing
        assert timing is not None
        assert timing.num_cached_tokens == 12
        bench.check_output("b")

    def test_salts_do_not_share(self) -> None:
        bench = Bench()
        for name in "ab":
            bench.add(build_request(name, prompt(16), max_tokens=1, salt=name))
            bench.drain()
        assert bench.scheduler.take_record(None).prefix_hits == 0


class TestAdmission:
    def test_a_request_beyond_the_context_is_refused(self) -> None:
        bench = Bench()
        with pytest.raises(
            RequestTooLarge, match="60 prompt tokens and max_tokens 5 exceed the context of 64"
        ) as error:
            bench.add(build_request(prompt=prompt(60), max_tokens=5))
        assert error.value.reason == "context_length"
        assert not bench.scheduler.has_work

    def test_a_request_that_fits_the_pool_exactly_is_served(self) -> None:
        bench = Bench(num_blocks=4, block_size=2)
        with pytest.raises(RequestTooLarge, match="can never fit the KV cache of 4 blocks"):
            bench.add(build_request(prompt=prompt(4), max_tokens=6))
        bench.add(build_request(prompt=prompt(4), max_tokens=5))
        bench.drain()
        bench.check_output("r")

    def test_the_waiting_queue_is_bounded_in_requests(self) -> None:
        bench = Bench(config=config(max_waiting_requests=2))
        bench.add(build_request("a"))
        bench.add(build_request("b", n=3))
        with pytest.raises(QueueFull, match="2 requests are waiting") as error:
            bench.add(build_request("c"))
        assert error.value.reason == "queue_full"
        bench.run_step()
        bench.add(build_request("c"))

    def test_the_waiting_queue_is_bounded_in_tokens(self) -> None:
        bench = Bench(config=config(max_waiting_tokens=10))
        bench.add(build_request("a", prompt(30)))
        with pytest.raises(QueueFull, match="30 prompt tokens are waiting, 1 more") as error:
            bench.add(build_request("b", prompt(1)))
        assert error.value.reason == "queue_tokens"

    @pytest.mark.parametrize(
        "request_",
        [
            EngineRequest("r", (1, 2), (), 0.0),
            EngineRequest("r", (), build_request().choices, 0.0),
            EngineRequest("r", (1,), build_request().choices * 2, 0.0),
            build_request("taken"),
        ],
    )
    def test_a_malformed_request_leaves_no_trace(self, request_: EngineRequest) -> None:
        bench = Bench()
        bench.add(build_request("taken"))
        with pytest.raises(ValueError):
            bench.scheduler.add(request_)
        bench.scheduler.check_integrity()
        assert bench.scheduler.num_waiting == 1

    @pytest.mark.parametrize(
        "change",
        [
            {"max_num_seqs": 0},
            {"max_num_batched_tokens": 3},
            {"num_speculative_tokens": -1},
            {"max_waiting_requests": 0},
            {"max_waiting_tokens": 0},
            {"max_model_len": 0},
        ],
    )
    def test_contradicting_limits_are_refused(self, change: dict[str, int]) -> None:
        with pytest.raises(ValueError, match=str(next(iter(change.values())))):
            config(**change)


class TestWhoWaits:
    def test_the_oldest_arrival_is_that_of_a_request_of_which_no_choice_has_run(self) -> None:
        bench = Bench(config=config(max_num_seqs=1))
        assert bench.scheduler.oldest_arrival is None
        for name, arrival in (("a", 5.0), ("b", 7.0), ("c", 6.0)):
            bench.add(build_request(name, arrival_time=arrival, n=2))
        assert bench.scheduler.oldest_arrival == 5.0
        bench.run_step()
        assert bench.scheduler.oldest_arrival == 6.0  # its other choice waits, but it has begun
        bench.abort("c")
        assert bench.scheduler.oldest_arrival == 7.0
        bench.drain()
        assert bench.scheduler.oldest_arrival is None
