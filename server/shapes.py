"""Shapes of the answers, for the API's description and for tests; nothing is built from them.

A field without a default is always there.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class Error(Shape):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Shape):
    error: Error


class Logprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Shape):
    logprob: float
    rank: int
    decoded_token: str


class TracedStep(Shape):
    drafted: list[int]
    accepted: int = Field(ge=0)
    drafter: str | None
    emitted: list[int]
    texts: list[str]
    rejected_texts: list[str]


class SpeculationTrace(Shape):
    steps: list[TracedStep]


class CompletionChoice(Shape):
    """The last five are there if the request asked for them; in a stream the prompt's only in the first chunk."""

    index: int = Field(ge=0)
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = []
    speculation: SpeculationTrace = SpeculationTrace(steps=[])


class PromptTokensDetails(Shape):
    cached_tokens: int = Field(ge=0)


class CompletionTokensDetails(Shape):
    accepted_prediction_tokens: int = Field(ge=0)
    rejected_prediction_tokens: int = Field(ge=0)


class Usage(Shape):
    """``completion_tokens_details`` is there if a prediction was sent."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails(
        accepted_prediction_tokens=0, rejected_prediction_tokens=0
    )


class SpeculativeDecoding(Shape):
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | None
    per_step_drafted: list[int] | None


class RequestMetrics(Shape):
    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculativeDecoding | None


class CompletionHead(Shape):
    id: str = Field(pattern="^cmpl-")
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    seed: int
    choices: list[CompletionChoice]


class CompletionAnswer(CompletionHead):
    usage: Usage
    metrics: RequestMetrics | None


class CompletionChunk(CompletionHead):
    """``usage`` and ``metrics`` are there if the stream's options ask for them."""

    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class TokenLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Shape):
    content: list[ChosenLogprob]
    refusal: None


class CalledFunction(Shape):
    name: str
    arguments: str


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    """``tool_calls`` are there if there are any."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []


class ChatChoiceBase(Shape):
    """The last four are there if the request asked for them; in a stream the prompt's only in the first chunk."""

    index: int = Field(ge=0)
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = []
    speculation: SpeculationTrace = SpeculationTrace(steps=[])


class ChatChoice(ChatChoiceBase):
    message: ChatMessage


class FunctionDelta(Shape):
    name: str = ""
    arguments: str = ""


class ToolCallDelta(Shape):
    """``id``, ``type`` and the function's name come with a call's first delta, and never again."""

    index: int = Field(ge=0)
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(Shape):
    """What is new; empty where only the choice's end is."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(ChatChoiceBase):
    delta: ChatDelta


class ChatHead(Shape):
    id: str = Field(pattern="^chatcmpl-")
    created: int
    model: str
    system_fingerprint: str
    seed: int


class ChatAnswer(ChatHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics | None


class ChatChunk(ChatHead):
    """``usage`` and ``metrics`` are there if the stream's options ask for them."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(ge=1)


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class TokensAnswer(Shape):
    count: int = Field(ge=0)
    max_model_len: int = Field(ge=1)
    tokens: list[int]
    token_strs: list[str] | None


class TextAnswer(Shape):
    prompt: str


class Status(Shape):
    status: Literal["alive", "ready"]


class Version(Shape):
    version: str


class ServerInfo(BaseModel):
    """What the server is and how it is set up; docs/api.md has the parts that clients rely on."""

    version: str
    model: dict[str, Any]
    exactness: dict[str, Any]
    executor: str
    kernels: dict[str, str]
    system_fingerprint: str
    kv_cache: dict[str, Any]
    limits: dict[str, Any]
    settings: dict[str, Any]
    speculation: dict[str, Any]
    audit: dict[str, Any]
    structured_output: dict[str, Any]
    tool_calls: dict[str, Any]
