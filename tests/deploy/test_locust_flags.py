"""The load test's flags, prompts and requests: refused with the flag's name, documented, and what the server takes."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from load_test.bodies import Bodies
from load_test.flags import FLAGS, flags_table
from load_test.options import Options, read_options
from load_test.prompts import OWN_PROMPTS, Prompt, PromptMix, load_prompts
from load_test.slo import KNOWN

from server.chat.schema import ChatRequest
from server.schemas import CompletionRequest, parse_request

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "load_tests.md").read_text("utf-8")


def options(environment: dict[str, str] | None = None, **changes: Any) -> Options:
    return read_options({**{flag.name: flag.default for flag in FLAGS}, **changes}, environment or {})


def bodies(count: int, seed: int = 0, **changes: Any) -> list[dict[str, Any]]:
    made = options(**changes)
    ids = None
    if made.prompt_tokens:
        ids = {prompt: [1, 2, 3] for group in made.mix.prompts.values() for prompt in group}
    source = Bodies(made, "m", random.Random(seed), ids)
    return [dict(source.next().body) for _ in range(count)]


# flags


@pytest.mark.parametrize(
    "changes",
    [
        {"rate": -1.0},
        {"rate": float("nan")},
        {"think_time": -0.1},
        {"classes": "chat,poems"},
        {"classes": "chat=0"},
        {"classes": "chat=x"},
        {"prompts": "/nowhere.json"},
        {"prompt_tokens": 1.5},
        {"prompt_tokens": 8.0, "endpoint": "chat"},
        {"output_tokens": "0"},
        {"output_tokens": "9-3"},
        {"output_tokens": "many"},
        {"temperature": 3.0},
        {"seed": -1.0},
        {"speculation": "on"},
        {"speculation": "4", "plain_openai": True},
        {"cancel": 1.5},
        {"request_timeout": 0.0},
        {"warm_up": float("inf")},
        {"steps": "1,x"},
        {"steps": "0"},
        {"steps": "1,2", "step_seconds": 5.0, "warm_up": 5.0},
        {"metrics_urls": "server:8000"},
        {"slo": "fast"},
    ],
    ids=str,
)
def test_a_bad_flag_is_one_line_that_names_it(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^--") as caught:
        options(**changes)
    assert "\n" not in str(caught.value)
    named = "--" + next(iter(changes)).replace("_", "-")
    assert named in str(caught.value) or "--warm-up" in str(caught.value)


def test_the_key_comes_from_the_environment_alone() -> None:
    assert options({"TRUEDRAFT_API_KEY": " k \n"}).headers == {"Authorization": "Bearer k"}
    assert options({"OTHER": "o"}, api_key_env="OTHER").headers == {"Authorization": "Bearer o"}
    assert options({}).headers == {}
    assert not any("key" in flag.name and flag.name != "api_key_env" for flag in FLAGS)


def test_the_page_has_every_flag_with_its_variable_and_default() -> None:
    assert flags_table() in PAGE


def test_no_flag_and_no_variable_is_there_twice() -> None:
    assert len({flag.option for flag in FLAGS}) == len({flag.variable for flag in FLAGS}) == len(FLAGS)


def test_every_objective_is_documented() -> None:
    section = PAGE[PAGE.index("## Objectives") : PAGE.index("## What is sent")]
    for name in re.findall(r"[a-z0-9]*_[a-z0-9_]+|ttft|itl|tpot|e2e|late|failed|shed|cancelled", KNOWN):
        assert f"`{name}`" in section, name


# prompts


def test_every_class_is_documented_and_no_other() -> None:
    listed = PAGE[PAGE.index("Prompts come in classes") : PAGE.index("`--classes chat=3,code`")]
    assert set(re.findall(r"`(\w+)`", listed)) == set(load_prompts(OWN_PROMPTS))


def test_classes_are_drawn_by_weight() -> None:
    prompts = {kind: (Prompt(kind, ("x",)),) for kind in "ab"}
    mix, rng = PromptMix(prompts, {"a": 3.0, "b": 1.0}), random.Random(1)
    assert sum(mix.draw(rng).kind == "a" for _ in range(4000)) == pytest.approx(3000, abs=120)


@pytest.mark.parametrize("content", ["[]", "{}", '{"a": []}', '{"a": [""]}', '{"a": [["x", "y"]]}', '{"a": [7]}', "{"])
def test_a_file_of_prompts_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"^--prompts: "):
        load_prompts(file)


def test_own_prompts_can_be_used(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps({"mine": [["q", "a", "r"]]}))
    (body,) = bodies(1, prompts=str(file), endpoint="chat")
    assert [(m["role"], m["content"]) for m in body["messages"]] == [("user", "q"), ("assistant", "a"), ("user", "r")]
    (body,) = bodies(1, prompts=str(file))
    assert body["prompt"] == "User: q\nAssistant: a\nUser: r\nAssistant:"


# requests


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.7}, {"speculation": "off"}, {"speculation": "3"}, {"sharing": "all"}, {"natural_end": True}],
    ids=str,
)
def test_the_server_takes_every_body(changes: dict[str, Any]) -> None:
    for body in bodies(20, **changes):
        parse_request(CompletionRequest, body)
    for body in bodies(20, endpoint="chat", **changes):
        parse_request(ChatRequest, body)


def test_a_plain_body_has_only_fields_of_openais_api() -> None:
    fields = {"model", "prompt", "max_tokens", "temperature", "seed", "stream", "stream_options"}
    (body,) = bodies(1, plain_openai=True, temperature=1.0)
    assert set(body) == fields
    assert body["stream_options"] == {"include_usage": True}


def test_lengths_are_fixed_unless_an_end_by_itself_is_wanted() -> None:
    assert {(body["max_tokens"], body["ignore_eos"]) for body in bodies(20)} == {(64, True)}
    drawn = {body["max_tokens"] for body in bodies(200, output_tokens="3-5", natural_end=True)}
    assert drawn == {3, 4, 5}
    assert bodies(1, natural_end=True)[0]["ignore_eos"] is False


def test_prompts_are_brought_to_their_length_exactly() -> None:
    assert [body["prompt"] for body in bodies(2, prompt_tokens=7.0)] == [[1, 2, 3, 1, 2, 3, 1]] * 2
    assert bodies(1, prompt_tokens=2.0)[0]["prompt"] == [1, 2]


def test_requests_share_nothing_unless_they_are_told_to() -> None:
    assert len({body["cache_salt"] for body in bodies(50) + bodies(50)}) == 100  # nor do two runs with one seed
    assert all("cache_salt" not in body for body in bodies(5, sharing="all"))


def test_the_same_seed_makes_the_same_requests_and_another_one_others() -> None:
    changes = {"output_tokens": "1-500", "temperature": 1.0, "sharing": "all"}
    assert bodies(10, seed=3, **changes) == bodies(10, seed=3, **changes)
    assert bodies(10, seed=3, **changes) != bodies(10, seed=4, **changes)


def test_clients_leave_as_often_as_wanted_and_before_the_end() -> None:
    source = Bodies(options(cancel=0.25, output_tokens="2-40"), "m", random.Random(0))
    wanted = [source.next() for _ in range(2000)]
    leaving = [one for one in wanted if one.leave_after is not None]
    assert len(leaving) == pytest.approx(500, abs=80)
    assert all(1 <= (one.leave_after or 0) < one.body["max_tokens"] for one in leaving)
