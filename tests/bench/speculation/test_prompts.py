"""The frozen prompts: how many, how long, none twice, and that they are the ones that reports name."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.speculation.prompt_set import WORKLOADS, chatml, encode_prompt, load_prompts, prompt_set_hash
from bench.speculation.repeats import repeats_itself
from model.tokenizer import Tokenizer


def test_the_set_is_frozen() -> None:
    # Figures of different sets must not be compared: whoever changes the set changes this hash knowingly.
    assert prompt_set_hash() == "8d522073ed466652"


def test_each_workload_has_a_prompt_for_each_of_32_seats_and_none_twice() -> None:
    everything = [prompt for workload in WORKLOADS for prompt in load_prompts(workload)]
    for workload in WORKLOADS:
        prompts = load_prompts(workload)
        assert len(prompts) >= 32
        assert [prompt.name for prompt in prompts] == [f"{workload}-{i + 1:02}" for i in range(len(prompts))]
    assert len({chatml(prompt.messages) for prompt in everything}) == len(everything)


def test_each_prompt_ends_with_the_users_turn_and_says_who_speaks() -> None:
    for workload in WORKLOADS:
        for prompt in load_prompts(workload):
            roles = [message["role"] for message in prompt.messages]
            turns = roles[1:] if roles[0] == "system" else roles
            assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"], prompt.name
            assert all(message["content"].strip() == message["content"] for message in prompt.messages), prompt.name


def test_an_unknown_workload_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'poem'"):
        load_prompts("poem")


@pytest.mark.real_model
def test_prompts_of_the_default_model_have_50_to_400_tokens(default_model_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(default_model_folder)
    assert tokenizer is not None
    for workload in WORKLOADS:
        encoded = [encode_prompt(prompt, tokenizer) for prompt in load_prompts(workload)]
        assert all(50 <= len(ids) <= 400 for ids in encoded), (workload, sorted(map(len, encoded)))
        assert all(tokenizer.decode(ids, skip_special_tokens=False).endswith("assistant\n") for ids in encoded)


@pytest.mark.real_model
def test_what_is_to_be_copied_seldom_repeats_itself(default_model_folder: Path) -> None:
    # Else even a faithful copy would count as an output that goes round in circles.
    tokenizer = Tokenizer.from_folder(default_model_folder)
    assert tokenizer is not None
    bodies = [prompt.messages[-1]["content"].split("\n\n", 1)[1] for prompt in load_prompts("copy")]
    assert sum(repeats_itself(tokenizer.encode(body)) for body in bodies) <= len(bodies) // 4
