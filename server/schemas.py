"""Request bodies: each field typed strictly, bounded, and named in the error when it is wrong.

What depends on the model (ids, context) or on a setting (n, stop) is checked in server/resolve.py.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.errors import APIError, bad_request, shorten
from server.fields import MAX_STRING, BadWords, Bias, Content, Ids, Inert, Prompts, Stop, StopIds
from server.output_format import ResponseFormat, StructuredOutputs

MAX_LOGPROBS = 20
MAX_MEMBERS = 16  # in an object other than logit_bias
INT32_MAX = 2**31 - 1

Request = TypeVar("Request", bound="Strict")


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    one_token_per_chunk: bool = False  # for clients that count chunks
    include_obfuscation: Literal[False] = False


class Speculation(Strict):
    """What this request wants of speculation; it can change the speed, never the output."""

    num_speculative_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    drafter: str | None = Field(None, min_length=1, max_length=64)
    trace: bool = False  # the answer tells where its tokens come from


class Prediction(Strict):
    """OpenAI's predicted output: what much of the answer should be like. It changes the speed, never the output."""

    type: Literal["content"]
    content: Content


class GenerationRequest(Strict):
    """What every endpoint that generates text takes. A null stands for the default, as OpenAI's clients send it.

    An endpoint adds its prompt, its length and its logprobs, and says in the properties what they come to.
    """

    model: str = Field(max_length=MAX_STRING)
    n: int = Field(1, ge=1, le=INT32_MAX)
    stream: bool = False
    stream_options: StreamOptions | None = None
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
    logit_bias: Bias = ()
    min_tokens: int = Field(0, ge=0, le=INT32_MAX)
    allowed_token_ids: Ids | None = None
    bad_words: BadWords = ()

    stop: Stop = ()
    stop_token_ids: StopIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT32_MAX)

    priority: int = Field(0, ge=-INT32_MAX, le=INT32_MAX)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    speculation: Speculation | None = None
    prediction: Prediction | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    timeout: float | None = Field(None, gt=0)  # seconds from its arrival

    # Known and inert.
    user: Inert | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"
    safety_identifier: Inert | None = None
    prompt_cache_key: Inert | None = None
    include_obfuscation: Literal[False] = False

    @property
    @abstractmethod
    def output_limit(self) -> int | None:
        """The most tokens of a choice; None: as many as fit behind the prompt."""

    @property
    def output_limit_name(self) -> str:
        """The field that ``output_limit`` came from, for messages."""
        return "max_tokens"

    @property
    def prompt_name(self) -> str:
        """The field that the prompt came from, for messages."""
        return "prompt"

    @property
    def num_sampled(self) -> int:
        """Choices computed for each prompt."""
        return self.n

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives wanted with each output token; None: no logprobs."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives needed with each prompt token; None: the prompt is not scored."""
        return self.prompt_logprobs

    @property
    def traced(self) -> bool:
        """Whether the answer tells of each step what was drafted."""
        return self.speculation is not None and self.speculation.trace

    @property
    def token_by_token(self) -> bool:
        """Whether a chunk of the stream may hold one token at most."""
        return self.stream_options is not None and self.stream_options.one_token_per_chunk


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Prompts
    max_tokens: int = Field(16, ge=0, le=INT32_MAX)
    best_of: int | None = Field(None, ge=1, le=INT32_MAX)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def output_limit(self) -> int:
        return self.max_tokens

    @property
    def num_sampled(self) -> int:
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        if self.num_sampled > self.n and self.logprobs is None:
            return 0  # the best are chosen by it
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)


# Part of the contract, refused until they can be honoured.
NOT_SUPPORTED = ("suffix",)

# Fields that are objects: bounded before they are looked at, and named with their member when it is wrong.
OBJECTS = frozenset({"metadata", "stream_options", "speculation", "prediction"})


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Raises APIError 400 with ``param`` named; unknown and unsupported fields are errors even when null."""
    return parse_request(CompletionRequest, body, not_supported=NOT_SUPPORTED)


def parse_request(
    kind: type[Request],
    body: Mapping[str, Any],
    *,
    not_supported: Collection[str] = (),
    objects: frozenset[str] = OBJECTS,
) -> Request:
    """The body as a request of this kind. ``not_supported``: known fields that are refused unless they are null.

    Raises APIError 400 with ``param`` named; unknown fields are errors even when null.
    """
    for name in body:
        if name in not_supported:
            if body[name] is not None:
                raise bad_request(f"{name} is not supported yet", name, "unsupported_parameter")
        elif name not in kind.model_fields:
            raise bad_request(f"unknown parameter: {shorten(name)}", name[:64], "unknown_parameter")
    for name in objects:
        value = body.get(name)
        if isinstance(value, dict) and len(value) > MAX_MEMBERS:  # before pydantic writes an error for each
            raise bad_request(f"{name} has {len(value)} members; at most {MAX_MEMBERS} are allowed", name)
    given = {name: value for name, value in body.items() if value is not None}
    try:
        request = kind.model_validate(given)
    except ValidationError as exc:
        raise _as_bad_request(exc, objects) from None
    if isinstance(request, GenerationRequest) and request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    return request


def _as_bad_request(exc: ValidationError, objects: frozenset[str]) -> APIError:
    """The first error, with the value in the message and a dotted name in ``param``."""
    error = exc.errors(include_url=False)[0]
    top = str(error["loc"][0])
    nested = error["loc"][1:2] if top in objects else ()
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
