"""What a run runs: its requests, its engine, its seats, and what it sees of them."""

from __future__ import annotations

from functools import partial

import pytest

from bench.speculation import modes
from bench.speculation.forwards import measure_forwards
from bench.speculation.modes import EngineMaker, Mode, make_modes
from bench.speculation.own_time import OwnTime
from bench.speculation.runs import MeasuredEngine, closed_loop, closed_loops, make_requests, num_blocks, spread_lengths
from model.batch import PackedBatch
from model.interface import ForwardOutput
from model.loader import LoadedModel
from model.wrapped import WrappedExecutor
from tests.bench.speculation.builders import Clock

PROMPTS = tuple((3 + i, 5, 7 + i, 11) for i in range(4))
NGRAM = Mode("ngram", 3)
OFF = Mode(modes.OFF, 0)
EXIT = Mode("exit", 3)  # it always drafts


def test_requests_go_round_the_prompts_whose_length_and_seed_they_have_whatever_would_end_them() -> None:
    requests = make_requests("chat", PROMPTS, first=2, count=6, lengths=[9, 5, 8, 1], temperature=0.8)
    assert [one.prompt for one in requests] == [2, 3, 0, 1, 2, 3]
    assert [one.token_ids for one in requests] == [PROMPTS[one.prompt] for one in requests]
    assert [one.params.max_tokens for one in requests] == [8, 1, 9, 5, 8, 1]
    assert {one.params.temperature for one in requests} == {0.8}
    assert {one.params.stop_token_ids for one in requests} == {frozenset()}
    assert [one.params.seed for one in requests] == [one.prompt for one in requests]


@pytest.mark.parametrize("mean", [2, 64, 128])
def test_lengths_are_spread_around_their_mean_in_any_stretch_of_prompts(mean: int) -> None:
    lengths = spread_lengths(32, mean)
    assert min(lengths) >= mean / 2
    assert max(lengths) <= mean * 1.5
    for first in range(32 - 8):
        stretch = lengths[first : first + 8]
        assert abs(sum(stretch) / 8 - mean) <= mean * 0.11 + 0.5
        assert max(stretch) - min(stretch) >= mean // 2


def test_a_length_is_at_least_one_token() -> None:
    assert min(spread_lengths(32, 1)) == 1


def test_a_prompt_that_comes_again_has_another_salt_and_different_ones_share_theirs() -> None:
    requests = make_requests("chat", PROMPTS, first=2, count=6, lengths=[9] * 4, temperature=0.0)
    assert len({one.salt for one in requests[:4]}) == 1
    assert len({(one.prompt, one.salt) for one in requests}) == 6


def test_every_seat_is_taken_again_until_no_request_is_left(tiny: LoadedModel) -> None:
    requests = make_requests("chat", PROMPTS, first=0, count=7, lengths=[12] * 4, temperature=0.0)
    blocks = num_blocks(requests, 3, block_size=modes.BLOCK_SIZE, lookahead=EXIT.k)
    engine = EngineMaker(tiny).make(EXIT, seats=3, num_blocks=blocks)
    run = closed_loop(engine, requests, 3)
    assert max(step.num_decoding for step in run.steps) == 3
    assert [request.num_tokens for request in run.requests] == [12] * 7
    assert run.num_tokens == sum(step.num_emitted for step in run.steps) == 84
    assert engine.num_preemptions == 0
    # The first token comes with the prompt; all others from decode steps, whose drafts are counted by sequence.
    assert [request.counts.emitted for request in run.requests] == [11] * 7
    drafted = sum(sum(request.counts.drafted) for request in run.requests)
    assert drafted == sum(sum(step.drafts) for step in run.steps) == sum(step.num_drafted for step in engine.steps)
    assert sum(sum(request.counts.accepted) for request in run.requests) == sum(s.num_accepted for s in engine.steps)
    assert drafted > 0
    for request in run.requests:
        assert 0 < request.tpot * 11 <= request.seconds <= run.seconds


def test_runs_in_turns_give_what_each_gives_alone(tiny: LoadedModel) -> None:
    maker = EngineMaker(tiny)
    requests = make_requests("chat", PROMPTS, first=0, count=5, lengths=[12] * 4, temperature=0.8)

    def engine(mode: Mode) -> MeasuredEngine:
        return maker.make(mode, seats=3, num_blocks=32)

    engines = [engine(EXIT), engine(OFF)]
    together = closed_loops(engines, requests, 3)
    for mode, run, own in zip((EXIT, OFF), together, engines, strict=True):
        alone = closed_loop(engine(mode), requests, 3)
        assert run.outputs == alone.outputs
        assert [step.drafts for step in run.steps] == [step.drafts for step in alone.steps]
        assert run.seconds == own.time()
        own.check_clean()


