"""Recorded traffic: one JSON object a line, the body of a request with what was seen of it. See docs/preflight.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.foreign import ForeignError, parse_json, read_lines, shown
from model.errors import ModelError
from server.commands import CommandError
from server.errors import APIError
from server.schemas import CompletionRequest, parse_completion
from specdec.params import SamplingParams

DEFAULT_MAX_TOKENS = 128  # of a line that says nothing about its length
MAX_LINE_BYTES = 16 * 2**20
MAX_SECONDS = 1e13  # an arrival may count from any moment, also in milliseconds
# What of a body decides which tokens come; the rest (stop strings, bias, response formats) is not looked at.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)


class TextTokenizer(Protocol):
    """What is needed of the model's tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def chat_text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> str: ...


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One line in ids of the model. Seconds; None where the line does not say."""

    line: int
    prompt: tuple[int, ...]
    output: tuple[int, ...] | None
    max_tokens: int
    arrival: float | None
    latency: float | None
    sampling: Mapping[str, Any]  # SAMPLING_FIELDS that the line has, and a seed in any case

    @property
    def num_output_tokens(self) -> int:
        """Recorded, or else the most that was asked for."""
        return self.max_tokens if self.output is None else len(self.output)

    def params(self, max_tokens: int, stop_token_ids: frozenset[int]) -> SamplingParams:
        """The sampling parameters of a run here."""
        given = {name: value for name, value in self.sampling.items() if name != "seed"}
        given["top_k"] = max(0, given.get("top_k", 0))
        seed = self.sampling["seed"] % 2**64
        return SamplingParams(seed=seed, max_tokens=max_tokens, stop_token_ids=stop_token_ids, **given)

    def body(self, model: str, max_tokens: int) -> dict[str, Any]:
        """The body that asks a Truedraft server the same."""
        return {"model": model, "prompt": list(self.prompt), "max_tokens": max_tokens, **self.sampling}


@dataclass(frozen=True, slots=True)
class BadLine:
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Traffic:
    requests: tuple[RecordedRequest, ...]
    bad_lines: tuple[BadLine, ...]


def read_traffic(path: Path, tokenizer: TextTokenizer, *, vocab_size: int, max_model_len: int) -> Traffic:
    """Read ``path``. A line that cannot be used becomes a BadLine; blank lines are skipped.

    Raises CommandError if the file cannot be read or no line can be used.
    """
    requests: list[RecordedRequest] = []
    bad: list[BadLine] = []
    try:
        for number, line in enumerate(read_lines(path, MAX_LINE_BYTES), start=1):
            if line is not None and not line.strip():
                continue
            try:
                requests.append(_parse(number, line, tokenizer, vocab_size, max_model_len))
            except (ValueError, ModelError) as error:
                bad.append(BadLine(number, shown(" ".join(str(error).split()))))
            except Exception as error:  # whatever a tokenizer or a template makes of what it does not foresee
                reason = f"cannot be used: {type(error).__name__}: {' '.join(str(error).split())}"
                bad.append(BadLine(number, shown(reason)))
    except OSError as error:
        raise CommandError(f"--traffic {path}: {error.strerror or error}") from error
    except ForeignError as error:
        raise CommandError(f"--traffic {path} {error}") from error
    if not requests:
        first = f"; line {bad[0].line}: {bad[0].reason}" if bad else ""
        raise CommandError(f"--traffic {path} holds no line that can be used ({len(bad)} bad){first}")
    return Traffic(tuple(requests), tuple(bad))


def _parse(
    number: int, line: bytes | None, tokenizer: TextTokenizer, vocab_size: int, max_model_len: int
) -> RecordedRequest:
    """Raises ValueError or ModelError with the reason."""
    if line is None:
        raise ForeignError(f"is longer than {MAX_LINE_BYTES:,} bytes")
    value = parse_json(line)
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    prompt = _prompt(value, tokenizer)
    output = _ids_or_text(value, "output", tokenizer)
    for name, ids in (("the prompt", prompt), ("output", output or ())):
        wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"{name} holds the token id {shown(wrong)}; the model's vocabulary has {vocab_size}")
    if not prompt:
        raise ValueError("the prompt is empty")
    room = max_model_len - len(prompt)
    if room < 1:
        raise ValueError(f"the prompt has {len(prompt)} tokens; the model's context has {max_model_len}")
    checked = _checked(value)
    if output is not None:
        output = output[:room]
    return RecordedRequest(
        line=number,
        prompt=prompt,
        output=output or None,
        max_tokens=min(room, checked.max_tokens),
        arrival=_seconds(value, "arrival", least=None),
        latency=_seconds(value, "latency", least=0.0),
        # Of a request without a seed the line is the seed: two runs of it can then be compared.
        sampling={
            name: getattr(checked, name) if name != "seed" or checked.seed is not None else number
            for name in SAMPLING_FIELDS
        },
    )


def _prompt(value: Mapping[str, Any], tokenizer: TextTokenizer) -> tuple[int, ...]:
    messages = value.get("messages")
    if (messages is None) == (value.get("prompt") is None):
        raise ValueError("must have one of prompt and messages")
    if messages is None:
        ids = _ids_or_text(value, "prompt", tokenizer)
        assert ids is not None
        return ids
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages) or not messages:
        raise ValueError("messages must be a list of objects, not empty")
    tools = value.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError("tools must be a list")
    return tuple(tokenizer.encode(tokenizer.chat_text(messages, tools), add_special_tokens=False))


def _ids_or_text(value: Mapping[str, Any], name: str, tokenizer: TextTokenizer) -> tuple[int, ...] | None:
    found = value.get(name)
    if found is None:
        return None
    if isinstance(found, str):
        # An output goes on from its prompt: it gets no begin-of-text token of its own.
        return tuple(tokenizer.encode(found, add_special_tokens=name == "prompt"))
    if isinstance(found, list) and all(type(i) is int for i in found):
        return tuple(found)
    if name == "prompt" and isinstance(found, list):
        raise ValueError("prompt must be a string or a list of token ids; write a line for each of several prompts")
    raise ValueError(f"{name} must be a string or a list of token ids")


def _checked(value: Mapping[str, Any]) -> CompletionRequest:
    """The fields that a run here needs, checked as the server checks them."""
    body: dict[str, Any] = {"model": "", "prompt": "-"}
    body |= {name: value[name] for name in SAMPLING_FIELDS if name in value}
    lengths = (value.get("max_tokens"), value.get("max_completion_tokens"), DEFAULT_MAX_TOKENS)
    body["max_tokens"] = next(length for length in lengths if length is not None)
    try:
        request = parse_completion(body)
    except APIError as error:
        raise ValueError(error.message) from error
    if request.max_tokens < 1:
        raise ValueError("max_tokens must be at least 1")
    return request


def _seconds(value: Mapping[str, Any], name: str, *, least: float | None) -> float | None:
    found = value.get(name)
    if found is None:
        return None
    # Beyond the bound nothing can be computed with them; it also takes whole numbers that no double holds.
    usable = isinstance(found, int | float) and not isinstance(found, bool) and -MAX_SECONDS <= found <= MAX_SECONDS
    if not usable or (least is not None and found < least):
        raise ValueError(f"{name} must be a number of seconds, got {shown(found, 60)!r}")
    return float(found)
