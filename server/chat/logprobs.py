"""Logprobs in the shape of a chat's answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.logprobs import TokenBytes, finite, token_text
from specdec.plan import TokenLogprobs


def chat_logprobs(entries: Sequence[TokenLogprobs], count: int, tokenizer: TokenBytes) -> dict[str, Any]:
    """The ``logprobs`` of a choice: one entry a token, each with the ``count`` likeliest."""
    content = [
        {
            **_token(entry.token_id, entry.logprob, tokenizer),
            "top_logprobs": [_token(token_id, logprob, tokenizer) for token_id, logprob in entry.top[:count]],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token(token_id: int, logprob: float, tokenizer: TokenBytes) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
