"""Which answers are kept, and that running them again notices a difference."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from bench.soak.outcome import Answered, judge
from bench.soak.requests import Planned
from bench.soak.survivors import PER_FEATURE, Survivors, plainly, replay_alone
from bench.soak.wire import Manner, Reply
from tests.bench.soak.builders import answer, choice, planned, whole


def answered(**changes: Any) -> Answered:
    found = judge(planned(), whole(answer(choice(**changes))))[1]
    assert found is not None
    return found


def kept(*numbers: int) -> Survivors:
    survivors = Survivors(seed=0)
    for number in numbers:
        survivors.offer(replace(planned(), number=number), answered())
    return survivors


def replayed(reply: Reply) -> str:
    async def send(planned: Planned) -> Reply:
        return reply

    (one,), _ = asyncio.run(replay_alone(kept(1), send))
    return one.difference


def test_the_same_answer_is_no_difference() -> None:
    assert replayed(whole(answer(choice()))) == ""


@pytest.mark.parametrize(
    "change", [{"token_ids": [70, 72]}, {"text": "ac"}, {"finish_reason": "stop"}, {"stop_reason": "b"}]
)
def test_another_answer_is_a_difference(change: dict[str, Any]) -> None:
    assert replayed(whole(answer(choice(**change))))


def test_another_usage_is_a_difference() -> None:
    body = answer(choice())
    body["usage"]["prompt_tokens"] = 3
    assert "prompt_tokens" in replayed(whole(body))


def test_no_answer_is_a_difference() -> None:
    assert replayed(Reply("hung")).startswith("hung")


def test_a_request_runs_again_whole_and_plain_with_its_seed_and_another_name() -> None:
    body = {"stream": True, "stream_options": {"include_usage": True}, "timeout": 1.0}
    again = plainly(planned(body=body, manner=Manner("slow reader", read_pause=1.0)), 99)
    assert json.loads(again.raw) == again.body
    assert again.body["seed"] == 99
    assert again.body["speculation"] == {"num_speculative_tokens": 0}
    assert not again.body.keys() & {"stream", "stream_options", "timeout"}
    assert again.manner == Manner()
    assert again.request_id != planned().request_id


def test_a_few_of_every_feature_are_kept() -> None:
    survivors = Survivors(seed=0)
    for number in range(1, 400):
        rare = frozenset({"rare"}) if number % 100 == 0 else frozenset()
        survivors.offer(replace(planned(), number=number, features=frozenset({"stream"}) | rare), answered())
    features = [pair[0].features for pair in survivors.sample]
    assert sum("rare" in found for found in features) == PER_FEATURE
    assert PER_FEATURE <= len(features) <= 2 * PER_FEATURE


def test_what_came_late_has_the_chance_of_what_came_early() -> None:
    numbers = [pair[0].number for seed in range(40) for pair in _kept_of(seed)]
    assert 0.3 < sum(number > 50 for number in numbers) / len(numbers) < 0.7


def _kept_of(seed: int) -> list[tuple[Planned, Answered]]:
    survivors = Survivors(seed)
    for number in range(1, 101):
        survivors.offer(replace(planned(), number=number), answered())
    return survivors.sample
