"""Audits of a live server under load: none differs, and a planted fault is found."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.batch import PackedBatch
from model.interface import Executor, ForwardOutput
from model.wrapped import WrappedExecutor
from server.audits import ids_sha256
from server.service import Service
from tests.server.builders import MODEL_NAME, build_service, metric, running
from tests.server.test_disconnect import assert_idle, wait_for

AT_ONCE = 16
EXTRAS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "speculation": {"num_speculative_tokens": 4}},  # drafted whether or not it pays
    {"temperature": 0, "stop": ["e", "th"]},
    {"temperature": 1, "logprobs": 2},
    {"top_p": 0.8, "frequency_penalty": 0.5},
    {"min_p": 0.05, "logit_bias": {"40": 3}, "n": 3},
    {"repetition_penalty": 1.2, "min_tokens": 1, "n": 2},
    {"temperature": 0, "echo": True, "logprobs": 0},
    {"prompt_logprobs": 1, "n": 2},
    {"top_k": 20, "temperature": 1.5, "prompt": ["the quick", "the quick brown"]},
    {"structured_outputs": {"regex": "the ([a-z]{1,5} ){1,4}[0-9]"}, "speculation": {"num_speculative_tokens": 4}},
)
# Without what would tell of a wrong draft in another way, or keep it from coming.
WITHOUT_LOGPROBS = tuple(
    extras for extras in EXTRAS if not {"logprobs", "prompt_logprobs", "structured_outputs"} & set(extras)
)


class AcceptsWrongDrafts(WrappedExecutor):
    """An executor with a fault: in every fourth verify forward, the first draft looks right to the target."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.num_verified = self.num_wrong = 0

    def forward(self, batch: PackedBatch, **options: Any) -> ForwardOutput:
        output = super().forward(batch, **options)
        if options.get("num_layers") is not None:
            return output  # of a drafter
        rows, starts = batch.logits_rows.tolist(), set(batch.row_starts.tolist())
        pairs = [i for i in range(len(rows) - 1) if rows[i + 1] == rows[i] + 1 and rows[i + 1] not in starts]
        if pairs:
            self.num_verified += 1
            if self.num_verified % 4 == 0:
                self.num_wrong += 1
                logits = output.logits.clone()
                logits[pairs[0], batch.input_ids[rows[pairs[0]] + 1]] = logits.max() + 100
                return replace(output, logits=logits)
        return output


