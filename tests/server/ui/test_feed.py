"""The ring buffer: what it keeps, what it drops, and that it holds on to nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from server.ui.feed import Feed
from tests.server.ui.records import TIMING, Clock, ended, got, record


def test_steps_are_numbered_and_kept_in_order() -> None:
    feed = Feed()
    for key in range(5):
        feed.observe(record(got(key, 1)))
    assert feed.seq == 5
    assert [step.n for step in feed.steps(after=2)] == [3, 4, 5]
    assert [step.sequences[0].key for step in feed.steps()] == [0, 1, 2, 3, 4]
    assert feed.steps(after=5) == []
    assert feed.num_dropped(after=0) == 0


def test_the_oldest_steps_go_and_are_counted_for_who_missed_them() -> None:
    feed = Feed(max_steps=3)
    for _ in range(10):
        feed.observe(record())
    assert [step.n for step in feed.steps(after=2)] == [8, 9, 10]
    assert feed.num_dropped(after=2) == 5
    assert feed.num_dropped(after=7) == 0
    assert feed.num_dropped(after=10) == 0


def test_wide_steps_are_kept_for_less_long() -> None:
    feed = Feed(max_sequences=10)
    for _ in range(20):
        feed.observe(record(*(got(key, 1) for key in range(4))))
    assert [step.n for step in feed.steps()] == [19, 20]
    feed.observe(record(*(got(key, 1) for key in range(11))))
    assert [step.n for step in feed.steps()] == [21], "one that is wider than all that is kept is kept alone"
    feed.observe(record(got(1, 1)))
    assert [step.n for step in feed.steps()] == [22]


def test_a_record_without_a_step_is_no_step_and_still_tells_who_runs() -> None:
    feed = Feed()
    feed.observe(record(got(1, 2)))
    feed.observe(record(step=None, num_running=0, num_waiting=1, finished=[ended(1, "abort")]))
    assert feed.seq == 1
    assert (feed.running, feed.waiting) == (0, 1)
    assert feed.num_records == 2
    assert [json.loads(each)["key"] for each in feed.finished()] == [1]


def test_a_step_reads_as_the_page_says() -> None:
    clock = Clock()
    clock.now = 100.0
    feed = Feed(clock=clock)
    clock.now = 101.25
    feed.observe(record(got(7, 4, 5, 3, "suffix"), got(8, 1)))
    (step,) = feed.steps()
    assert json.loads(step.json(feed.started)) == {
        "n": 1,
        "t": 1.25,
        "s": {
            "draft": 0.001, "build": 0.002, "verify": 0.02, "accept": 0.003, "rollback": 0.001, "sync": 0.001,
            "other": pytest.approx(0.004),
        },
        "rows": 12,
        "seqs": [[7, 4, 5, 3, "suffix"], [8, 1, 0, 0, ""]],
        "running": 3,
        "waiting": 2,
        "kv": [4, 4, 2, 1, 0.25],
    }  # fmt: skip


def test_a_finished_request_reads_as_the_page_says() -> None:
    clock = Clock()
    clock.now = 0.5
    feed = Feed(clock=clock)
    feed.observe(record(got(7, 1), finished=[ended(7)]))
    (found,) = feed.finished()
    assert json.loads(found) == {
        "key": 7, "choice": 0, "n": 1, "t": 4.0, "finish_reason": "length", "prompt_tokens": 7, "cached_tokens": 4,
        "output_tokens": 5, "queue_s": 0.5, "ttft_s": 1.0, "tpot_s": 0.5, "e2e_s": 3.5, "steps": 2, "drafted": 6,
        "accepted": 3, "acceptance_length": 2.5, "preemptions": 1,
    }  # fmt: skip


def test_what_a_request_never_had_is_null() -> None:
    feed = Feed()
    nothing = replace(TIMING, num_output_tokens=0, num_spec_steps=0, num_drafted=0, num_accepted=0)
    feed.observe(record(finished=[ended(1, "abort", nothing), ended(2, "stop", replace(TIMING, num_output_tokens=1))]))
    aborted, single = map(json.loads, feed.finished())
    assert (aborted["ttft_s"], aborted["tpot_s"], aborted["acceptance_length"]) == (None, None, None)
    assert (single["ttft_s"], single["tpot_s"]) == (1.0, None)


def test_finished_requests_are_bounded_and_read_from_where_one_was() -> None:
    feed = Feed(max_finished=3)
    for key in range(6):
        feed.observe(record(finished=[ended(key)]))
    assert [json.loads(each)["key"] for each in feed.finished(after=0)] == [3, 4, 5]
    assert [json.loads(each)["key"] for each in feed.finished(after=5)] == [5]
    assert feed.finished(after=6) == []
    assert feed.num_finished_by(5) == 5
    assert feed.num_finished_by(6) == 6


def test_nothing_that_a_request_sent_is_kept() -> None:
    feed = Feed()
    feed.observe(record(got(1, 2), finished=[ended(1)]))
    (step,) = feed.steps()
    shown = step.json(feed.started) + b"".join(feed.finished())
    assert b"secret" not in shown


def test_the_record_itself_is_not_held_on_to() -> None:
    feed = Feed()
    feed.observe(record(got(1, 1), finished=[ended(1)]))
    (step,) = feed.steps()
    held = [getattr(step, name) for name in step.__slots__]
    assert not any(hasattr(each, "finished") for each in held), "it has timings and audits of any length"
