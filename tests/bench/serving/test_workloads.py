"""The prompts: the same everywhere, of their kinds, and one's own with clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.serving.options import Load, Mode, Size
from bench.serving.plan import LoadCell, Variant, requests_of, round_order
from bench.serving.target import Target
from bench.serving.wire import Client
from bench.serving.workloads import WORKLOADS, load_workload, prompts_hash, read_prompts
from bench.speculation.prompt_set import chatml, load_prompts
from server.commands import CommandError

SIZE = Size(rounds=2, tokens=8, requests=None, temperature=0.5, seed=7, ignore_eos=True, chat=False, timeout=1.0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_names_and_texts_are_told_apart_by_one_hash(name: str) -> None:
    prompts = load_workload(name)
    assert prompts_hash(prompts) == prompts_hash(load_workload(name)) != prompts_hash(prompts[1:])
    assert all(prompt.text == chatml(prompt.messages) for prompt in prompts)


def test_the_frozen_prompts_are_taken_as_they_are() -> None:
    for name in ("chat", "copy", "json"):
        assert [p.messages for p in load_workload(name)] == [p.messages for p in load_prompts(name)]


def test_long_prompts_are_long_and_all_different() -> None:
    long = load_workload("long")
    assert len({prompt.text for prompt in long}) == len(long) == 16
    assert min(len(prompt.text) for prompt in long) > 3 * max(len(prompt.text) for prompt in load_workload("chat"))


def test_mixed_has_every_kind() -> None:
    kinds = [prompt.name.partition("-")[0] for prompt in load_workload("mixed")]
    assert {kind: kinds.count(kind) for kind in kinds} == {"chat": 28, "copy": 28, "json": 28, "long": 12}
    assert set(kinds[:8]) == {"chat", "copy", "json", "long"}  # also where few requests are sent


def test_shared_prompts_begin_alike() -> None:
    shared = load_workload("shared")
    start = len(chatml(shared[0].messages[:1])) - len("<|im_start|>assistant\n")
    assert len({prompt.text[:start] for prompt in shared}) == 1
    assert len({prompt.text for prompt in shared}) == len(shared)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompt"),
        ("[]", "holds no prompt"),
        ("{\n", "line 1 is not JSON"),
        ('"a"\n7\n', "prompt 2 must be a text"),
        ('{"messages": [{"role": "user"}]}', "prompt 1 must be a text"),
        ("[1, 2", "is not JSON"),
    ],
)
def test_a_file_that_holds_no_prompts_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(content, "utf-8")
    with pytest.raises(CommandError) as caught:
        read_prompts(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_own_prompts_may_be_texts_objects_or_chats_in_lines_or_a_list(tmp_path: Path) -> None:
    values = ["a text", {"prompt": "another"}, {"messages": [{"role": "user", "content": "hi"}]}]
    lines, whole = tmp_path / "lines.jsonl", tmp_path / "list.json"
    lines.write_text("\n\n".join(map(json.dumps, values)), "utf-8")
    whole.write_text(json.dumps(values), "utf-8")
    assert read_prompts(lines) == read_prompts(whole)
    assert [prompt.text for prompt in read_prompts(lines)] == [
        "a text", "another", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ]  # fmt: skip


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="No such file"):
        read_prompts(tmp_path / "none")


def test_a_prompt_keeps_its_seed_and_one_that_comes_again_gets_another_salt() -> None:
    prompts = load_workload("chat")[:3]
    target = Target("t", Client("http://x"), "m", ours=True, chat=False)
    cell, variant = LoadCell("chat", Load(seats=4), prompts), Variant("off", target, Mode("off", 0), "g")
    first, second = (requests_of(cell, variant, SIZE, number, f"salt-{number}") for number in (0, 1))
    assert [r.prompt for r in first] == [prompts[i % 3].name for i in range(8)]
    assert [r.prompt for r in second] == [prompts[(8 + i) % 3].name for i in range(8)]
    seeds = {(r.prompt, r.body["seed"]) for r in (*first, *second)}
    assert len(seeds) == 3
    found = [(r.prompt, r.body["cache_salt"]) for r in (*first, *second)]
    assert len(set(found)) == len(found)


def test_every_variant_begins_a_round() -> None:
    target = Target("t", Client("http://x"), "m", ours=True, chat=False)
    variants = [Variant(name, target, Mode(name), "g") for name in "abc"]
    orders = ["".join(v.name for v in round_order(variants, number)) for number in range(6)]
    assert orders == ["abc", "cba", "bca", "acb", "cab", "bac"]