def body(rng: random.Random, seed: int, kinds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Prompts begin alike, so that prefixes are shared, and repeat, so that drafts are right at times."""
    prompt = [70 + i % 9 for i in range(rng.choice((1, 17, 40)))] + [rng.randrange(3, 300) for _ in range(5)] * 2
    fixed = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": rng.choice((1, 6, 12, 18)), "seed": seed}
    stream = {"stream": True} if rng.random() < 0.4 else {}
    extras = rng.choice(kinds)
    return fixed | ({} if "prompt_logprobs" in extras else stream) | extras


async def load(base: str, seeds: range, kinds: Sequence[dict[str, Any]] = EXTRAS) -> None:
    """Some leave: the audits are of the others."""
    gate = asyncio.Semaphore(AT_ONCE)
    rng = random.Random(seeds.start)
    async with httpx.AsyncClient(base_url=base, timeout=120, trust_env=False) as client:

        async def one(request: dict[str, Any], leaves: float | None) -> None:
            async with gate:
                try:
                    response = await asyncio.wait_for(client.post("/v1/completions", json=request), leaves)
                    assert response.status_code == 200, response.text
                except TimeoutError:
                    assert leaves is not None

        bodies = [body(rng, seed, kinds) for seed in seeds]
        await asyncio.gather(*(one(b, rng.uniform(0, 0.2) if rng.random() < 0.15 else None) for b in bodies))


def info(base: str) -> dict[str, Any]:
    return httpx.get(f"{base}/v1/server_info").json()["audit"]  # type: ignore[no-any-return]


def wait_for_audits(base: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def none_is_left() -> bool:
        found.update(info(base))
        return found["num_waiting"] + found["num_running"] == 0

    wait_for(none_is_left, "audits are left")
    return found


AUDITED: dict[str, Any] = {
    "audit_rate": 1.0,
    "audit_blocks": 128,
    "audit_max_waiting": 10_000,
    "audit_max_waiting_tokens": 10_000_000,
}


@pytest.fixture(scope="module")
def audited(tiny_model: Path, model_home: Path) -> Service:
    # What is served by default. The generic executor, three times as slow here, has its audits in the other tests.
    return build_service(tiny_model, model_home, executor="fused", **AUDITED)


def test_500_audits_of_a_server_under_load_find_nothing(audited: Service) -> None:
    with running(audited) as base:
        seeds = 0
        found: dict[str, Any] = {"results": {}}
        while sum(found["results"].values()) < 500:
            count = 40 if seeds else 340
            asyncio.run(load(base, range(seeds, seeds + count)))
            seeds += count
            found = wait_for_audits(base)
        assert found["results"] == {"match": found["results"]["match"], "near_tie": 0, "mismatch": 0, "dropped": 0}
        assert found["enabled"]
        ended = sum(metric(base, "request_success_total", finished_reason=reason) for reason in ("stop", "length"))
        assert found["results"]["match"] == ended
        assert metric(base, "equivalence_audits_total", result="match") == ended
        assert metric(base, "equivalence_audit_tokens_total") == found["num_rows"] > 0
        assert metric(base, "spec_decode_num_accepted_tokens_total") > 0
        assert metric(base, "prefix_cache_hits_total") > 0
        assert_idle(base)
        assert metric(base, "kv_blocks", state="free") + metric(base, "kv_blocks", state="cached") == 256
    assert not audited.engine.scheduler.has_work
    audited.engine.scheduler.check_integrity()


@pytest.fixture
def log_lines() -> Iterator[list[logging.LogRecord]]:
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    logger = logging.getLogger("truedraft.audit")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_a_planted_fault_is_found_logged_without_ids_and_stored_for_replay(
    tiny_model: Path,
    model_home: Path,
    tmp_path: Path,
    log_lines: list[logging.LogRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.audits.FIRST_LINES", 10_000)
    made: list[AcceptsWrongDrafts] = []

    def wrap(executor: Executor) -> Executor:
        made.append(AcceptsWrongDrafts(executor))
        return made[0]

    store = tmp_path / "audits"
    # Drafts that a controller leaves out would not be accepted wrongly.
    fixed = {"drafter": "ngram", "draft_length": "fixed", "num_speculative_tokens": 4}
    service = build_service(
        tiny_model, model_home, wrap=wrap, **AUDITED, **fixed, audit_store=store, audit_store_files=3
    )
    with running(service) as base:
        asyncio.run(load(base, range(80), WITHOUT_LOGPROBS))
        found = wait_for_audits(base)
        assert made[0].num_wrong > 0
        mismatches = metric(base, "equivalence_audits_total", result="mismatch")
        assert mismatches == found["results"]["mismatch"] > 0
        assert found["results"]["match"] > 0
    assert len(log_lines) == mismatches
    files = sorted(store.iterdir())
    assert 1 <= len(files) <= 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    by_name = {vars(line)["record"]: vars(line) for line in log_lines}
    for file in files:
        record, line = json.loads(file.read_text()), by_name[file.name]
        assert record["what"] == "token_ids"
        at = record["position"]
        assert record["token_ids"][:at] == record["rerun_token_ids"][:at]
        assert record["token_ids"][at] != record["rerun_token_ids"][at]
        assert record["gap"] > 0
        assert line["levelname"] == "ERROR"
        assert (line["position"], line["seed"]) == (at, record["params"]["seed"])
        assert line["output_sha256"] == ids_sha256(record["token_ids"])
        assert line["rerun_sha256"] == ids_sha256(record["rerun_token_ids"])
        assert line["prompt_sha256"] == ids_sha256(record["prompt_token_ids"])
        assert line["system_fingerprint"] == record["system_fingerprint"] == service.fingerprint
        assert str(record["token_ids"][:3])[1:-1] not in str(line)


def test_without_audits_nothing_is_set_aside(service: Service, base: str) -> None:
    assert info(base) == {"rate": 0.0}
    assert service.engine.scheduler.audit_status is None
    assert httpx.get(f"{base}/v1/server_info").json()["kv_cache"]["audit_blocks"] == 0
    assert metric(base, "equivalence_audits_total") == 0
