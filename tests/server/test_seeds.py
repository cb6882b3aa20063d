"""Seeds over the wire: mixed traffic, unseeded requests, and choices that can be replayed one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from specdec.noise import mix_seed
from tests.server.builders import MODEL_NAME
from tests.server.test_completions import PROMPT, complete, ids_of

PLAIN = {"max_tokens": 12, "return_token_ids": True, "ignore_eos": True}


def at_once(base: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def post(body: dict[str, Any]) -> dict[str, Any]:
        response = httpx.post(f"{base}/v1/completions", json={"model": MODEL_NAME, **body}, timeout=60, trust_env=False)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(post, bodies))


@pytest.mark.case("V 9441")
def test_seeded_and_greedy_requests_beside_unseeded_ones_equal_themselves_alone(base: str, http: httpx.Client) -> None:
    kinds: list[dict[str, Any]] = [{"seed": 4}, {}, {"temperature": 0}, {"seed": 5, "top_p": 0.9, "min_p": 0.01}]
    bodies = [{"prompt": PROMPT[i % 4 :] * (1 + i % 3), **PLAIN, **kinds[i % 4]} for i in range(16)]
    for body, answer in zip(bodies, at_once(base, bodies), strict=True):
        # What an unseeded request drew is in its answer, so it can be asked again too.
        again = complete(http, **{**body, "seed": answer["seed"]})
        assert ids_of(answer) == ids_of(again), body


@pytest.mark.case("V 6038")
def test_64_requests_without_a_seed_are_not_all_alike(base: str) -> None:
    answers = at_once(base, [{"prompt": PROMPT, **PLAIN}] * 64)
    assert len({answer["seed"] for answer in answers}) == 64
    assert len({tuple(ids_of(answer)[0]) for answer in answers}) > 48


@pytest.mark.case("sglang-jax 1103")
def test_each_of_n_sampled_choices_is_replayable_alone(http: httpx.Client) -> None:
    many = complete(http, seed=21, n=4, temperature=1, **PLAIN)
    assert len({tuple(ids) for ids in ids_of(many)}) == 4
    for j, ids in enumerate(ids_of(many)):
        seed = mix_seed(21, j)
        signed = seed - 2**64 if seed >= 2**63 else seed  # over the wire a seed is a signed integer
        assert ids_of(complete(http, seed=signed, temperature=1, **PLAIN)) == [ids]
