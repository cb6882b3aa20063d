"""The mix holds everything that a soak is for, asks rightly, and is the same for the same seed."""

from __future__ import annotations

import json

import pytest

from bench.soak.command import MUST_HAPPEN
from bench.soak.requests import CHAT, COMPLETIONS, Facts, Mix, Planned
from server.chat.schema import parse_chat
from server.errors import APIError
from server.schemas import parse_completion

FACTS = Facts("tiny", 331, 1024, 8, ("auto", "ngram", "suffix"))


def plans(count: int = 1500, seed: int = 0) -> list[Planned]:
    mix = Mix(FACTS, seed)
    return [mix.next() for _ in range(count)] + [mix.burst(), mix.stuck()]


def parse(planned: Planned) -> None:
    (parse_chat if planned.path == CHAT else parse_completion)(json.loads(planned.raw))


def test_the_same_seed_gives_the_same_requests() -> None:
    assert plans(100) == plans(100)
    assert plans(100) != plans(100, seed=1)


def test_everything_that_must_happen_is_asked_for() -> None:
    features = {feature for planned in plans() for feature in planned.features}
    kinds = ("answered ", "replayed ", "left ", "cut ", "refused ", "late ")
    wanted = {name.partition(" ")[2] for name in MUST_HAPPEN if name.startswith(kinds)}
    assert wanted <= features


def test_numbers_are_given_once() -> None:
    numbers = [planned.number for planned in plans()]
    assert len(set(numbers)) == len(numbers)


def test_well_formed_requests_are_well_formed() -> None:
    for planned in plans():
        if planned.expected is None:
            assert planned.path in (COMPLETIONS, CHAT)
            parse(planned)


def test_some_requests_have_to_be_refused_before_anything_is_known_of_the_model() -> None:
    refused = 0
    for planned in plans():
        if planned.expected == 400 and planned.method == "POST" and planned.raw.endswith(b"}"):
            try:
                parse(planned)
            except APIError as error:
                assert error.status == 400
                refused += 1
    assert refused > 5


def test_grammars_come_without_what_could_leave_them_no_token() -> None:
    for planned in plans():
        if planned.features & {"grammars", "forced tools", "tools"}:
            forbidden = {"min_tokens", "bad_words", "allowed_token_ids", "ignore_eos"}
            assert not planned.body.keys() & forbidden, planned.body


@pytest.mark.parametrize("field", ["model", "max_tokens"])
def test_a_request_of_ones_own_is_of_the_model(field: str) -> None:
    own = Mix(FACTS, 0).own(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    assert own.body[field] == {"model": "tiny", "max_tokens": 1}[field]
    assert own.expected is None
