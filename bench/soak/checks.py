"""What must hold after a soak: one function an invariant, each of which can fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.preflight.scrape import Scrape
from bench.soak.drive import Record, RoundEnd
from bench.soak.faults import SPARED, VICTIMS
from bench.soak.log import ServerLog
from bench.soak.outcome import Outcome

MEMORY_GROWTH_BYTES = 32 * 2**20  # from the end of the warm-up on, beyond what the server says its caches grew
REASONS = ("stop", "length", "abort", "error")
# uvicorn's words for a stream that was given up because nobody read it.
_GIVEN_UP = "ASGI callable returned without completing response"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    detail: str  # one line


@dataclass(frozen=True, slots=True)
class Soaked:
    """A soak that is over."""

    record: Record
    log: ServerLog
    num_blocks: int
    warm_rounds: int  # the first so many rounds are the warm-up
    exit_code: int | None  # of the server after SIGTERM; None: it did not end
    left_children: tuple[int, ...]
    must_happen: frozenset[str]  # see everything_happened
    # What an engine in another process may generate for a request between its abort here and there, at most.
    tokens_after_abort: int = 0


def check_all(soaked: Soaked) -> list[Check]:
    """Every invariant, in the order in which they are told."""
    return [check(soaked) for check in CHECKS]


def every_request_ended(soaked: Soaked) -> Check:
    hung = _of(soaked, "hung")
    return Check("no request hung", not hung, _examples(hung) or f"{len(soaked.record.outcomes):,} requests ended")


def every_answer_was_due(soaked: Soaked) -> Check:
    wrong = _of(soaked, "wrong")
    kinds = Counter(outcome.kind for outcome in soaked.record.outcomes)
    told = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    return Check("every answer is one that the request may get", not wrong, _examples(wrong) or told)


def overload_says_when_to_come_back(soaked: Soaked) -> Check:
    overloaded = [one for one in _of(soaked, "refused") if one.status == 503]
    mute = [one for one in overloaded if not one.retry_after]
    detail = f"{len(mute)} have no Retry-After" if mute else f"{len(overloaded):,} refusals"
    return Check("a refusal under overload has Retry-After", not mute, detail)


def only_faults_failed_requests(soaked: Soaked) -> Check:
    failed = [one for one in _of(soaked, "failed") if one.features.isdisjoint(_VICTIMS)]
    victims = len(_of(soaked, "failed")) - len(failed)
    most = sum(fault.cost for fault in soaked.record.fired)
    detail = f"{victims} victims, and {len(failed)} where {len(soaked.record.fired)} faults may fail {most}"
    if len(failed) > most:
        detail += f": {_examples(failed)}"
    return Check("no request failed but by a fault that was asked for", len(failed) <= most, detail)


_VICTIMS = frozenset(f"victim of {point}" for point in VICTIMS if point != SPARED)


def nothing_runs(soaked: Soaked) -> Check:
    left = [f"round {i}: {end.left or 'it took too long'}" for i, end in _numbered(soaked) if _unsettled(end)]
    slowest = max((end.settled_after or 0.0 for end in soaked.record.rounds), default=0.0)
    passed = bool(soaked.record.rounds) and not left
    detail = "; ".join(left[:3]) or f"{len(soaked.record.rounds)} times, after at most {slowest:.1f} s"
    return Check("nothing runs, waits or holds a block once its clients are gone", passed, detail)


def all_blocks_are_free(soaked: Soaked) -> Check:
    wrong = []
    for i, end in _numbered(soaked):
        free = (end.scrape.value("kv_blocks", state="free") or 0) + (end.scrape.value("kv_blocks", state="cached") or 0)
        if free != soaked.num_blocks:
            wrong.append(f"round {i}: {free:.0f} of {soaked.num_blocks}")
    detail = "; ".join(wrong[:3]) or f"{soaked.num_blocks} of {soaked.num_blocks}"
    return Check("all blocks are free or cached", not wrong, detail)


def usage_is_what_the_server_counts(soaked: Soaked) -> Check:
    """Request by request: usage as its client read it, and the access log's number."""
    known = [one for one in soaked.record.outcomes if one.completion_tokens is not None]
    wrong = [one for one in known if soaked.log.tokens.get(one.request_id) != one.completion_tokens]
    first = [
        f"{one.request_id}: usage {one.completion_tokens}, log {soaked.log.tokens.get(one.request_id)}"
        for one in wrong[:3]
    ]
    return Check(
        "the usage of every answer is what the server's log has for it",
        bool(known) and not wrong,
        "; ".join(first) or f"{len(known):,} answers",
    )


