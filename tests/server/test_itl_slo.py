"""``--itl-slo``: a long prompt is taken in by small chunks beside a stream, and in large ones alone."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx

from scheduler.pace import LEAST_PROMPT_ROWS
from scheduler.stats import StepRecord
from tests.server.builders import MODEL_NAME, build_service, running, save_tiny_model

LONG = "a b c d e f g h " * 12


def test_a_prompt_beside_a_stream_is_cut_as_the_bound_asks_and_its_answer_is_the_same(tmp_path: Path) -> None:
    service = build_service(save_tiny_model(tmp_path / "model"), tmp_path / "home", itl_slo=1e-9)
    records: list[StepRecord] = []
    decoding = threading.Event()

    def hear(record: StepRecord) -> None:
        records.append(record)
        if record.num_decode_tokens:
            decoding.set()

    with running(service) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        service.engine.on_step = hear

        def answer(body: dict[str, object]) -> str:
            choices = client.post("/v1/completions", json=body).json()["choices"]
            return str(choices[0]["text"])

        question = {"model": MODEL_NAME, "prompt": LONG, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        alone = answer({**question, "cache_salt": "alone"})
        assert max(record.num_prefill_tokens for record in records) > LEAST_PROMPT_ROWS
        beside = {"model": MODEL_NAME, "prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
        decoding.clear()
        with client.stream("POST", "/v1/completions", json=beside) as stream:
            assert decoding.wait(60)
            records.clear()
            text = answer({**question, "cache_salt": "beside"})
            shared = [record for record in records if record.num_decode_tokens and record.num_prefill_tokens]
            stream.read()
    assert text == alone
    assert len(shared) > 3
    assert max(record.num_prefill_tokens for record in shared) <= LEAST_PROMPT_ROWS
