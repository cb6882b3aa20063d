"""``truedraft replay``: what a user saved is understood as the server understood it, and compared choice by choice."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.replay.command import run
from bench.replay.record import SavedPair, read_record
from server.cli import build_parser
from server.commands import CommandError
from server.service import Service
from tests.bench.replay.builders import edited, judged, places, said, write
from tests.server.builders import MODEL_NAME, running, sse_events

PROMPT = "the quick brown fox jumps over the lazy dog. the quick"
BODIES: dict[str, dict[str, Any]] = {
    "unseeded, with ids": {"return_token_ids": True, "ignore_eos": True},
    "unseeded, text alone": {},
    "seeded, n of 2, logprobs": {"seed": -5, "n": 2, "logprobs": 2, "return_token_ids": True},
    "several prompts, penalties": {"prompt": [PROMPT, "def main"], "frequency_penalty": 0.7, "return_token_ids": True},
    "greedy, ends by a stop string": {"temperature": 0, "stop": ["e"], "max_tokens": 64, "return_token_ids": True},
    "best of 3": {"best_of": 3, "n": 2, "return_token_ids": True},
    "echo": {"echo": True, "logprobs": 0},
    "with a prediction": {
        "prediction": {"type": "content", "content": "the quick brown fox"},
        "speculation": {"num_speculative_tokens": 3},
        "return_token_ids": True,
    },
    "in a format": {"structured_outputs": {"regex": "[a-z ]{9}[0-9]{3}"}, "n": 2, "return_token_ids": True},
    "everything": {
        "seed": 7,
        "ignore_eos": True,
        "prompt": "the quick",
        "logprobs": 2,
        "prompt_logprobs": 1,
        "return_token_ids": True,
        "max_tokens": 8,
    },
    "streamed": {"stream": True, "n": 2, "return_token_ids": True},
    "streamed, everything": {
        "seed": 8,
        "ignore_eos": True,
        "stream": True,
        "n": 2,
        "logprobs": 1,
        "return_token_ids": True,
        "echo": True,
        "prompt": "the",
        "max_tokens": 5,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "streamed, text and usage": {"stream": True, "stream_options": {"include_usage": True}},
}


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


@pytest.mark.parametrize("plain", [False, True], ids=["speculating", "plain"])
@pytest.mark.parametrize("name", BODIES)
def test_a_saved_answer_is_reproduced(
    name: str, plain: bool, saved: dict[str, dict[str, Any]], fresh: Callable[[], Service], tmp_path: Path
) -> None:
    same, lines = said(fresh(), write(tmp_path, saved[name]), plain=plain)
    assert same, lines
    assert lines[0].startswith("the fingerprint is the record's: fp_")
    prompts = BODIES[name].get("prompt", "")
    num_choices = (len(prompts) if isinstance(prompts, list) else 1) * BODIES[name].get("n", 1)
    assert sum(line.startswith("choice ") for line in lines) == num_choices


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
    choice["text"] = choice["text"][:3] + "\0" + choice["text"][4:]


def _other_seed(pair: dict[str, Any]) -> None:
    pair["response"]["seed"] += 1


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (_other_id, "choice 0: output token 3 is"),
        (_one_id_less, "choice 0: it has 12 output tokens, and had 11"),
        (_other_end, "choice 0: the ids are the same, but it ended by length, and did by stop"),
        (_other_text, "choice 0: the ids are the same, but the text differs from character 3 on"),
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


# Of these nothing is promised. An edited seed or model is another request.
FREE = {"id", "object", "created", "metrics", "cached_tokens", "system_fingerprint"}


@pytest.mark.parametrize("name", ["everything", "streamed, everything", "unseeded, text alone"])
def test_an_edit_at_any_place_of_the_answer_is_found(
    name: str, saved: dict[str, dict[str, Any]], fresh: Callable[[], Service], tmp_path: Path
) -> None:
    """Kind: a part of the answer that the comparison does not look at."""
    pair = saved[name]
    clean = read_record(write(tmp_path, pair))
    looked_at: set[str] = set()
    for path in places(pair["response"]):
        keys = {step for step in path if isinstance(step, str)}
        if keys & FREE or keys == {"choices", "index"} or path[-1] in ("seed", "model"):
            continue
        if "usage" in keys and isinstance(pair["response"], list) and path[0] != len(pair["response"]) - 1:
            continue  # of a stream's usage the last is compared
        try:
            record = read_record(write(tmp_path, edited(pair, ("response", *path))))
        except CommandError:
            continue  # found as well: the record contradicts itself
        same, lines = judged(clean, record)
        assert not same, (path, lines)
        looked_at |= keys
    assert looked_at >= {"text", "finish_reason", "stop_reason"}
    if name != "unseeded, text alone":
        assert looked_at >= {"token_ids", "prompt_token_ids", "tokens", "token_logprobs", "top_logprobs", "text_offset"}
        assert looked_at >= {"prompt_tokens", "completion_tokens", "total_tokens"}


def _edit(*path: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda pair: edited(pair, ("response", *path))


def _without(*path: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(pair: dict[str, Any]) -> dict[str, Any]:
        pair = json.loads(json.dumps(pair))
        inner = pair["response"]
        for step in path[:-1]:
            inner = inner[step]
        del inner[path[-1]]
        return pair

    return change


CHOICE = ("choices", 0)
EDITS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], bool, str]] = {
    "text": (_edit(*CHOICE, "text"), False, "the ids are the same, but the text differs from character"),
    "top logprobs": (
        _edit(*CHOICE, "logprobs", "top_logprobs", 0, "!"),
        False,
        "the ids are the same, but logprobs.top_logprobs[0].! is not there any more",
    ),
    "tokens": (_edit(*CHOICE, "logprobs", "tokens", 1), False, "logprobs.tokens[1] is "),
    "no logprobs": (_without(*CHOICE, "logprobs"), False, "the record lacks logprobs, which its request asks for"),
    "no ids": (_without(*CHOICE, "token_ids"), False, "the record lacks token_ids, which its request asks for"),
    "prompt logprobs": (_edit(*CHOICE, "prompt_logprobs", 0), False, "prompt_logprobs[0] is null, and was x"),
    "stop reason": (_edit(*CHOICE, "stop_reason"), False, "stop_reason is "),
    "usage": (_edit("usage", "completion_tokens"), False, "usage: completion_tokens is "),
    "no usage": (_without("usage"), True, "not in the record, so not compared: usage.prompt_tokens, usage.completion_"),
    "no stop reason": (_without(*CHOICE, "stop_reason"), True, "not in the record, so not compared: stop_reason"),
    "cached tokens": (_edit("usage", "prompt_tokens_details", "cached_tokens"), True, "usage: the same"),
}


THROUGH_THE_ENGINE = ("no logprobs", "usage", "no usage")  # how the parts are put together is the same for all


@pytest.mark.parametrize("name", EDITS)
def test_what_differs_first_is_said_and_what_is_not_held_too(
    name: str, saved: dict[str, dict[str, Any]], fresh: Callable[[], Service], tmp_path: Path
) -> None:
    change, expected, line = EDITS[name]
    pair = json.loads(json.dumps(saved["everything"]))
    if name == "top logprobs":
        pair["response"]["choices"][0]["logprobs"]["top_logprobs"][0]["!"] = 0.0
    if name in THROUGH_THE_ENGINE:
        same, lines = said(fresh(), write(tmp_path, change(pair)))
    else:
        same, lines = judged(
            read_record(write(tmp_path, saved["everything"])), read_record(write(tmp_path, change(pair)))
        )
    assert same is expected, lines
    assert any(line in one for one in lines), lines


def test_what_was_not_asked_for_is_said_not_to_be_compared(
    saved: dict[str, dict[str, Any]], fresh: Callable[[], Service], tmp_path: Path
) -> None:
    _, lines = said(fresh(), write(tmp_path, saved["unseeded, text alone"]))
    assert lines[-1] == ("not in the record, so not compared: token_ids, logprobs, prompt_token_ids, prompt_logprobs")


def test_nothing_of_a_record_controls_the_terminal_or_forges_a_line(
    saved: dict[str, dict[str, Any]], fresh: Callable[[], Service], tmp_path: Path
) -> None:
    evil = "fp_\x1b[2J\nthe same\u202e"
    pair = json.loads(json.dumps(saved["everything"]))
    pair["response"]["system_fingerprint"] = evil
    pair["response"]["choices"][0]["finish_reason"] = evil
    same, lines = said(fresh(), write(tmp_path, pair))
    assert not same
    assert r"fp_\x1b[2J\nthe same\u202e" in lines[0]
    assert all(line.isprintable() and len(line) < 400 for line in lines)
    for path in (("request", "temperature"), ("request", "seed"), ("response", "model"), ("response", "seed")):
        pair = json.loads(json.dumps(saved["everything"]))
        pair[path[0]][path[1]] = evil * 50
        with pytest.raises(CommandError) as refused:
            said(fresh(), write(tmp_path, pair))
        message = str(refused.value).replace(str(tmp_path), "")
        assert message.isprintable()
        assert len(message) < 700


def test_a_record_is_a_regular_file_or_standard_input_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CommandError, match="is not a regular file"):
        read_record(Path("/dev/zero"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(GOOD).encode())))
    assert isinstance(read_record(Path("-")), SavedPair)
    monkeypatch.setattr("bench.replay.record.MAX_BYTES", 10)
    with pytest.raises(CommandError, match="is larger than 10 bytes"):
        read_record(write(tmp_path, GOOD))


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


def stream(*choices: dict[str, Any]) -> str:
    """A record of one choice in several chunks."""
    chunks = [{"model": "m", "choices": [{"index": 0, "text": "a", **choice}]} for choice in choices]
    return json.dumps({"request": {"model": "m", "seed": 1}, "response": chunks})


GOOD: dict[str, Any] = {
    "request": {"model": "m", "seed": 1},
    "response": {"model": "m", "choices": [{"index": 0, "text": "a"}]},
}


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
        ('{"kind": "\\u001b[2J"}', r"of the kind '\\\\x1b\[2J'"),
        ('{"a": "\\ud800"}', "lone surrogate"),
        ('{"a": 1' + "0" * 5000 + "}", "a number that is too long"),
        (json.dumps(GOOD | {"response": {"choices": [{"index": True, "text": "a"}]}}), "has no index"),
        (json.dumps(GOOD | {"response": GOOD["response"] | {"usage": 3}}), "usage must be an object"),
        (json.dumps(GOOD | {"response": GOOD["response"] | {"system_fingerprint": 3}}), "must be a text"),
        (
            json.dumps(GOOD | {"response": [GOOD["response"], {"seed": 1, "choices": []}, {"seed": 2, "choices": []}]}),
            "have the seed 1 and 2",
        ),
        (stream({"finish_reason": "stop"}, {}), "goes on after its end"),
        (stream({"token_ids": [1]}, {}), "wrong one: token_ids"),
        (stream({"logprobs": {"tokens": []}}, {"logprobs": None}), "wrong one: logprobs"),
        (stream({"logprobs": {"tokens": []}}, {"logprobs": {"tops": []}}), "objects of the same lists"),
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


def replayed(record: Path, folder: Path, *flags: str) -> int:
    """The exit code of the command on ``record`` with the model of ``folder``."""
    from bench.replay import command

    target = ["--model", str(folder), "--served-model-name", MODEL_NAME, "--num-threads", "1", "--executor", "generic"]
    arguments = build_parser({"replay": command}).parse_args(["replay", str(record), *target, *flags])
    arguments.__dict__.pop("command")
    return run(arguments, lambda line: None)


def test_the_command_replays_a_record_and_its_exit_code_says_how_it_went(
    folder: Path,
    saved: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRUEDRAFT_HOME", str(tmp_path / "home"))
    pair = json.loads(json.dumps(saved["several prompts, penalties"]))
    for changed, code, last in ((False, 0, "the same"), (True, 1, "NOT the same")):
        if changed:
            pair["response"]["choices"][1]["token_ids"][0] += 1
        assert replayed(write(tmp_path, pair), folder) == code
        assert capsys.readouterr().out.splitlines()[-1] == last


def test_a_drafter_that_only_a_flag_makes_is_there_for_the_record_that_names_it(
    folder: Path,
    saved: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRUEDRAFT_HOME", str(tmp_path / "home"))
    pair = json.loads(json.dumps(saved["seeded, n of 2, logprobs"]))
    flags = ["--draft-model", str(folder), "--exit-layers", "1", "--draft-length", "fixed"]
    for drafter in ("exit", "model"):
        pair["request"]["speculation"] = {"drafter": drafter}
        assert replayed(write(tmp_path, pair), folder, *flags) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "the same"
