"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from server.chat.messages import Messages
from server.errors import bad_request
from server.schemas import INT32_MAX, MAX_LOGPROBS, GenerationRequest, parse_request
from server.tools.schema import ToolChoiceField, Tools, check_tool_fields


class ChatRequest(GenerationRequest):
    """A null stands for the default, as OpenAI's clients send it."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)  # its older name
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = False  # a template writes its own
    tools: Tools | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None  # inert

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def output_limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def prompt_name(self) -> str:
        return "messages"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


# Of OpenAI's API, or of other servers: known, and refused.
CHAT_NOT_SUPPORTED = (
    "audio",
    "function_call",
    "functions",
    "moderation",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
)
# The prompt is what the model's own template makes of the messages, and nothing else.
OF_TEMPLATES = (
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
)


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Raises APIError 400 with ``param`` named; unknown and unsupported fields are errors even when null."""
    for name in OF_TEMPLATES:
        if name in body:
            raise bad_request(
                f"{name} is not allowed: a chat is rendered by the model's own template", name, "unsupported_parameter"
            )
    request = parse_request(ChatRequest, body, not_supported=CHAT_NOT_SUPPORTED)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    if request.max_tokens not in (None, request.output_limit):
        raise bad_request(
            f"max_tokens ({request.max_tokens}) is an older name of max_completion_tokens "
            f"({request.max_completion_tokens}); give one of them",
            "max_tokens",
        )
    check_tool_fields(request.tools, request.tool_choice, request.parallel_tool_calls)
    return request
