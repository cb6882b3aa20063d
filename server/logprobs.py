"""Logprobs in the shapes of the completions answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from specdec.plan import TokenLogprobs

MINUS_INFINITY = -9999.0  # JSON has no -inf


class TokenBytes(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...


def token_text(tokenizer: TokenBytes, token_id: int) -> str:
    """One token for people: its text, or ``bytes:\\x..`` as OpenAI writes what is no whole character."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(logprob: float) -> float:
    return MINUS_INFINITY if logprob == -math.inf else logprob


def _top(entry: TokenLogprobs, tokenizer: TokenBytes, count: int) -> dict[str, float]:
    """The ``count`` best and the token itself; of tokens that read alike the likelier stays."""
    top: dict[str, float] = {}
    for token_id, logprob in entry.top[:count]:
        top.setdefault(token_text(tokenizer, token_id), finite(logprob))
    top.setdefault(token_text(tokenizer, entry.token_id), finite(entry.logprob))
    return top


class LogprobsBuilder:
    """Builds one choice's ``logprobs`` objects; ``text_offset`` continues from chunk to chunk."""

    __slots__ = ("_count", "_offset", "_tokenizer")

    def __init__(self, tokenizer: TokenBytes, count: int) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._offset = 0

    def build(
        self,
        token_ids: Sequence[int],
        token_texts: Sequence[str],
        entries: Sequence[TokenLogprobs | None],
    ) -> dict[str, Any]:
        """One entry a token; None where a token has no distribution (the first of a prompt)."""
        if not len(token_ids) == len(token_texts) == len(entries):
            raise ValueError(
                f"logprobs of {len(token_ids)} tokens with {len(token_texts)} texts and {len(entries)} entries"
            )
        offsets: list[int] = []
        for text in token_texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": [token_text(self._tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else _top(entry, self._tokenizer, self._count) for entry in entries],
            "text_offset": offsets,
        }


def prompt_logprobs(
    entries: Sequence[TokenLogprobs], count: int, tokenizer: TokenBytes
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's ``prompt_logprobs``: null for the first token, then id -> {logprob, rank, decoded_token}."""
    result: list[dict[str, dict[str, Any]] | None] = [None]
    for entry in entries:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:count], start=1)]
        if all(token_id != entry.token_id for token_id, _, _ in ranked):
            ranked.append((entry.token_id, entry.logprob, entry.rank))
        result.append(
            {
                str(token_id): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": token_text(tokenizer, token_id),
                }
                for token_id, logprob, rank in ranked
            }
        )
    return result
