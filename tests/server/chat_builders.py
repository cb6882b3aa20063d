"""Models with chat templates, and what tests of chats share."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import httpx
from tokenizers import AddedToken

from model.tokenizer import Tokenizer as ModelTokenizer
from tests.server.builders import MODEL_NAME, byte_level_tokenizer

# ChatML with tools, names and calls: a bit of everything that templates do.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>tools' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}{% if message.name %}{{ ' ' + message.name }}{% endif %}
    {{- '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
    {%- endfor %}
    {%- if message.tool_call_id %}{{ ' for ' + message.tool_call_id }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
HELLO = [{"role": "user", "content": "the quick brown fox"}]
THINK = "<think>"  # an added token that is not special


def save_chat_model(model: Path, folder: Path, template: str = TEMPLATE) -> Path:
    """``model``, with a chat template."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def chat_tokenizer(template: str | dict[str, str] | None = TEMPLATE) -> ModelTokenizer:
    """Byte-level, with control tokens that are special and one that is not."""
    hf = byte_level_tokenizer()._hf
    hf.add_tokens([AddedToken(THINK, special=False)])
    hf.chat_template = template
    return ModelTokenizer(hf)


def post_chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={"model": MODEL_NAME, "messages": HELLO, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def joined_chat(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that a client puts together from a chat's chunks, with the shape of a whole answer's."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in copy.deepcopy(chunk["choices"]):
            delta, index = piece.pop("delta"), piece["index"]
            if index not in choices:
                assert delta == {"role": "assistant", "content": ""}
                choices[index] = {**piece, "message": {**delta, "refusal": None}}
                continue
            choice = choices[index]
            assert choice["finish_reason"] is None, "pieces after the end"
            assert "role" not in delta
            choice["message"]["content"] += delta.pop("content", "")
            for call in delta.pop("tool_calls", []):
                _join_call(choice["message"].setdefault("tool_calls", []), call)
            assert not delta
            choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
            if "token_ids" in piece:
                choice["token_ids"] = choice.get("token_ids", []) + piece["token_ids"]
            if piece["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
                choice["logprobs"]["content"] += piece["logprobs"]["content"]
    for choice in choices.values():
        if choice["message"].get("tool_calls") and not choice["message"]["content"]:
            choice["message"]["content"] = None
    return [choices[index] for index in sorted(choices)]


def _join_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    if delta["index"] == len(calls):
        calls.append({name: value for name, value in delta.items() if name != "index"})
        return
    assert delta.keys() == {"index", "function"}
    calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
