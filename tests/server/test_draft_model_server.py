"""A server whose model has a draft model and drafts with its first layers: the same answers, told who drafted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from model.loader import load_model
from server.assemble import assemble
from server.cli import main
from server.service import Service
from server.speculating import load_draft, report_idle_exit
from tests.server.builders import MODEL_NAME, build_settings, byte_fallback_tokenizer, metric, running, save_tiny_model

DRAFTERS = ["auto", "ngram", "suffix", "model", "exit"]
K = 4


@pytest.fixture(scope="module")
def drafting(tiny_model: Path, model_home: Path) -> Service:
    """The tiny model as its own draft model, and its first layer as a third drafter."""
    settings = build_settings(
        draft_model=str(tiny_model),
        exit_layers=1,
        num_speculative_tokens=K,
        executor="generic",
        kernels="torch",
        audit_rate=1.0,
    )
    loaded = load_model(
        tiny_model, executor="generic", kernels="torch", num_threads=1, max_batched_tokens=128, home=model_home
    )
    draft = load_draft(settings, loaded, lambda line: None)
    assert draft is not None
    return assemble(settings, loaded, settings.served_model_name or (), draft)


@pytest.fixture(scope="module")
def url(drafting: Service) -> Iterator[str]:
    with running(drafting) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, speculation: dict[str, Any] | None, **body: Any) -> openai.types.Completion:
    extra = {"return_token_ids": True, "ignore_eos": True, "speculation": speculation}
    options: dict[str, Any] = {"prompt": "the quick brown", "max_tokens": 16, "seed": 5, "logprobs": 1, **body}
    answer: openai.types.Completion = client.completions.create(model=MODEL_NAME, extra_body=extra, **options)
    return answer


def facts(answer: openai.types.Completion) -> list[Any]:
    return [
        (choice.text, choice.finish_reason, choice.logprobs, choice.token_ids)  # type: ignore[attr-defined]
        for choice in answer.choices
    ]


@pytest.mark.parametrize(
    "body",
    [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1, "frequency_penalty": 1, "n": 2}],
    ids=str,
)
def test_whoever_drafts_the_answer_is_that_without_speculation(client: openai.OpenAI, body: dict[str, Any]) -> None:
    plain = facts(ask(client, {"num_speculative_tokens": 0}, **body))
    assert facts(ask(client, None, **body)) == plain
    for drafter in DRAFTERS:  # forced: what a controller finds worth drafting follows from the clock
        assert facts(ask(client, {"drafter": drafter, "num_speculative_tokens": 3}, **body)) == plain, drafter


def test_a_request_that_names_a_drafter_gets_its_drafts(url: str, client: openai.OpenAI) -> None:
    def drafted(name: str) -> float:
        return metric(url, "spec_decode_drafter_draft_tokens_total", drafter=name)

    for name in ("model", "exit"):
        others = [other for other in DRAFTERS[1:] if other != name]
        before, of_others = drafted(name), sum(map(drafted, others))
        answer = ask(client, {"drafter": name, "num_speculative_tokens": K}, temperature=0, prompt=f"once {name}")
        spec = answer.metrics["speculative_decoding"]  # type: ignore[attr-defined]
        assert spec["num_draft_tokens"] > 0
        assert drafted(name) - before >= spec["num_draft_tokens"]
        assert sum(map(drafted, others)) == of_others
        if name == "model":  # the target itself
            assert spec["draft_acceptance_rate"] == 1.0


def test_server_info_lists_the_drafters_and_what_their_rounds_cost(url: str) -> None:
    found = httpx.get(f"{url}/v1/server_info", trust_env=False).json()["speculation"]
    assert [drafter["name"] for drafter in found["drafters"]] == DRAFTERS
    assert found["drafter"] == "auto"
    costs = {drafter["name"]: drafter["round_seconds"] for drafter in found["drafters"]}
    assert costs["ngram"] is costs["suffix"] is costs["auto"] is None
    for name in ("model", "exit"):
        assert all(point["seconds"] > 0 for point in costs[name]), costs


def test_audits_of_all_that_was_drafted_find_no_difference(url: str, client: openai.OpenAI) -> None:
    ask(client, {"drafter": "model"}, temperature=1, prompt="one more")
    for result in ("mismatch", "near_tie"):
        assert metric(url, "equivalence_audits_total", result=result) == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"drafter": "exit"}, "the drafter exit never uses it"), ({"num_speculative_tokens": 0}, "speculation is off")],
)
def test_a_draft_model_that_nobody_asks_is_not_loaded_and_that_is_said(
    changes: dict[str, Any], why: str, tiny_model: Path, model_home: Path
) -> None:
    loaded = load_model(tiny_model, executor="generic", kernels="torch", num_threads=1, home=model_home)
    lines: list[str] = []
    assert load_draft(build_settings(draft_model="/nowhere", **changes), loaded, lines.append) is None
    assert lines == [f"--draft-model /nowhere is not loaded: {why}"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"drafter": "suffix"}, "the drafter suffix never uses it"),
        ({"num_speculative_tokens": 0}, "speculation is off"),
    ],
)
def test_first_layers_that_nobody_asks_for_drafts_are_reported(changes: dict[str, Any], why: str) -> None:
    lines: list[str] = []
    report_idle_exit(build_settings(exit_layers=2, **changes), lines.append)
    assert lines == [f"--exit-layers 2 changes nothing: {why}"]


@pytest.mark.parametrize("changes", [{"exit_layers": 2}, {"exit_layers": 2, "drafter": "exit"}, {"drafter": "ngram"}])
def test_first_layers_that_somebody_asks_are_not(changes: dict[str, Any]) -> None:
    lines: list[str] = []
    report_idle_exit(build_settings(**changes), lines.append)
    assert lines == []


@pytest.fixture
def _quiet_start(model_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``serve`` points the log of the whole process at stderr."""
    monkeypatch.setenv("TRUEDRAFT_HOME", str(model_home))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("_quiet_start")
def test_a_draft_model_with_another_tokenizer_is_one_line_and_exit_code_1(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1)
    byte_fallback_tokenizer().backend.save(str(other / "tokenizer.json"))
    flags = ["serve", "--model", str(tiny_model), "--port", "0", "--executor", "generic", "--kernels", "torch"]
    assert main([*flags, "--draft-model", str(other)]) == 1
    shown = capsys.readouterr()
    errors = [line for line in shown.err.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert "other cannot draft for" in errors[0]
    assert "token id" in errors[0]
    assert "Traceback" not in shown.err
