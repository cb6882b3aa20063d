"""An engine in a process of its own behind keys, limits, TLS and audits: all of these hold, and no secret leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.assemble import build_service
from server.auth.keys import KEYS_VARIABLE
from server.rate import Bucket
from server.remote.process import ChildProcess
from server.service import Service
from tests.server.builders import MODEL_NAME, build_settings, running
from tests.server.chat_builders import HELLO, save_chat_model
from tests.server.test_access import bearer
from tests.server.test_disconnect import wait_for
from tests.server.test_tls import CERTIFICATE, ENCRYPTED, PASSWORD, trusting

TOKENS, SMALL = 10_000, 100
ALICE, BOB, CAROL = "key-of-alice", "key-of-bob", "key-of-carol"


@pytest.fixture(scope="module")
def service(tiny_model: Path, model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Service:
    folder = tmp_path_factory.mktemp("access")
    keys = folder / "keys"
    keys.write_text(f"alice {ALICE}\nbob {BOB} tokens={SMALL} requests=1000\n")
    settings = build_settings(
        model=str(save_chat_model(tiny_model, folder / "model")),
        executor="generic",
        kernels="torch",
        engine_process=True,
        api_keys_file=str(keys),
        rate_limit_tokens=TOKENS,
        audit_rate=1.0,
        audit_share=1.0,
        ssl_certfile=str(CERTIFICATE),
        ssl_keyfile=str(ENCRYPTED),
        ssl_keyfile_password=PASSWORD,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRUEDRAFT_HOME", str(model_home))
        patch.setenv("TRUEDRAFT_SSL_KEYFILE_PASSWORD", PASSWORD)
        patch.setenv(KEYS_VARIABLE, f"carol:{CAROL}")
        return build_service(settings, lambda line: None)


@pytest.fixture(scope="module")
def http(service: Service) -> Iterator[httpx.Client]:
    with (
        running(service) as base,
        httpx.Client(base_url=base, verify=trusting(), timeout=60, trust_env=False) as client,
    ):
        yield client


def ask(http: httpx.Client, key: str, **body: Any) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return http.post(path, json={"model": MODEL_NAME, "seed": 1, **body}, headers=bearer(key))


def bucket_of(service: Service, name: str) -> Bucket:
    bucket = service.limiter._accounts[name].tokens
    assert bucket is not None
    return bucket


@pytest.fixture
def still(service: Service) -> Iterator[Callable[[str], float]]:
    """The content of a key's bucket, into which nothing flows meanwhile."""
    clocks = {}
    for name in ("alice", "bob", "carol"):
        bucket = bucket_of(service, name)
        clocks[bucket] = bucket._clock
        bucket._line.clear()
        bucket._level, bucket._clock = float(bucket.capacity), lambda now=bucket._filled: now
    yield lambda name: bucket_of(service, name).level
    for bucket, clock in clocks.items():
        bucket._clock = clock


def test_only_who_has_a_key_gets_in(http: httpx.Client) -> None:
    assert http.get("/live").status_code == http.get("/health").status_code == 200
    assert http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "a"}).status_code == 401
    assert http.get("/metrics").status_code == 401
    for key in (ALICE, BOB, CAROL):
        assert ask(http, key, prompt="a", max_tokens=2).status_code == 200
    assert ask(http, ALICE + "x", prompt="a").status_code == 401


def test_keys_share_no_block(http: httpx.Client) -> None:
    prompt = "one two three four five six seven eight nine ten eleven twelve"

    def cached(key: str) -> int:
        usage = ask(http, key, prompt=prompt, max_tokens=1).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(ALICE) == 0
    assert cached(ALICE) > 0
    assert cached(CAROL) == 0


def test_a_key_pays_for_what_was_used(http: httpx.Client, service: Service, still: Callable[[str], float]) -> None:
    used = 0
    for body in (
        {"prompt": "a", "max_tokens": 9},
        {"prompt": ["a", "b"], "n": 2, "max_tokens": 5, "stream": False},
        {"prompt": "a", "max_tokens": 100, "structured_outputs": {"regex": "[ab]{3}"}},
        {"messages": HELLO, "max_tokens": 5},
    ):
        answer = ask(http, ALICE, **body)
        assert answer.status_code == 200, answer.text
        used += answer.json()["usage"]["total_tokens"]
    wait_for(lambda: service.limiter.num_charged == 0, "a charge is left")
    assert still("alice") == TOKENS - used
    assert still("carol") == TOKENS


@pytest.mark.parametrize("stream", [False, True])
def test_who_has_used_up_a_minute_is_refused_before_the_answer(
    http: httpx.Client, service: Service, still: Callable[[str], float], stream: bool
) -> None:
    assert ask(http, BOB, prompt="a", max_tokens=SMALL - 10, ignore_eos=True).status_code == 200
    refused = ask(http, BOB, prompt="a", max_tokens=50, stream=stream)
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    assert ask(http, ALICE, prompt="a", max_tokens=50).status_code == 200
    wait_for(lambda: service.limiter.num_charged == 0, "a charge is left")


def test_who_leaves_pays_for_what_was_generated(
    http: httpx.Client, service: Service, still: Callable[[str], float]
) -> None:
    body = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers=bearer(ALICE)) as response:
        next(response.iter_raw())
    wait_for(lambda: service.limiter.num_charged == 0, "a charge is left")
    assert TOKENS - 400 < still("alice") < TOKENS


def test_audits_of_all_keys_find_no_difference(http: httpx.Client) -> None:
    for key in (ALICE, CAROL):
        assert ask(http, key, prompt="the quick", max_tokens=20, temperature=1).status_code == 200

    def told() -> dict[str, Any]:
        audit: dict[str, Any] = http.get("/v1/server_info", headers=bearer(ALICE)).json()["audit"]
        return audit

    wait_for(lambda: told()["num_waiting"] == told()["num_running"] == 0, "audits do not end")
    results = told()["results"]
    assert results["match"] > 0
    assert results["mismatch"] == results["near_tie"] == 0


def test_no_secret_is_with_the_engine(service: Service) -> None:
    child: ChildProcess = service.engine._process  # type: ignore[attr-defined]
    seen = b"".join((Path("/proc") / str(child.pid) / name).read_bytes() for name in ("environ", "cmdline"))
    for secret in (ALICE, CAROL, PASSWORD, KEYS_VARIABLE, "SSL_KEYFILE_PASSWORD"):
        assert secret.encode() not in seen
