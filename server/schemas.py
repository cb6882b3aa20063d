"""The body of POST /v1/completions: each field typed strictly, bounded, and named in the error when it is wrong.

What depends on the model (ids, context) or on a setting (n, stop) is checked in server/resolve.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from server.errors import APIError, bad_request, shorten

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_TOKEN_IDS = 4096  # in stop_token_ids
MAX_STRING = 4096  # in stop and the inert strings
MAX_BAD_WORDS = 256  # each is looked for at every position
MAX_BAD_WORD = 256  # characters
MAX_MEMBERS = 16  # in an object other than logit_bias
MAX_PARTS = 1024  # of a prediction
INT32_MAX = 2**31 - 1

Prompt = str | list[int]  # text or token ids


def _is_id(value: object) -> bool:
    return type(value) is int


def _check_prompt(value: object) -> object:
    """One of the four forms, never empty; becomes a tuple of prompts. The range of ids is checked later."""
    if isinstance(value, str):
        if not value:
            raise ValueError("must not be empty")
        return (value,)
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    if not value:
        raise ValueError("must not be an empty list")
    if all(map(_is_id, value)):
        return (value,)
    for i, item in enumerate(value):
        if _is_id(value[0]) and _is_id(item):
            continue
        if not isinstance(item, type(value[0])) or not isinstance(item, (str, list)):
            raise ValueError(
                f"must hold only strings, only token ids or only lists of token ids; item {i} is {shorten(item)}"
            )
        if not item:
            raise ValueError(f"must not hold an empty prompt; item {i} is empty")
        if isinstance(item, list) and not all(map(_is_id, item)):
            wrong = next(token for token in item if not _is_id(token))
            raise ValueError(f"must hold token ids; item {i} holds {shorten(wrong)}")
    return tuple(value)


def _check_stop(value: object) -> object:
    return _check_strings(value, MAX_STRING)


def _check_bad_words(value: object) -> object:
    if isinstance(value, list) and len(value) > MAX_BAD_WORDS:
        raise ValueError(f"holds {len(value)} strings; at most {MAX_BAD_WORDS} are allowed")
    return _check_strings(value, MAX_BAD_WORD)


def _check_strings(value: object, longest: int) -> object:
    """A string or a list of strings, none empty; becomes a tuple."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise ValueError("must be a string or a list of strings")
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"must hold strings; it holds {shorten(item)}")
        if not item:
            raise ValueError("must not hold an empty string")
        if len(item) > longest:
            raise ValueError(f"holds a string of {len(item)} characters; at most {longest} are allowed")
    return tuple(items)


def _check_ids(value: object) -> object:
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids")
    for item in value:
        if not _is_id(item):
            raise ValueError(f"must hold token ids; it holds {shorten(item)}")
    return tuple(value)


def _check_stop_ids(value: object) -> object:
    if isinstance(value, list) and len(value) > MAX_TOKEN_IDS:
        raise ValueError(f"holds {len(value)} ids; at most {MAX_TOKEN_IDS} are allowed")
    return _check_ids(value)


def _check_logit_bias(value: object) -> object:
    """An object from token id (JSON writes it as a string) to a number; becomes sorted pairs."""
    if not isinstance(value, dict):
        raise ValueError("must be an object from token id to a number")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    bias: dict[int, float] = {}
    for name, number in value.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise ValueError(f"has the key {shorten(name)}, which is not a token id")
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not -100 <= number <= 100:
            raise ValueError(f"has the value {shorten(number)} for token {name}; it must be a number from -100 to 100")
        if int(name) in bias:
            raise ValueError(f"names token {int(name)} twice")
        bias[int(name)] = float(number)
    return tuple(sorted(bias.items()))


