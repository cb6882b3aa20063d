"""From runs to figures, to JSON objects and to the table."""

from __future__ import annotations

import json

import pytest

from bench.speculation.cells import Cell, CellResult
from bench.speculation.figures import Pair, compared, drafts_of, single, stage_shares
from bench.speculation.forwards import ForwardTimes
from bench.speculation.modes import Mode
from bench.speculation.report import acceptance_lines, cell_objects, table
from tests.bench.speculation.builders import SIZE, a_request, a_run, a_step

NEEDED = {"workload", "concurrency", "temperature", "mode", "tokens_per_s", "tpot_ms", "acceptance_length"}


def test_acceptance_is_counted_by_position_over_the_drafts_that_had_it() -> None:
    found = drafts_of([a_request(steps=[(3, 3), (1, 0), (0, 0)]), a_request(steps=[(2, 1)])])
    assert found.by_position == pytest.approx((2 / 3, 1 / 2, 1 / 1))
    assert found.acceptance_length == pytest.approx(1 + 4 / 3)  # 4 accepted, 3 drafts
    assert found.tokens_per_step == pytest.approx(8 / 4)
    assert found.drafting_share == pytest.approx(3 / 4)
    assert found.draft_length == pytest.approx(6 / 4)


def test_without_drafts_the_acceptance_length_is_one() -> None:
    found = drafts_of([a_request(steps=[(0, 0), (0, 0)])])
    assert (found.acceptance_length, found.by_position, found.tokens_per_step) == (1.0, (), 1.0)


def test_the_shares_of_the_steps_add_up_to_one() -> None:
    stages = {"draft": 1.0, "build": 0.5, "verify": 6.0, "accept": 1.5, "rollback": 0.5, "sync": 0.5}
    assert stage_shares([a_run(stages=stages)]) == pytest.approx({"draft": 0.1, "verify": 0.6, "other": 0.3})
    assert sum(stage_shares([a_run(stages=stages), a_run(stages={"verify": 3.0})]).values()) == pytest.approx(1.0)


def test_the_full_batch_is_the_steps_in_which_every_seat_decodes_and_no_prompt_comes_in() -> None:
    steps = [
        a_step(2, emitted=6, seconds=2.0),
        a_step(2, emitted=4, seconds=3.0),
        a_step(1, emitted=9),
        a_step(2, prefill_rows=5, emitted=9),
    ]
    assert a_run(concurrency=2, steps=steps).full_batch_tokens_per_s == pytest.approx(2.0)
    assert a_run(concurrency=3, steps=steps).full_batch_tokens_per_s is None


def pair(speed: float, tpot: float = 0.1) -> Pair:
    """One request that repeats itself and is fast, one that does not and is not; ``speed`` of the whole run."""

    def run(seconds: float, looping: float, honest: float) -> list:  # type: ignore[type-arg]
        return [
            a_request(0, seconds=looping, tpot=tpot * looping, repeats=True, steps=[(4, 4)] * 2),
            a_request(1, seconds=honest, tpot=tpot * honest, steps=[(4, 1)] * 5),
        ]

    return Pair(a_run(run(1.0, 1.0, 1.0)), a_run(run(1.0 / speed, 0.25, 0.8), seconds=1.0 / speed))


def test_a_ratio_above_one_means_that_the_mode_is_faster() -> None:
    found = compared([pair(1.5), pair(2.0), pair(1.6)])
    assert found["ratio"]["median"] == pytest.approx(1.6)
    assert found["ratios"] == pytest.approx([1.5, 2.0, 1.6])
    assert found["tpot_ratio"]["median"] == pytest.approx(1.0 / ((0.25 + 0.8) / 2))
    assert found["tokens_per_s"] == pytest.approx(20 * 1.6)


def test_the_figures_without_repeats_are_those_of_the_other_requests() -> None:
    found = compared([pair(2.0)])
    assert found["repeating_share"] == 0.5
    assert found["acceptance_length"] == pytest.approx(1 + 13 / 7)
    without = found["without_repeats"]
    assert without["requests"] == 1
    assert without["ratio"]["median"] == pytest.approx(1.25)
    assert without["tpot_ratio"]["median"] == pytest.approx(1.25)
    assert without["acceptance_length"] == pytest.approx(2.0)
    assert without["acceptance_by_position"] == [1.0, 0.0, 0.0, 0.0]
    assert without["tokens_per_s"] == pytest.approx(10 / 0.8)


def test_where_every_output_repeats_itself_nothing_is_left_without() -> None:
    looping = a_run([a_request(repeats=True)])
    found = compared([Pair(looping, looping)])
    assert (found["repeating_share"], found["without_repeats"]) == (1.0, None)


def test_a_mode_alone_has_medians_over_its_runs() -> None:
    runs = [a_run(seconds=seconds) for seconds in (1.0, 0.5, 2.0)]
    assert single(runs)["tokens_per_s"] == pytest.approx(10.0)
    assert single(runs)["tpot_ms"] == pytest.approx(100.0)


def results() -> list[CellResult]:
    modes = (Mode("auto", 16), Mode("ngram", 4))
    cells = [Cell(name, 2, degree, mode) for mode in modes for name in ("chat", "copy") for degree in (0.0, 0.8)]
    found = [CellResult(cell, [pair(1.5), pair(1.2)]) for cell in cells]
    found[0].first = [pair(0.5)]
    found.append(CellResult(Cell("json", 1, 0.0, modes[1]), []))  # interrupted before its first pair
    return found


FORWARDS = ForwardTimes({(2, 1): 0.01, (2, 5): 0.02, (2, 9): 0.02, (2, 17): 0.1})


def test_the_json_has_an_object_for_each_cell_and_mode_with_off_among_them() -> None:
    objects = cell_objects(results(), FORWARDS, SIZE, {"prompt_set": "abc"})
    places = [(one["workload"], one["temperature"], one["mode"]) for one in objects]
    assert sorted(places) == sorted(
        (name, degree, mode) for name in ("chat", "copy") for degree in (0.0, 0.8) for mode in ("off", "auto", "ngram")
    )
    assert all(set(one) >= NEEDED for one in objects)
    assert all(one["prompt_set"] == "abc" and one["concurrency"] == 2 for one in objects)
    assert json.loads(json.dumps(objects, allow_nan=False)) == objects


def test_the_json_says_what_was_reached_beside_its_bound_and_both_attempts() -> None:
    objects = {(o["workload"], o["temperature"], o["mode"]): o for o in cell_objects(results(), FORWARDS, SIZE, {})}
    auto, ngram, off = (objects["chat", 0.0, mode] for mode in ("auto", "ngram", "off"))
    assert (auto["bound"], auto["bound_k"]) == (4.5, 8)
    assert (ngram["bound"], ngram["bound_k"]) == (2.5, 4)
    assert auto["bar"] == "held"
    assert auto["first_attempt"]["ratio"]["median"] == 0.5
    assert ngram["bar"] is None
    assert off["runs"] == 5  # of all pairs here, the first attempt's too


def test_the_table_has_a_line_for_each_object_and_one_for_a_first_attempt() -> None:
    objects = cell_objects(results(), FORWARDS, SIZE, {})
    lines = table(objects).splitlines()
    rows = [line.split() for line in lines[1:] if line and not line.startswith(("chat,", "copy,"))]
    assert [row[0] for row in rows].count("(first)") == 1
    assert len(rows) == len(objects) + 1
    assert sum(row[0] == "off" for row in rows) == 4
    assert len(acceptance_lines(objects)) == len(objects)