def generated_tokens_add_up(soaked: Soaked) -> Check:
    """generation_tokens_total == usage of those who read it + what the log says of all others, by request."""
    if soaked.record.final is None:
        return Check(_ADD_UP, False, "there is no last scrape")
    total = soaked.record.final.value("generation_tokens_total") or 0.0
    usage = {one.request_id: one.completion_tokens for one in soaked.record.outcomes}
    read = sum(tokens for tokens in usage.values() if tokens is not None)
    unread = sum(tokens for request_id, tokens in soaked.log.tokens.items() if usage.get(request_id) is None)
    most = soaked.tokens_after_abort * sum(tokens is None for tokens in usage.values())
    passed = total > 0 and 0 <= total - read - unread <= most and not soaked.log.twice
    detail = f"{total:,.0f} generated, {read:,} in usage, {unread:,} of requests without"
    detail += f", at most {most:,} after aborts" if most else ""
    return Check(_ADD_UP, passed, detail + (f", told twice: {soaked.log.twice[:3]}" if soaked.log.twice else ""))


_ADD_UP = "generation_tokens_total is the sum of usage, aborted requests by the server's log"


def counters_agree(soaked: Soaked) -> Check:
    """Of the last scrape, when nothing is under way."""
    final = soaked.record.final
    if final is None:
        return Check(_AGREE, False, "there is no last scrape")
    wrong = [final.impossible[name] for pair in _SAME for name in pair if name in final.impossible]
    wrong += [
        f"{left} {_total(final, left):,.0f}, {right} {_total(final, right):,.0f}"
        for left, right in _SAME
        if _total(final, left) != _total(final, right)
    ]
    wrong += [f"{name} {_total(final, name):,.0f}, by design 0" for name in _ZERO if _total(final, name)]
    return Check(_AGREE, not wrong, "; ".join(wrong) or f"{len(_SAME) + len(_ZERO)} of them")