def _check_content(value: object) -> object:
    """A text, or a list of text parts as OpenAI's clients send them; becomes one text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    if not value:
        raise ValueError("must not be an empty list")
    if len(value) > MAX_PARTS:
        raise ValueError(f"holds {len(value)} parts; at most {MAX_PARTS} are allowed")
    texts: list[str] = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or set(part) != {"type", "text"}:
            raise ValueError(f'must hold objects of "type" and "text"; part {i} is {_members(part)}')
        if part["type"] != "text" or not isinstance(part["text"], str):
            wrong = "type" if part["type"] != "text" else "text"
            raise ValueError(f"must hold text parts; part {i} has the {wrong} {shorten(part[wrong])}")
        texts.append(part["text"])
    return "".join(texts)


def _members(value: object) -> str:
    if not isinstance(value, dict):
        return shorten(value)
    return f"an object of {', '.join(shorten(name) for name in list(value)[:4]) or 'nothing'}"


# Plain: what is checked here in full, pydantic need not go through again, holding up all other threads.
_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_ID_LIST = {"type": "array", "items": {"type": "integer"}}
_Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                _ID_LIST,
                {"type": "array", "items": _ID_LIST},
            ]
        }
    ),
]
_Bias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_check_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
_Stop = Annotated[tuple[str, ...], PlainValidator(_check_stop), WithJsonSchema(_STRINGS)]
_BadWords = Annotated[tuple[str, ...], PlainValidator(_check_bad_words), WithJsonSchema(_STRINGS)]
_Ids = Annotated[tuple[int, ...], PlainValidator(_check_ids), WithJsonSchema(_ID_LIST)]
_StopIds = Annotated[tuple[int, ...], PlainValidator(_check_stop_ids), WithJsonSchema(_ID_LIST)]
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_Content = Annotated[
    str,
    PlainValidator(_check_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]}),
]
_Inert = Annotated[str, Field(max_length=MAX_STRING)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class StreamOptions(_Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class Speculation(_Strict):
    """What this request wants of speculation; it can change the speed, never the output."""

    num_speculative_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    drafter: str | None = Field(None, min_length=1, max_length=64)


class Prediction(_Strict):
    """OpenAI's predicted output: what much of the answer should be like. It changes the speed, never the output."""

    type: Literal["content"]
    content: _Content


class CompletionRequest(_Strict):
    """A null stands for the default, as OpenAI's clients send it."""

    model: str = Field(max_length=MAX_STRING)
    prompt: _Prompts
    max_tokens: int = Field(16, ge=0, le=INT32_MAX)
    n: int = Field(1, ge=1, le=INT32_MAX)
    best_of: int | None = Field(None, ge=1, le=INT32_MAX)
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = False

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=INT32_MAX)  # -1 and 0: off
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: _Bias = ()
    min_tokens: int = Field(0, ge=0, le=INT32_MAX)
    allowed_token_ids: _Ids | None = None
    bad_words: _BadWords = ()

    stop: _Stop = ()
    stop_token_ids: _StopIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT32_MAX)

    priority: int = Field(0, ge=-INT32_MAX, le=INT32_MAX)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    speculation: Speculation | None = None
    prediction: Prediction | None = None

    # Known and inert.
    user: _Inert | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"
    safety_identifier: _Inert | None = None
    prompt_cache_key: _Inert | None = None
    include_obfuscation: Literal[False] = False


# Part of the contract, refused until they can be honoured.
NOT_SUPPORTED = ("suffix", "response_format", "structured_outputs")


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Raises APIError 400 with ``param`` named; unknown and unsupported fields are errors even when null."""
    for name in body:
        if name in NOT_SUPPORTED:
            if body[name] is not None:
                raise bad_request(f"{name} is not supported yet", name, "unsupported_parameter")
        elif name not in CompletionRequest.model_fields:
            raise bad_request(f"unknown parameter: {shorten(name)}", name[:64], "unknown_parameter")
    for name in ("metadata", "stream_options", "speculation", "prediction"):
        value = body.get(name)
        if isinstance(value, dict) and len(value) > MAX_MEMBERS:  # before pydantic writes an error for each
            raise bad_request(f"{name} has {len(value)} members; at most {MAX_MEMBERS} are allowed", name)
    given = {name: value for name, value in body.items() if value is not None}
    try:
        request = CompletionRequest.model_validate(given)
    except ValidationError as exc:
        raise _as_bad_request(exc) from None
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    return request


def _as_bad_request(exc: ValidationError) -> APIError:
    """The first error, with the value in the message and a dotted name in ``param``."""
    error = exc.errors(include_url=False)[0]
    top = str(error["loc"][0])
    nested = error["loc"][1:2] if top in ("stream_options", "speculation", "metadata", "prediction") else ()
    param = ".".join([top, *(str(part)[:64] for part in nested)])
    if error["type"] == "missing":
        return bad_request(f"{param} is required", param, "missing_required_parameter")
    if error["type"] == "extra_forbidden":
        return bad_request(f"unknown parameter: {param}", param, "unknown_parameter")
    if error["type"] == "value_error":
        return bad_request(f"{param} {error['ctx']['error']}", param)
    message = re.sub(r"^\w+ should ", "", error["msg"])
    message = re.sub(r"dictionary or instance of \w+", "object", message).replace("be False", "be false")
    return bad_request(f"{param} should {message}; it is {shorten(error['input'])}", param)
