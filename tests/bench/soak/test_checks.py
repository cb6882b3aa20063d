"""Every invariant of a soak holds for one that went well, and fails for one that did not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bench.soak import checks
from bench.soak.checks import CHECKS, MEMORY_GROWTH_BYTES, Check, Soaked, check_all
from bench.soak.faults import Fired
from bench.soak.outcome import Outcome
from bench.soak.survivors import Replayed
from tests.bench.soak.builders import MIB, round_end, scrape, soaked

Invariant = Callable[[Soaked], Check]


def with_outcome(**changes: object) -> Soaked:
    made = soaked()
    outcome = Outcome(9, "answered", frozenset({"chat"}), 200)
    made.record.outcomes.append(replace(outcome, **changes))  # type: ignore[arg-type]
    return made


def with_round(**changes: object) -> Soaked:
    made = soaked()
    made.record.rounds.append(round_end(**changes))
    return made


def with_final(**changes: float) -> Soaked:
    made = soaked()
    made.record.final = scrape(**changes)
    return made


def without(what: str) -> Soaked:
    made = soaked()
    setattr(made.record, what, None if what == "final" else [])
    return made


def with_log(**changes: object) -> Soaked:
    made = soaked()
    return replace(made, log=replace(made.log, **changes))  # type: ignore[arg-type]


def with_replay(difference: str) -> Soaked:
    made = soaked()
    made.record.replays.append(Replayed(3, frozenset({"chat"}), difference))
    return made


TOKENS = {"soak-1": 7, "soak-2": 5, "soak-3": 2}
GIVEN_UP = "uvicorn.error: ASGI callable returned without completing response."
BROKEN: dict[str, tuple[Invariant, Soaked]] = {
    "a request hangs": (checks.every_request_ended, with_outcome(kind="hung")),
    "an answer makes no sense": (checks.every_answer_was_due, with_outcome(kind="wrong", problem="status 502")),
    "a refusal does not say when to come back": (
        checks.overload_says_when_to_come_back,
        with_outcome(kind="refused", status=503),
    ),
    "more fail than the faults may fail": (checks.only_faults_failed_requests, with_outcome(kind="failed", status=500)),
    "one fails for want of drafts": (
        checks.only_faults_failed_requests,
        with_outcome(kind="failed", status=500, features=frozenset({"victim of draft"})),
    ),
    "one fails without a fault": (checks.only_faults_failed_requests, without("fired")),
    "something waits": (checks.nothing_runs, with_round(left="1 choices wait", settled_after=None)),
    "something takes too long": (checks.nothing_runs, with_round(settled_after=None)),
    "something is left behind the last requests": (checks.nothing_runs, with_round(left="3 blocks are held")),
    "there was no round": (checks.nothing_runs, without("rounds")),
    "a block is lost": (checks.all_blocks_are_free, with_round(scrape=scrape(kv_blocks__cached=39))),
    "a usage is not the log's": (
        checks.usage_is_what_the_server_counts,
        with_log(tokens={**TOKENS, "soak-1": 8, "soak-3": 1}),
    ),
    "the log lacks a request": (checks.usage_is_what_the_server_counts, with_log(tokens={"soak-1": 7, "soak-3": 7})),
    "no usage was read": (checks.usage_is_what_the_server_counts, without("outcomes")),
    "tokens of an aborted request are lost": (checks.generated_tokens_add_up, with_log(tokens={**TOKENS, "soak-3": 1})),
    "more is generated than anybody had": (
        checks.generated_tokens_add_up,
        with_final(generation_tokens_total=15, ended_generation_tokens_total__abort=3),
    ),
    "more is generated behind aborts than an engine elsewhere may": (
        checks.generated_tokens_add_up,
        replace(
            with_final(generation_tokens_total=100, ended_generation_tokens_total__abort=88), tokens_after_abort=10
        ),
    ),
    "less is generated than was read": (
        checks.generated_tokens_add_up,
        replace(with_final(generation_tokens_total=13, ended_generation_tokens_total__abort=1), tokens_after_abort=10),
    ),
    "a request is told twice": (checks.generated_tokens_add_up, with_log(twice=["soak-1"])),
    "nothing was generated": (checks.generated_tokens_add_up, without("final")),
    "the ends do not add up": (checks.counters_agree, with_final(ended_generation_tokens_total__abort=1)),
    "accepted tokens do not add up": (
        checks.counters_agree,
        with_final(spec_decode_num_accepted_tokens_per_pos_total__1=2),
    ),
    "a drafter's tokens are lost": (checks.counters_agree, with_final(spec_decode_drafter_draft_tokens_total__ngram=8)),
    "KV bytes are moved": (checks.counters_agree, with_final(kv_alignment_bytes_moved_total=16)),
    "a counter falls": (checks.counters_never_fall, with_round(scrape=scrape(request_success_total__stop=1))),
    "memory grows": (checks.memory_is_flat, with_round(memory_bytes=400 * MIB + MEMORY_GROWTH_BYTES + 1)),
    "memory grows, though a cache shrank": (
        checks.memory_is_flat,
        with_round(memory_bytes=400 * MIB + MEMORY_GROWTH_BYTES + 1, kept_bytes=0),
    ),
    "there is nothing behind the warm-up": (checks.memory_is_flat, replace(soaked(), warm_rounds=3)),
    "the server is not ready": (checks.the_server_stays_healthy, with_round(health=503)),
    "the server does not answer": (checks.the_server_stays_healthy, with_round(health=None)),
    "an error is logged": (checks.nothing_unexpected_is_logged, with_log(errors=["truedraft.run: oh KeyError: 3"])),
    "more streams are given up than readers were stuck": (
        checks.nothing_unexpected_is_logged,
        with_log(errors=[GIVEN_UP, GIVEN_UP]),
    ),
    "an answer does not come again": (checks.survivors_come_again, with_replay("choice 0: output token 3 is 7")),
    "nothing was run again": (checks.survivors_come_again, without("replays")),
    "a fault never happened": (
        checks.everything_happened,
        replace(soaked(), must_happen=frozenset({"draft raise", "answered stream"})),
    ),
    "everything that was drafted was right": (
        checks.everything_happened,
        with_final(
            spec_decode_num_accepted_tokens_total=9,
            spec_decode_drafter_accepted_tokens_total__ngram=9,
            spec_decode_num_accepted_tokens_per_pos_total__0=8,
        ),
    ),
    "the exit code is another": (checks.the_server_ends_in_order, replace(soaked(), exit_code=1)),
    "it does not end": (checks.the_server_ends_in_order, replace(soaked(), exit_code=None)),
    "a child stays": (checks.the_server_ends_in_order, replace(soaked(), left_children=(4711,))),
}


def test_a_soak_that_went_well_passes() -> None:
    assert [check.name for check in check_all(soaked()) if not check.passed] == []


@pytest.mark.parametrize(("invariant", "broken"), BROKEN.values(), ids=BROKEN.keys())
def test_what_goes_wrong_is_seen(invariant: Invariant, broken: Soaked) -> None:
    check = invariant(broken)
    assert not check.passed
    assert check.detail
    assert "\n" not in check.detail


def test_every_invariant_is_seen_to_fail() -> None:
    assert {invariant for invariant, _ in BROKEN.values()} == set(CHECKS)


def test_memory_may_grow_by_what_caches_say_they_keep() -> None:
    grown = with_round(memory_bytes=400 * MIB + MEMORY_GROWTH_BYTES + 5 * MIB, kept_bytes=15 * MIB)
    assert checks.memory_is_flat(grown).passed


def test_each_fault_that_strikes_a_request_may_fail_one() -> None:
    made = with_outcome(kind="failed", status=500)
    made.record.fired.append(Fired("compile exit", 1))
    assert checks.only_faults_failed_requests(made).passed


def test_a_victim_fails_by_itself() -> None:
    made = with_outcome(kind="failed", status=500, features=frozenset({"victim of sample", "stream"}))
    assert checks.only_faults_failed_requests(made).passed


def test_a_stream_that_nobody_read_may_be_logged() -> None:
    assert checks.nothing_unexpected_is_logged(with_log(errors=[GIVEN_UP])).passed
