"""Length caps, stops and masks hold at every place of an accepted run, with speculation on as off."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from specdec.drafters.synthetic import OracleDrafter, WrongDrafter
from specdec.params import SamplingParams
from tests.specdec.builders import VOCAB, Bench, Result, alone, outputs, prompts

K = 4
PROMPT = [4, 9, 4, 9, 4]
GREEDY = SamplingParams(seed=7, temperature=0.0, max_tokens=30, logprobs=2)
SAMPLED = replace(GREEDY, temperature=1.0)


def oracle(truth: dict[int, list[int]], wrong: float = 0.0) -> OracleDrafter | WrongDrafter:
    inner = OracleDrafter(truth)
    return WrongDrafter(inner, 3, VOCAB, error_rate=wrong) if wrong else inner


def facts(result: Result) -> tuple[object, ...]:
    return (result.token_ids, result.logprobs, result.finish_reason, result.stop_token_id, result.error)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("offset", range(2 * K + 3))
@pytest.mark.parametrize("wrong", [0.0, 0.4])
@pytest.mark.case("V 16087")
def test_max_tokens_is_met_exactly_at_every_offset(params: SamplingParams, offset: int, wrong: float) -> None:
    long = alone(PROMPT, params).token_ids
    capped = replace(params, max_tokens=offset)
    found = outputs([PROMPT], capped, drafter=oracle({0: long}, wrong), k=K)[0]
    assert found.token_ids == long[:offset]
    assert found.finish_reason == "length"
    assert facts(found) == facts(alone(PROMPT, capped))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("offset", range(2 * K + 3))
@pytest.mark.case("V 16087")
def test_the_context_limit_is_met_exactly_at_every_offset(params: SamplingParams, offset: int) -> None:
    long = alone(PROMPT, params).token_ids
    limit = len(PROMPT) + offset
    # Only as many blocks as the limit needs: nothing may reach beyond it.
    bench = Bench(drafter=oracle({0: long}), k=K, max_model_len=limit, block_size=1, num_blocks=limit + K)
    bench.add(PROMPT, params)
    found = bench.run()[0]
    assert found.token_ids == long[:offset]
    assert found.finish_reason == "length"
    for step in bench.steps:
        assert step.stats.num_rows <= limit


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("index", range(10))
@pytest.mark.case("V 47616")
def test_a_stop_token_trims_ids_and_logprobs_wherever_it_falls(
    params: SamplingParams, wrong: float, index: int
) -> None:
    long = alone(PROMPT, params).token_ids
    stopping = replace(params, stop_token_ids=frozenset({long[index], VOCAB + 5}))
    first = long.index(long[index])
    found = outputs([PROMPT], stopping, drafter=oracle({0: long}, wrong), k=K)[0]
    assert found.token_ids == long[: first + 1]
    assert found.finish_reason == "stop"
    assert found.stop_token_id == long[index] == found.token_ids[-1]
    assert len(found.logprobs) == first + 1
    assert facts(found) == facts(alone(PROMPT, stopping))


RESTRICTED = {
    "min_tokens": replace(SAMPLED, min_tokens=9, stop_token_ids=frozenset(range(0, VOCAB, 2))),
    "allowed ids": replace(SAMPLED, allowed_token_ids=(3, 8, 9, 20, 21)),
    "bad token": replace(GREEDY, bad_words=((4,), (9,))),
    "bad run": replace(SAMPLED, allowed_token_ids=(3, 4, 9), bad_words=((4, 9), (3, 3, 3), (9, 4, 3))),
    "bias": replace(SAMPLED, logit_bias=((11, 4.0), (25, -100.0))),
}


def honoured(name: str, output: list[int]) -> bool:
    text = PROMPT + output
    if name == "min_tokens":
        return all(token % 2 for token in output[:9])
    if name == "allowed ids":
        return set(output) <= {3, 8, 9, 20, 21}
    if name == "bad token":
        return not {4, 9} & set(output)
    if name == "bias":
        return 25 not in output
    return not any(
        tuple(text[end - len(word) : end]) == word
        for word in RESTRICTED[name].bad_words
        for end in range(len(PROMPT) + 1, len(text) + 1)
    )


@pytest.mark.parametrize("name", RESTRICTED)
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.case("V 31982")
def test_restrictions_hold_on_accepted_recovered_and_bonus_tokens(name: str, wrong: float) -> None:
    params = RESTRICTED[name]
    plain = alone(PROMPT, params)
    bench = Bench(drafter=oracle({0: plain.token_ids}, wrong), k=K)
    bench.add(PROMPT, params)
    found = bench.run()[0]
    assert facts(found) == facts(plain)
    assert honoured(name, found.token_ids)
    assert not honoured(name, alone(PROMPT, SAMPLED).token_ids) or name in ("bias", "bad run")
    if wrong == 0.0:  # every row of these was an accepted draft, or the bonus token
        assert max(found.accepted) == K
    if wrong == 1.0:  # and of these the recovered token
        assert sum(found.accepted) == 0


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.case("V 31982")
def test_min_p_holds_on_accepted_recovered_and_bonus_tokens(wrong: float) -> None:
    params = replace(SAMPLED, min_p=0.2, logprobs=1)
    plain = alone(PROMPT, params)
    found = outputs([PROMPT], params, drafter=oracle({0: plain.token_ids}, wrong), k=K)[0]
    assert facts(found) == facts(plain)
    assert all(entry.logprob - entry.top[0][1] >= math.log(0.2) - 1e-9 for entry in found.logprobs)
    free = alone(PROMPT, replace(params, min_p=0.0))  # the filter has something to do
    assert any(entry.logprob - entry.top[0][1] < math.log(0.2) for entry in free.logprobs)


def test_the_unrestricted_model_would_break_the_bias_and_the_bad_run() -> None:
    assert any(
        25 in result.token_ids for result in outputs(prompts(12), replace(SAMPLED, logit_bias=((11, 4.0),))).values()
    )
    free = alone(PROMPT, replace(RESTRICTED["bad run"], bad_words=()))
    assert not honoured("bad run", free.token_ids)
