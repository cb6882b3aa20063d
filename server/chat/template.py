"""From messages to the ids of a prompt: the model's own template, and a client's text that stays text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from server.errors import APIError, bad_request, unavailable
from server.resolve import THREAD_ABOVE_CHARS
from server.worker import WorkerError, WorkerFailure, WorkerProcess, WorkerTimeout

MAX_CHARS = 16 * 2**20  # of a rendered chat; a body is smaller, but a template may repeat parts of it
MEMORY_BYTES = 2**30
MAX_WAITING = 256  # chats that wait for the process
NO_TEMPLATE = "no_chat_template"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"  # as checkpoints name them


class ChatTokenizer(Protocol):
    """What a chat needs of the model's tokenizer. Thread-safe."""

    def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]: ...

    def encode_ordinary(self, texts: Sequence[str]) -> list[list[int]]: ...

    def fewest_tokens(self, text: str) -> int: ...

    @property
    def chat_templates(self) -> Mapping[str, str]: ...

    @property
    def special_token_names(self) -> Mapping[str, Any]: ...

    @property
    def control_tokens(self) -> Mapping[str, bool]: ...

    @property
    def control_ids(self) -> frozenset[int]: ...


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """``pieces``: text of the template and ordinary text, alternating; see :meth:`server.chat.guard.Guard.split`."""

    pieces: tuple[str, ...]
    num_chars: int
    num_control: int  # control tokens in it


class ChatTemplate:
    """Renders chats in a process of its own, within ``timeout`` seconds each."""

    def __init__(
        self, tokenizer: ChatTokenizer, *, timeout: float, worker: Callable[..., WorkerProcess] = WorkerProcess
    ) -> None:
        self.tokenizer = tokenizer
        self._timeout = timeout
        self._templates = dict(tokenizer.chat_templates)
        self._waiting = 0
        self._worker = worker("server.chat.render", memory_bytes=MEMORY_BYTES)

    def source(self, with_tools: bool) -> str | None:
        """The template that is used; None if the model has none."""
        names = (_WITH_TOOLS, _DEFAULT) if with_tools else (_DEFAULT,)
        return next((self._templates[name] for name in names if name in self._templates), None)

    async def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> RenderedChat:
        """Raises APIError: 400 if the model has no template or the template refuses the messages, 503 if too many chats
        wait, 500 if the process fails.
        """
        template = self.source(bool(tools))
        if template is None:
            raise bad_request("this model has no chat template; use /v1/completions", "messages", NO_TEMPLATE)
        if "developer" not in template:
            messages = [_as_system(message) for message in messages]
        if self._waiting >= MAX_WAITING:
            raise unavailable(
                "overloaded", f"{self._waiting} chats are waiting for the chat template", reason="templates"
            )
        self._waiting += 1
        try:
            pieces, num_control = await self._worker.call(
                "render",
                template,
                self.tokenizer.special_token_names,
                self.tokenizer.control_tokens,
                messages,
                tools,
                MAX_CHARS,
                timeout=self._timeout,
            )
        except (WorkerError, WorkerTimeout) as error:
            raise bad_request(f"the model's chat template refuses the messages: {error}", "messages") from None
        except WorkerFailure as error:
            raise APIError(500, f"the model's chat template failed: {error}") from None
        finally:
            self._waiting -= 1
        return RenderedChat(tuple(pieces), sum(map(len, pieces)), num_control)

    async def fewest_tokens(self, chat: RenderedChat) -> int:
        """A number that ``encode`` does not go below, found without tokenizing."""
        if chat.num_chars > THREAD_ABOVE_CHARS:
            return await asyncio.to_thread(fewest_tokens, chat.pieces, self.tokenizer)
        return fewest_tokens(chat.pieces, self.tokenizer)

    async def encode(self, chat: RenderedChat, add_special_tokens: bool) -> list[int]:
        """The prompt's ids. Raises APIError if a client's text becomes a control token nevertheless."""
        if chat.num_chars > THREAD_ABOVE_CHARS:
            return await asyncio.to_thread(self._encode, chat, add_special_tokens)
        return self._encode(chat, add_special_tokens)

    def _encode(self, chat: RenderedChat, add_special_tokens: bool) -> list[int]:
        ids = encode_pieces(chat.pieces, False, self.tokenizer)
        # A tokenizer may first make another text of it: of wide letters plain ones, of small letters large ones.
        control = self.tokenizer.control_ids
        if sum(token_id in control for token_id in ids) > chat.num_control:
            raise bad_request(
                "the messages hold a text that this model's tokenizer takes for a control token", "messages"
            )
        return encode_pieces(chat.pieces, True, self.tokenizer) if add_special_tokens else ids

    def close(self) -> None:
        self._worker.close()


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


_LINE = "\n"


def fewest_tokens(pieces: Sequence[str], tokenizer: ChatTokenizer) -> int:
    """What ``encode_pieces`` does not go below."""
    ordinary = len(pieces) // 2  # none is empty, so each has a token
    return max(ordinary, sum(tokenizer.fewest_tokens(piece) for piece in pieces))


def encode_pieces(pieces: Sequence[str], add_special_tokens: bool, tokenizer: ChatTokenizer) -> list[int]:
    """Pieces at even places with control tokens recognised, those at odd ones as ordinary text.

    Behind another piece a tokenizer must not do what it does at the beginning of a text (put a space there, as those
    do that came from sentencepiece). So such a piece is encoded behind a line end, whose ids are taken off again.
    """
    first, later, ordinary = pieces[0], pieces[2::2], list(dict.fromkeys(pieces[1::2]))
    (head,) = tokenizer.encode_many((first,), add_special_tokens)
    if len(pieces) == 1:
        return head
    tail: list[int] = []
    if add_special_tokens:
        head, tail = _at_the_ends(first, head, tokenizer)
    control = iter(_behind_a_line(later, lambda texts: tokenizer.encode_many(texts, False)))
    plain = dict(zip(ordinary, _behind_a_line(ordinary, tokenizer.encode_ordinary), strict=True))
    ids = list(head)
    for i, piece in enumerate(pieces[1:]):
        ids += next(control) if i % 2 else plain[piece]
    return ids + tail


def _behind_a_line(texts: Sequence[str], encode: Callable[[Sequence[str]], list[list[int]]]) -> list[list[int]]:
    (line,) = encode((_LINE,))
    found = encode([_LINE + text for text in texts])
    joined = [
        i for i, ids in enumerate(found) if ids[: len(line)] != line
    ]  # the line end became part of a longer token
    for i, ids in zip(joined, encode([texts[i] for i in joined]), strict=True):
        found[i] = [*line, *ids]
    return [ids[len(line) :] for ids in found]


def _at_the_ends(text: str, ids: list[int], tokenizer: ChatTokenizer) -> tuple[list[int], list[int]]:
    """What adding special tokens put in front of a text, with the text's ids; and what it put behind."""
    (own,) = tokenizer.encode_many((text,), False)
    for start in range(len(ids) - len(own), -1, -1):
        if ids[start : start + len(own)] == own:
            return ids[: start + len(own)], ids[start + len(own) :]
    return ids, []