def test_in_turns_nobody_is_ahead_by_more_than_a_step_and_nobody_pays_for_the_other(tiny: LoadedModel) -> None:
    clock = Clock()
    requests = make_requests("chat", PROMPTS, first=0, count=4, lengths=[12] * 4, temperature=0.0)
    engines = [EngineMaker(tiny).make(mode, seats=2, num_blocks=32) for mode in (OFF, NGRAM)]
    seconds = {0: 3.0, 1: 1.0}  # of a step
    ahead: list[tuple[float, float]] = []  # of the other, and what it had run itself

    def takes_its_time(i: int) -> None:
        own = engines[i].time()
        ahead.append((own - engines[1 - i].time(), own))
        clock.now += seconds[i]

    for i, engine in enumerate(engines):
        engine.time = OwnTime(clock)
        engine.before_step = partial(takes_its_time, i)  # type: ignore[method-assign]
    runs = closed_loops(engines, requests, 2)
    assert [run.seconds for run in runs] == [3.0 * len(runs[0].steps), 1.0 * len(runs[1].steps)]
    first_end = min(run.seconds for run in runs)
    together = [lead for lead, spent in ahead if spent < first_end]
    assert len(together) > 10
    assert max(together) <= 0.0, "who had run longer went on"


def test_runs_start_cold(tiny: LoadedModel) -> None:
    maker = EngineMaker(tiny)
    requests = make_requests("chat", [(5, 6) * 40], first=0, count=2, lengths=[2], temperature=0.0)
    engine = maker.make(NGRAM, seats=1, num_blocks=32)
    engine.run([])
    run = closed_loop(engine, requests[:1] * 2, 1)
    assert sum(step.num_prefill_rows for step in run.steps) == 160  # the second one finds nothing of the first
    assert maker.make(NGRAM, seats=1, num_blocks=32).step is not engine.step


def test_what_a_step_costs_is_measured_once_and_refined_by_each_engine_for_itself(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    real = modes.measure_step_cost

    def measure(*args):  # type: ignore[no-untyped-def]
        measured.append(real(*args))
        return measured[-1]

    monkeypatch.setattr(modes, "measure_step_cost", measure)
    maker = EngineMaker(tiny)
    auto = Mode("auto", 4)
    requests = make_requests("chat", PROMPTS, first=0, count=2, lengths=[8] * 4, temperature=0.0)
    for _ in range(2):
        closed_loop(maker.make(auto, seats=2, num_blocks=32), requests, 2)
    assert len(measured) == 1
    first = measured[0].points
    assert maker._measure(tiny.executor, maker.make(auto, seats=1, num_blocks=32).storage, 512).points == first


def test_auto_comes_first_and_no_mode_twice() -> None:
    found = make_modes(["off", "suffix", "auto", "ngram", "suffix"], k=4, max_k=16)
    assert found == [Mode("auto", 16), Mode("ngram", 4), Mode("suffix", 4)]


def test_a_mode_that_cannot_be_built_says_why(tiny: LoadedModel) -> None:
    maker = EngineMaker(tiny)
    assert "draft model" in maker.reason_against(Mode("model", 4))
    assert maker.reason_against(Mode("ngram", 4)) == maker.reason_against(Mode("auto", 16)) == ""


class _Slow(WrappedExecutor):
    """Takes 100 s for each of the first forwards, then 1 s a row."""

    def __init__(self, inner, clock: Clock, num_slow: int) -> None:  # type: ignore[no-untyped-def]
        super().__init__(inner)
        self.clock = clock
        self.left = num_slow

    def forward(self, batch: PackedBatch, **options) -> ForwardOutput:  # type: ignore[no-untyped-def]
        output = super().forward(batch, **options)
        self.clock.now += 100.0 if self.left > 0 else float(batch.num_rows)
        self.left -= 1
        return output


def test_forward_times_are_those_after_the_warm_up(tiny: LoadedModel) -> None:
    clock = Clock()
    shapes = [(1, 1), (2, 1), (2, 3)]
    slow = _Slow(tiny.executor, clock, len(shapes))
    found = measure_forwards(slow, shapes, block_size=16, context=20, rounds=1, clock=clock)
    assert found.seconds == {(1, 1): 1.0, (2, 1): 2.0, (2, 3): 6.0}
