"""``truedraft replay``: what a user saved is understood as the server understood it, and compared choice by choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.replay.command import run
from bench.replay.record import AuditRecord, SavedPair, read_record
from bench.replay.replay import replay
from model.loader import LoadedModel, load_model
from scheduler.audit import AuditCase, AuditFinding
from scheduler.request import ChoiceSpec, ChoiceTiming, EngineRequest
from server.assemble import assemble
from server.audits import AuditReporter, params_from_json, params_to_json
from server.cli import build_parser
from server.commands import CommandError
from server.service import Service
from specdec.params import SamplingParams
from tests.server.builders import MODEL_NAME, build_settings, running, save_tiny_model, sse_events

PROMPT = "the quick brown fox jumps over the lazy dog. the quick"
BODIES: dict[str, dict[str, Any]] = {
    "unseeded, with ids": {"return_token_ids": True},
    "unseeded, text alone": {},
    "seeded, n of 2, logprobs": {"seed": -5, "n": 2, "logprobs": 2, "return_token_ids": True},
    "several prompts, penalties": {"prompt": [PROMPT, "def main"], "frequency_penalty": 0.7, "return_token_ids": True},
    "greedy, ends by a stop string": {"temperature": 0, "stop": ["e"], "max_tokens": 64, "return_token_ids": True},
    "best of 3": {"best_of": 3, "n": 2, "return_token_ids": True},
    "echo": {"echo": True, "logprobs": 0},
    "streamed": {"stream": True, "n": 2, "return_token_ids": True},
    "streamed, text and usage": {"stream": True, "stream_options": {"include_usage": True}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    home = tmp_path_factory.mktemp("home")
    return load_model(folder, executor="generic", num_threads=1, max_batched_tokens=128, home=home)


@pytest.fixture(scope="module")
def fresh(loaded: LoadedModel) -> Callable[[], Service]:
    return lambda: assemble(build_settings(), loaded, (MODEL_NAME,))


@pytest.fixture(scope="module")
def saved(fresh: Callable[[], Service]) -> dict[str, dict[str, Any]]:
    """What a client keeps of each request and its answer."""
    pairs = {}
    with running(fresh()) as base, httpx.Client(base_url=base, timeout=60, trust_env=False) as client:
        for name, extras in BODIES.items():
            body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 12, **extras}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            pairs[name] = {
                "request": body,
                "response": sse_events(answer.content) if body.get("stream") else answer.json(),
            }
    return pairs


def write(path: Path, record: object) -> Path:
    file = path / "record.json"
    file.write_text(json.dumps(record), "utf-8")
    return file


def said(service: Service, file: Path, *, plain: bool = False) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return replay(service, read_record(file), plain=plain, say=lines.append), lines


@pytest.mark.parametrize("plain", [False, True], ids=["speculating", "plain"])
@pytest.mark.parametrize("name", BODIES)
def test_a_saved_answer_is_reproduced(
    name: str, plain: bool, saved: dict[str, dict[str, Any]], fresh: Callable[[], Service], tmp_path: Path
) -> None:
    same, lines = said(fresh(), write(tmp_path, saved[name]), plain=plain)
    assert same, lines
    assert lines[0].startswith("the fingerprint is the record's: fp_")
    assert len(lines) == 1 + len(BODIES[name].get("prompt", [0])) * BODIES[name].get("n", 1)


def test_every_chunk_and_every_answer_says_seed_and_fingerprint(saved: dict[str, dict[str, Any]]) -> None:
    for pair in saved.values():
        pieces = pair["response"] if isinstance(pair["response"], list) else [pair["response"]]
        assert len({(piece["seed"], piece["system_fingerprint"]) for piece in pieces}) == 1


def _other_id(pair: dict[str, Any]) -> None:
    pair["response"]["choices"][0]["token_ids"][3] += 1


def _one_id_less(pair: dict[str, Any]) -> None:
    pair["response"]["choices"][0]["token_ids"].pop()


def _other_end(pair: dict[str, Any]) -> None:
    pair["response"]["choices"][0]["finish_reason"] = "stop"


def _other_text(pair: dict[str, Any]) -> None:
    choice = pair["response"]["choices"][0]
    del choice["token_ids"]
    choice["text"] = choice["text"][:3] + "\0" + choice["text"][4:]


def _other_seed(pair: dict[str, Any]) -> None:
    pair["response"]["seed"] += 1


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (_other_id, "choice 0: output token 3 is"),
        (_one_id_less, "choice 0: it has 12 output tokens, and had 11"),
        (_other_end, "choice 0: the ids are the same, but it ended by length, and did by stop"),
        (_other_text, "choice 0: the text differs from character 3 on"),
        (_other_seed, "choice 0: output token"),
    ],
)
def test_another_answer_is_told(
    change: Callable[[dict[str, Any]], None],
    line: str,
    saved: dict[str, dict[str, Any]],
    fresh: Callable[[], Service],
    tmp_path: Path,
) -> None:
    pair = json.loads(json.dumps(saved["unseeded, with ids"]))
    change(pair)
    same, lines = said(fresh(), write(tmp_path, pair))
    assert not same
    assert lines[1].startswith(line), lines


def test_another_fingerprint_is_told_and_the_ids_are_compared_all_the_same(
    saved: dict[str, dict[str, Any]], fresh: Callable[[], Service], tmp_path: Path
) -> None:
    pair = json.loads(json.dumps(saved["unseeded, with ids"]))
    pair["response"]["system_fingerprint"] = "fp_other"
    service = fresh()
    same, lines = said(service, write(tmp_path, pair))
    assert same
    assert lines[0] == (
        f"the fingerprint differs: fp_other in the record, {service.fingerprint} here; the ids need not be the same"
    )


def test_a_stream_without_a_seed_needs_the_header(saved: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    pair = json.loads(json.dumps(saved["streamed"]))
    seed = pair["response"][0]["seed"]
    for chunk in pair["response"]:
        del chunk["seed"]
    with pytest.raises(CommandError, match="X-Seed"):
        read_record(write(tmp_path, pair))
    record = read_record(write(tmp_path, pair | {"seed": seed}))
    assert isinstance(record, SavedPair)
    assert record.body["seed"] == seed


GOOD = {"request": {"model": "m", "seed": 1}, "response": {"model": "m", "choices": [{"index": 0, "text": "a"}]}}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be an object"),
        ('{"response": {}}', 'needs "request"'),
        (json.dumps(GOOD | {"response": []}), "must be the answer, or the list"),
        (json.dumps(GOOD | {"response": {"error": {"message": "no room"}}}), "is an error: no room"),
        (json.dumps(GOOD | {"response": {"choices": [{"text": "a"}]}}), "has no index"),
        (json.dumps(GOOD | {"response": {"choices": [{"index": 0}]}}), "lacks a field"),
        (json.dumps(GOOD | {"response": {"choices": []}}), "has no choices"),
        (json.dumps(GOOD | {"response": {**GOOD["response"], "seed": 2}}), "has the seed 1, its response 2"),
        ('{"kind": "something"}', "is of the kind 'something'"),
        ('{"kind": "truedraft.audit", "version": 1}', "a field is missing"),
    ],
)
def test_a_bad_record_is_refused_in_one_line(content: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text(content)
    with pytest.raises(CommandError, match=why) as refused:
        read_record(file)
    assert "\n" not in str(refused.value)
    assert str(file) in str(refused.value)


def test_a_missing_record_is_told(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot read the record"):
        read_record(tmp_path / "none.json")


def test_the_wrong_model_and_a_refused_body_are_told(
    saved: dict[str, dict[str, Any]], fresh: Callable[[], Service], tmp_path: Path
) -> None:
    pair = json.loads(json.dumps(saved["unseeded, with ids"]))
    pair["response"]["model"] = "another"
    with pytest.raises(CommandError, match="of the model another, this is tiny"):
        said(fresh(), write(tmp_path, pair))
    pair = json.loads(json.dumps(saved["unseeded, with ids"]))
    pair["request"]["temperature"] = 9
    with pytest.raises(CommandError, match="the request is refused: temperature"):
        said(fresh(), write(tmp_path, pair))


PARAMS = SamplingParams(
    seed=2**64 - 1,
    temperature=0.7,
    logit_bias=((4, 1.5),),
    stop_token_ids=frozenset({1, 2}),
    bad_words=((5, 6), (7,)),
    allowed_token_ids=None,
    max_tokens=6,
)


def test_parameters_survive_the_way_through_json() -> None:
    for params in (PARAMS, replace(PARAMS, allowed_token_ids=(3, 9), logit_bias=()), SamplingParams(seed=0)):
        assert params_from_json(json.loads(json.dumps(params_to_json(params)))) == params


def test_an_audits_record_tells_which_of_the_two_outputs_comes_again(
    fresh: Callable[[], Service], tmp_path: Path
) -> None:
    request = EngineRequest("r", (70, 71, 72, 73), (ChoiceSpec(1, PARAMS),), arrival_time=0.0, stop=("zzz",))
    timing = ChoiceTiming(0.0, 0.0, 0.0, 0.0, 4, 0, 6)

    def record(sent: tuple[int, ...], rerun: tuple[int, ...]) -> Path:
        service = fresh()
        case = AuditCase(request, 1, PARAMS, sent, "length", None, (), (), timing)
        finding = AuditFinding("mismatch", "r", 1, "token_ids", 0, 0.5, case, rerun, "length")
        reporter = AuditReporter(model=MODEL_NAME, fingerprint=service.fingerprint, level="L0", store=None)
        file = tmp_path / "record.json"
        file.write_bytes(reporter._record(finding, case))
        return file

    wrong = (0, 0, 0, 0, 0, 0)
    same, lines = said(fresh(), record(wrong, wrong))
    assert not same
    assert lines[1].endswith("; the audit's own run differs as well")
    read = read_record(tmp_path / "record.json")
    assert isinstance(read, AuditRecord)
    first = int(lines[1].split(" is ")[1].split(",")[0])
    assert first != 0
    same, lines = said(fresh(), record(wrong, (first,)), plain=True)
    assert not same
    assert lines[1].endswith("; these are the ids of the audit's own run")


def test_the_command_replays_a_record_and_its_exit_code_says_how_it_went(
    folder: Path,
    saved: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRUEDRAFT_HOME", str(tmp_path / "home"))
    from bench.replay import command

    pair = json.loads(json.dumps(saved["several prompts, penalties"]))
    flags = ["--model", str(folder), "--served-model-name", MODEL_NAME, "--num-threads", "1"]
    for changed, code, last in ((False, 0, "the same"), (True, 1, "NOT the same")):
        if changed:
            pair["response"]["choices"][1]["token_ids"][0] += 1
        argv = ["replay", str(write(tmp_path, pair)), *flags, "--executor", "generic"]
        arguments = build_parser({"replay": command}).parse_args(argv)
        arguments.__dict__.pop("command")
        assert run(arguments, lambda line: None) == code
        assert capsys.readouterr().out.splitlines()[-1] == last
