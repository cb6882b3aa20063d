"""Recorded traffic: every form of a line, and what is said of a line that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.preflight.traffic import DEFAULT_MAX_TOKENS, RecordedRequest, Traffic, read_traffic
from model.errors import ModelError
from model.tokenizer import Tokenizer
from server.commands import CommandError
from tests.server.builders import byte_level_tokenizer

CONTEXT = 64
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = byte_level_tokenizer()
    found._hf.chat_template = TEMPLATE
    return found


def read(tmp_path: Path, tokenizer: Tokenizer, *lines: object) -> Traffic:
    path = tmp_path / "traffic.jsonl"
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw))
    return read_traffic(path, tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=CONTEXT)


def one(tmp_path: Path, tokenizer: Tokenizer, line: dict[str, Any]) -> RecordedRequest:
    traffic = read(tmp_path, tokenizer, line)
    assert not traffic.bad_lines
    return traffic.requests[0]


def test_a_prompt_is_text_ids_or_messages(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = "Hello, world!"
    assert one(tmp_path, tokenizer, {"prompt": text}).prompt == tuple(tokenizer.encode(text))
    assert one(tmp_path, tokenizer, {"prompt": [5, 6, 7]}).prompt == (5, 6, 7)
    chat = one(tmp_path, tokenizer, {"messages": [{"role": "user", "content": "hi"}]})
    assert tokenizer.decode(chat.prompt) == "user: hi\nassistant:"


def test_output_arrival_and_latency_are_kept_and_optional(tmp_path: Path, tokenizer: Tokenizer) -> None:
    full = one(tmp_path, tokenizer, {"prompt": "a", "output": "Hello", "arrival": 1.7e9, "latency": 0.5})
    assert full.output == tuple(tokenizer.encode("Hello", add_special_tokens=False))
    assert (full.arrival, full.latency) == (1.7e9, 0.5)
    assert one(tmp_path, tokenizer, {"prompt": "a", "output": [1, 2]}).output == (1, 2)
    bare = one(tmp_path, tokenizer, {"prompt": "a"})
    assert (bare.output, bare.arrival, bare.latency) == (None, None, None)


def test_max_tokens_has_two_names_a_default_and_ends_at_the_context(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert one(tmp_path, tokenizer, {"prompt": [1], "max_tokens": 7}).max_tokens == 7
    assert one(tmp_path, tokenizer, {"prompt": [1], "max_completion_tokens": 8}).max_tokens == 8
    assert one(tmp_path, tokenizer, {"prompt": [1]}).max_tokens == min(DEFAULT_MAX_TOKENS, CONTEXT - 1)
    long = one(tmp_path, tokenizer, {"prompt": [1] * 60, "output": [2] * 60})
    assert len(long.output or ()) == 4


def test_sampling_parameters_reach_the_run_and_the_request(tmp_path: Path, tokenizer: Tokenizer) -> None:
    line = {"prompt": [1], "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": -3, "presence_penalty": 0.2}
    request = one(tmp_path, tokenizer, line)
    params = request.params(5, frozenset({0}))
    assert (params.temperature, params.top_p, params.top_k, params.presence_penalty) == (0.5, 0.9, 0, 0.2)
    assert (params.seed, params.max_tokens, params.stop_token_ids) == (2**64 - 3, 5, frozenset({0}))
    assert (
        request.body("m", 5).items() >= {"model": "m", "prompt": [1], "max_tokens": 5, "seed": -3, "top_p": 0.9}.items()
    )


def test_without_a_seed_the_line_number_is_the_seed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    traffic = read(tmp_path, tokenizer, {"prompt": [1]}, {"prompt": [1]})
    assert [request.sampling["seed"] for request in traffic.requests] == [1, 2]


BAD: dict[str, tuple[object, str]] = {
    "not JSON": (b"{", "is not JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', "is not UTF-8"),
    "a list": ([1], "is not a JSON object"),
    "neither": ({"max_tokens": 3}, "one of prompt and messages"),
    "both": ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "one of prompt and messages"),
    "a number": ({"prompt": 3}, "prompt must be a string or a list of token ids"),
    "several prompts": ({"prompt": ["a", "b"]}, "write a line for each"),
    "empty": ({"prompt": ""}, "the prompt is empty"),
    "an id too large": ({"prompt": [1, 99999]}, "token id 99999"),
    "a negative id": ({"prompt": [1], "output": [-1]}, "token id -1"),
    "too long": ({"prompt": [1] * CONTEXT}, "context has 64"),
    "messages": ({"messages": "hi"}, "messages must be a list of objects"),
    "tools": ({"messages": [{"role": "user", "content": "b"}], "tools": 3}, "tools must be a list"),
    "temperature": ({"prompt": "a", "temperature": -1}, "temperature"),
    "max_tokens": ({"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1"),
    "arrival": ({"prompt": "a", "arrival": "now"}, "arrival must be a number of seconds"),
    "arrival that is not finite": (b'{"prompt": "a", "arrival": NaN}', "arrival must be a number of seconds"),
    "latency": ({"prompt": "a", "latency": -1}, "latency must be a number of seconds"),
    "output": ({"prompt": "a", "output": {"text": "b"}}, "output must be a string or a list of token ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_with_its_number_and_costs_no_other(
    name: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    line, reason = BAD[name]
    traffic = read(tmp_path, tokenizer, {"prompt": "a"}, b"", line, {"prompt": "b"})
    assert [request.line for request in traffic.requests] == [1, 4]
    assert [bad.line for bad in traffic.bad_lines] == [3]
    assert reason in traffic.bad_lines[0].reason
    assert "\n" not in traffic.bad_lines[0].reason


def test_a_file_without_a_usable_line_is_one_error_that_names_the_first(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(CommandError, match=r"no line that can be used \(1 bad\); line 1: is not JSON"):
        read(tmp_path, tokenizer, b"{")
    with pytest.raises(CommandError, match="No such file"):
        read_traffic(tmp_path / "absent", tokenizer, vocab_size=9, max_model_len=9)


def test_messages_without_a_chat_template_are_a_bad_line(tmp_path: Path) -> None:
    bare = byte_level_tokenizer()
    with pytest.raises(ModelError, match="no chat template"):
        bare.chat_text([{"role": "user", "content": "hi"}])
    traffic = read(tmp_path, bare, {"prompt": "a"}, {"messages": [{"role": "user", "content": "hi"}]})
    assert traffic.bad_lines[0].reason == "the model's tokenizer has no chat template"


def test_a_message_that_the_template_refuses_is_a_bad_line(tmp_path: Path) -> None:
    strict = byte_level_tokenizer()
    strict._hf.chat_template = "{{ raise_exception('roles must alternate') }}"
    traffic = read(tmp_path, strict, {"prompt": "a"}, {"messages": [{"role": "user", "content": "hi"}]})
    assert "roles must alternate" in traffic.bad_lines[0].reason
