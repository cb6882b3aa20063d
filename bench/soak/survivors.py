"""A sample of the answered requests, run again: each alone, without speculation."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from bench.replay.compare import compare, compare_usage
from bench.replay.record import Answer
from bench.soak.outcome import Answered, Outcome, judge
from bench.soak.requests import Planned
from bench.soak.wire import Manner, Reply

PER_FEATURE = 2

Send = Callable[[Planned], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Replayed:
    """``difference``: the first one, empty if there is none."""

    number: int
    features: frozenset[str]
    difference: str


class Survivors:
    """Keeps a few answers of every feature; all that have it have the same chance."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._seen: dict[str, int] = {}
        self._kept: dict[str, list[tuple[Planned, Answered]]] = {}

    def offer(self, planned: Planned, answered: Answered) -> None:
        for feature in sorted(planned.features):
            seen = self._seen[feature] = self._seen.get(feature, 0) + 1
            kept = self._kept.setdefault(feature, [])
            if len(kept) < PER_FEATURE:
                kept.append((planned, answered))
            elif (place := self._rng.randrange(seen)) < PER_FEATURE:
                kept[place] = (planned, answered)

    @property
    def sample(self) -> list[tuple[Planned, Answered]]:
        """Each of the kept once, by number."""
        kept = {pair[0].number: pair for pairs in self._kept.values() for pair in pairs}
        return [kept[number] for number in sorted(kept)]


async def replay_alone(survivors: Survivors, send: Send) -> tuple[list[Replayed], list[Outcome]]:
    """One after the other, with the seed that was used. Nothing else may run. Also what became of the new requests."""
    replays, outcomes = [], []
    for planned, then in survivors.sample:
        again = plainly(planned, then.seed)
        outcome, now = judge(again, await send(again))
        outcomes.append(outcome)
        told = f"{outcome.kind}: {outcome.problem}" if now is None else answers_differ(then.answer, now.answer)
        replays.append(Replayed(planned.number, planned.features, told))
    return replays, outcomes


def plainly(planned: Planned, seed: int) -> Planned:
    """The same request, whole, with that seed and without speculation, under a number of its own (negative)."""
    body = {name: value for name, value in planned.body.items() if name not in ("stream", "stream_options", "timeout")}
    body |= {"seed": seed, "return_token_ids": True, "speculation": {"num_speculative_tokens": 0}}
    return replace(planned, number=-planned.number, body=body, raw=json.dumps(body).encode(), manner=Manner())


def answers_differ(then: Answer, now: Answer) -> str:
    """The first difference in what request and seed decide; empty if there is none."""
    extra = sorted(set(now.outputs) - set(then.outputs))
    if extra:
        return f"choice {extra[0]} was not there"
    compared = [compare(index, output, now.outputs.get(index)) for index, output in then.outputs.items()]
    if then.usage is not None:
        compared.append(compare_usage(then.usage, now.usage or {}))
    return next((one.line for one in compared if not one.same), "")