# Sums over all labels.
_SAME = (
    ("generation_tokens_total", "ended_generation_tokens_total"),
    ("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
    ("spec_decode_num_accepted_tokens_total", "spec_decode_drafter_accepted_tokens_total"),
    ("spec_decode_num_draft_tokens_total", "spec_decode_drafter_draft_tokens_total"),
    ("spec_decode_num_drafts_total", "spec_decode_acceptance_length_count"),
)
_ZERO = ("kv_alignment_bytes_moved_total", "kv_blocks_moved_total")
_AGREE = "counters that count the same thing agree"


def counters_never_fall(soaked: Soaked) -> Check:
    scrapes = [end.scrape for end in soaked.record.rounds]
    fallen = []
    for before, after in pairwise(scrapes):
        for name, family in before.samples.items():
            if not name.endswith(("_total", "_count", "_bucket")):
                continue
            now = after.samples.get(name, {})
            fallen += [name for labels, value in family.items() if now.get(labels, 0.0) < value]
    return Check("no counter falls", not fallen, ", ".join(sorted(set(fallen))[:5]) or f"{len(scrapes)} looks")


def memory_is_flat(soaked: Soaked) -> Check:
    rounds = soaked.record.rounds
    name = f"memory grows by at most {MEMORY_GROWTH_BYTES >> 20} MiB once it is warm, its bounded caches apart"
    if not 0 < soaked.warm_rounds < len(rounds):
        return Check(name, False, f"{len(rounds)} rounds, {soaked.warm_rounds} of them warm-up")
    warm, last = rounds[soaked.warm_rounds - 1], rounds[-1]
    growth = last.memory_bytes - warm.memory_bytes
    kept = last.kept_bytes - warm.kept_bytes
    detail = (
        f"{warm.memory_bytes / 2**20:.1f} MiB warm, {last.memory_bytes / 2**20:.1f} at the end; caches "
        f"{kept / 2**20:+.1f} MiB"
    )
    return Check(name, growth - max(0, kept) <= MEMORY_GROWTH_BYTES, detail)


def the_server_stays_healthy(soaked: Soaked) -> Check:
    sick = [f"round {i}: /health {end.health}" for i, end in _numbered(soaked) if end.health != 200]
    return Check("/health is 200 after every round", not sick, "; ".join(sick[:3]) or "always")


def nothing_unexpected_is_logged(soaked: Soaked) -> Check:
    cut = len(_of(soaked, "cut"))
    given_up = [line for line in soaked.log.errors if _GIVEN_UP in line]
    others = [line for line in soaked.log.errors if _GIVEN_UP not in line]
    passed = not others and len(given_up) <= cut
    detail = f"{soaked.log.num_injected} asked for, {len(given_up)} of readers who did not read"
    if not passed:
        detail = "; ".join((others or given_up)[:3])
    return Check("no error is logged but those of the faults", passed, detail)


def survivors_come_again(soaked: Soaked) -> Check:
    """Alone and without speculation, they are what they were in the crowd."""
    different = [one for one in soaked.record.replays if one.difference]
    name = "answers come again, alone and without speculation"
    if different:
        first = different[0]
        return Check(
            name,
            False,
            f"{len(different)} of {len(soaked.record.replays)} differ; request {first.number} "
            f"({', '.join(sorted(first.features))}): {first.difference}",
        )
    return Check(name, bool(soaked.record.replays), f"{len(soaked.record.replays)} of {len(soaked.record.replays)}")


def everything_happened(soaked: Soaked) -> Check:
    """A soak in which nothing happens would pass all others.

    What may be asked for: an outcome's kind with one of its features ("answered stream"), "replayed" with a feature, a
    fault's name, and the names below.
    """
    happened = {f"{one.kind} {feature}" for one in soaked.record.outcomes for feature in one.features}
    happened |= {fault.name for fault in soaked.record.fired}
    happened |= {f"replayed {feature}" for one in soaked.record.replays for feature in one.features}
    final = soaked.record.final
    if final is not None:
        accepted = _total(final, "spec_decode_num_accepted_tokens_total")
        counts = {
            "accepted drafts": accepted,
            "rejected drafts": _total(final, "spec_decode_num_draft_tokens_total") - accepted,
            "preemptions": _total(final, "num_preemptions_total"),
            "prefix hits": _total(final, "prefix_cache_hits_total"),
            "overload": _total(final, "admission_rejections_total", reason="queue_full"),
        }
        for reason in REASONS:
            counts[f"ended by {reason}"] = _total(final, "request_success_total", finished_reason=reason)
        happened |= {name for name, count in counts.items() if count > 0}
    missing = sorted(soaked.must_happen - happened)
    return Check(
        "everything that a soak is for happened",
        not missing,
        f"never: {', '.join(missing)}" if missing else f"{len(soaked.must_happen)} kinds of things",
    )


def the_server_ends_in_order(soaked: Soaked) -> Check:
    ended = "it did not end" if soaked.exit_code is None else f"exit code {soaked.exit_code}"
    left = f", children left: {list(soaked.left_children)}" if soaked.left_children else ", no child left"
    return Check("SIGTERM ends it in order", soaked.exit_code == 0 and not soaked.left_children, ended + left)


CHECKS: tuple[Callable[[Soaked], Check], ...] = (
    every_request_ended,
    every_answer_was_due,
    overload_says_when_to_come_back,
    only_faults_failed_requests,
    nothing_runs,
    all_blocks_are_free,
    usage_is_what_the_server_counts,
    generated_tokens_add_up,
    counters_agree,
    counters_never_fall,
    memory_is_flat,
    the_server_stays_healthy,
    nothing_unexpected_is_logged,
    survivors_come_again,
    everything_happened,
    the_server_ends_in_order,
)


def _of(soaked: Soaked, kind: str) -> list[Outcome]:
    return [one for one in soaked.record.outcomes if one.kind == kind]


def _examples(outcomes: Sequence[Outcome]) -> str:
    told = "; ".join(
        f"{one.request_id} ({', '.join(sorted(one.features))}): {one.problem or one.kind}" for one in outcomes[:3]
    )
    return f"{len(outcomes)}, as {told}" if outcomes else ""


def _numbered(soaked: Soaked) -> list[tuple[int, RoundEnd]]:
    return list(enumerate(soaked.record.rounds, start=1))


def _unsettled(end: RoundEnd) -> bool:
    return bool(end.left) or end.settled_after is None


def _total(scrape: Scrape, name: str, **labels: str) -> float:
    return scrape.value(name, **labels) or 0.0
