"""A server with --ledger: a violation fails the requests of its step, says so in the log, and the server goes on."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import httpx
import pytest

from kvcache.ledger import Ledger
from server.logs import JsonFormatter
from server.service import Service
from tests.server.builders import MODEL_NAME, build_service, running

BODY = {"model": MODEL_NAME, "prompt": "the quick brown fox", "max_tokens": 6, "ignore_eos": True}


def ledger_of(service: Service) -> Ledger | None:
    return service.engine._step._ledger  # type: ignore[attr-defined, no-any-return]


def test_it_is_on_in_tests_and_off_by_default(
    tiny_model: Path, model_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ledger_of(build_service(tiny_model, model_home)) is not None
    monkeypatch.delenv("TRUEDRAFT_LEDGER")
    service = build_service(tiny_model, model_home)
    assert not service.settings.ledger
    assert ledger_of(service) is None


def test_a_violation_fails_its_requests_and_no_others(
    tiny_model: Path, model_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = build_service(tiny_model, model_home, ledger=True, block_size=4)
    ledger = ledger_of(service)
    assert ledger is not None
    with running(service) as base, httpx.Client(base_url=base, timeout=60) as client:
        before = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        assert ledger.positions_checked > 0
        ledger._token[:] += 1  # whatever is cached has changed, for all that the ledger knows
        with caplog.at_level(logging.ERROR):
            failed = client.post("/v1/completions", json={**BODY, "prompt": BODY["prompt"] + " jumps over the lazy"})
        assert failed.status_code == 500
        assert "LedgerError" in failed.json()["error"]["message"]
        (record,) = [record for record in caplog.records if record.name == "specdec.ledger_hook"]
        line = json.loads(JsonFormatter().format(record))
        assert line["ledger_kind"] == "wrong token"
        assert {"ledger_step", "ledger_seq_id", "ledger_position", "ledger_block", "ledger_slot"} <= line.keys()
        assert {"ledger_expected", "ledger_found"} <= line.keys()
        other = client.post("/v1/completions", json={**BODY, "prompt": "0 1 2 3"})
        assert other.status_code == 200
        assert client.get("/health").status_code == 200
        ledger._token[:] -= 1
        assert client.post("/v1/completions", json=BODY).status_code == 200
    assert before
