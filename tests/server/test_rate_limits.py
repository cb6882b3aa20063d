"""Rate limits on a real server: 429 before anything is computed, and what was not used comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from server.auth.keys import load_keys
from server.rate import Bucket
from server.service import Service
from tests.server.builders import MODEL_NAME, build_service
from tests.server.fixtures import server_fixtures
from tests.server.test_disconnect import wait_for

TOKENS = 120


@pytest.fixture(scope="module")
def service(tiny_model: Path, model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Service:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"alice ka\nbob kb\ncarol kc tokens=none requests=60\ndave kd tokens={TOKENS}\n")
    return build_service(tiny_model, model_home, keys=load_keys(file, {}), rate_limit_tokens=TOKENS)


base, http = server_fixtures("module")


def tokens_of(service: Service, name: str) -> Bucket:
    bucket = service.limiter._accounts[name].tokens
    assert bucket is not None
    return bucket


@pytest.fixture(autouse=True)
def _full_and_without_inflow(service: Service) -> None:
    for name in ("alice", "bob", "dave"):
        bucket = tokens_of(service, name)
        bucket._clock = lambda: 0.0
        bucket._filled, bucket._level = 0.0, float(TOKENS)
        bucket._line.clear()


def send(http: httpx.Client, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    body = {"model": MODEL_NAME, "ignore_eos": True, **body}
    if path.endswith("completions") and "messages" not in body:
        body = {"prompt": [1, 2, 3], **body}
    return http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize("stream", [False, True])
def test_more_than_a_minutes_tokens_is_429_before_the_200_and_other_keys_do_not_notice(
    http: httpx.Client, service: Service, stream: bool
) -> None:
    assert send(http, "ka", max_tokens=100).status_code == 200
    refused = send(http, "ka", max_tokens=100, stream=stream)
    assert refused.status_code == 429
    assert refused.headers["content-type"] == "application/json"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
    assert send(http, "kb", max_tokens=100, stream=stream).status_code == 200


def test_what_was_taken_is_the_prompt_and_all_choices_and_what_is_charged_is_what_was_used(
    http: httpx.Client, service: Service
) -> None:
    # Stops at once: one token of the 2 x 50.
    answer = send(http, "ka", max_tokens=50, n=2, ignore_eos=False, stop_token_ids=list(range(300)), seed=1).json()
    used = answer["usage"]["total_tokens"]
    assert used < 3 + 2 * 50
    wait_for(lambda: service.limiter.num_charged == 0, "the charge was not settled")
    assert tokens_of(service, "alice").level == pytest.approx(TOKENS - used)


def test_a_client_that_leaves_pays_for_what_was_generated_and_no_more(http: httpx.Client, service: Service) -> None:
    body = {"model": MODEL_NAME, "prompt": [1, 2, 3], "max_tokens": 110, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers={"Authorization": "Bearer ka"}) as response:
        next(response.iter_lines())
    wait_for(lambda: service.limiter.num_charged == 0, "the charge was not settled")
    assert 0 < TOKENS - tokens_of(service, "alice").level <= 113


def test_a_request_that_could_never_be_taken_is_400_and_says_why(http: httpx.Client, service: Service) -> None:
    for body in ({"max_tokens": TOKENS}, {"max_tokens": 50, "n": 3}, {"prompt": [[1]] * 3, "max_tokens": 50}):
        refused = send(http, "kd", **body)
        assert refused.status_code == 400
        assert f"{TOKENS} a minute" in refused.json()["error"]["message"]
        assert "retry-after" not in refused.headers
    assert tokens_of(service, "dave").level == TOKENS


def test_a_request_that_is_refused_for_other_reasons_is_not_charged(http: httpx.Client, service: Service) -> None:
    assert send(http, "kd", max_tokens=5, temperature=7).status_code == 400
    assert send(http, "kd", max_tokens=5, prompt="").status_code == 400
    assert send(http, "wrong", max_tokens=5).status_code == 401
    assert tokens_of(service, "dave").level == TOKENS
    assert service.limiter.num_charged == 0


def test_refusals_are_counted_by_reason(http: httpx.Client) -> None:
    def counts() -> dict[str, float]:
        text = http.get("/metrics", headers={"Authorization": "Bearer kb"}).text
        return {
            reason: float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            for reason in ("rate_limit_requests", "rate_limit_tokens", "rate_limit_size")
            if line.startswith("truedraft_admission_rejections_total{") and f'reason="{reason}"' in line
        }

    before = counts()
    send(http, "ka", max_tokens=TOKENS)
    send(http, "ka", max_tokens=100)
    send(http, "ka", max_tokens=100)
    after = counts()
    assert {reason: after[reason] - before[reason] for reason in after} == {
        "rate_limit_requests": 0,
        "rate_limit_tokens": 1,
        "rate_limit_size": 1,
    }


def test_the_openai_client_waits_as_long_as_it_is_told_and_succeeds(base: str, service: Service) -> None:
    bucket = service.limiter._accounts["carol"].requests
    assert bucket is not None
    while bucket.take(1) == 0:  # 60 a minute: the next comes within a second
        pass
    with openai.OpenAI(base_url=f"{base}/v1", api_key="kc", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL_NAME, prompt="a", max_tokens=1)
        assert caught.value.code == "rate_limit_exceeded"
        assert caught.value.response.headers["retry-after"] == "1"
        assert [model.id for model in client.models.list()] == [MODEL_NAME]  # reading costs nothing
    with openai.OpenAI(base_url=f"{base}/v1", api_key="kc") as client:
        assert client.completions.create(model=MODEL_NAME, prompt="a", max_tokens=1).usage


def test_bodies_of_refused_posts_are_not_read(http: httpx.Client, service: Service) -> None:
    bucket = service.limiter._accounts["carol"].requests
    assert bucket is not None
    bucket._level = -60.0
    refused = http.post("/v1/completions", content=b"{", headers={"Authorization": "Bearer kc"})
    assert refused.status_code == 429
    assert 60 <= int(refused.headers["retry-after"]) <= 61
    bucket._level = 60.0
