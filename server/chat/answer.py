"""From the engine's events to the choices of a chat: the same deltas make a stream and a whole message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from scheduler.request import ChoiceEvent, ChoiceTiming
from server.chat.logprobs import chat_logprobs
from server.chat.schema import ChatRequest
from server.logprobs import prompt_logprobs
from server.resolve import ResolvedPrompt, Tokenizer
from server.step_trace import traced_steps
from server.tools.deltas import Content, Delta, JoinedDeltas, delta_body, merged_body


class DeltaParser(Protocol):
    """Turns the text of one choice into deltas; the join of the deltas does not depend on how the text was cut."""

    num_calls: int  # begun so far

    @property
    def unfinished(self) -> bool:
        """Whether the last call has begun and not ended."""

    def push(self, text: str) -> list[Delta]:
        """The next piece of text; gives what became sure with it."""

    def finish(self) -> list[Delta]:
        """There is no more text: gives the rest."""


class PlainText:
    """All text is content."""

    num_calls = 0
    unfinished = False

    def push(self, text: str) -> list[Delta]:
        return [Content(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


class ChatChoice:
    """One choice. ``take`` turns an event into streamed choices; ``whole`` is all of them as one message."""

    def __init__(
        self,
        index: int,
        prompt: ResolvedPrompt,
        request: ChatRequest,
        tokenizer: Tokenizer,
        parser: DeltaParser,
        ends: frozenset[int],
    ) -> None:
        """``ends``: the model's end-of-text tokens."""
        self.index = index
        self.num_tokens = 0
        self.timing: ChoiceTiming | None = None
        self._prompt = prompt
        self._request = request
        self._tokenizer = tokenizer
        self._parser = parser
        self._ends = ends
        self._joined = JoinedDeltas()
        self._started = False
        wanted = request.num_logprobs is not None
        self._whole: dict[str, Any] = {
            "logprobs": {"content": [], "refusal": None} if wanted else None,
            "finish_reason": None,
            "stop_reason": None,
            **({"token_ids": []} if request.return_token_ids else {}),
            **({"speculation": {"steps": []}} if request.traced else {}),
        }

    def take(self, event: ChoiceEvent, *, keep: bool = True) -> list[dict[str, Any]]:
        """The event as streamed choices. ``keep``: remember it for ``whole``.

        The first says whose message it is. What belongs to tokens and not to text comes with the last delta of the
        event that the tokens came in; it may be an empty one, since text can lag behind its tokens. Token by token,
        every token has one delta, empty or not.
        """
        deltas = self._parser.push(event.text)
        if event.finish_reason is not None:
            deltas += self._parser.finish()
        if self._request.token_by_token:
            pieces = [self._piece(merged_body(deltas))]
        else:
            pieces = [self._piece(delta_body(delta)) for delta in deltas]
        about_tokens = self._about_tokens(event)
        if about_tokens:
            if not pieces:
                pieces.append(self._piece({}))
            pieces[-1].update(about_tokens)
        if not self._started:
            self._started = True
            pieces.insert(0, {**self._piece({"role": "assistant", "content": ""}), **self._about_prompt(event)})
        self.num_tokens += len(event.token_ids)
        if event.timing is not None:
            self.timing = event.timing
        if keep:
            self._keep(deltas, pieces)
        return pieces

    def whole(self) -> dict[str, Any]:
        """All events taken so far, joined."""
        calls = self._joined.tool_calls
        content = self._joined.content
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        return {"index": self.index, "message": message, **self._whole}

    @property
    def mean_logprob(self) -> float:
        return 0.0  # nothing chooses among a chat's choices

    def _piece(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def _about_tokens(self, event: ChoiceEvent) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if self._request.num_logprobs is not None and event.token_ids:
            about["logprobs"] = chat_logprobs(event.logprobs or (), self._request.num_logprobs, self._tokenizer)
        if self._request.return_token_ids and event.token_ids:
            about["token_ids"] = list(event.token_ids)
        if event.trace is not None:
            about["speculation"] = {"steps": traced_steps(event, self._tokenizer)}
        if event.finish_reason is not None:
            parser = self._parser
            by_itself = event.finish_reason == "stop" and event.stop_reason in self._ends
            called = parser.num_calls > 0 and not parser.unfinished and by_itself
            about["finish_reason"] = "tool_calls" if called else event.finish_reason
            about["stop_reason"] = event.stop_reason
        return about

    def _about_prompt(self, event: ChoiceEvent) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if self._request.return_token_ids:
            about["prompt_token_ids"] = list(self._prompt.token_ids)
        if self._request.prompt_logprobs is not None:
            entries = event.prompt_logprobs or ()
            about["prompt_logprobs"] = prompt_logprobs(entries, self._request.prompt_logprobs, self._tokenizer)
        return about

    def _keep(self, deltas: Sequence[Delta], pieces: Sequence[dict[str, Any]]) -> None:
        self._joined.add(deltas)
        whole = self._whole
        for piece in pieces:
            whole["finish_reason"] = piece["finish_reason"]
            whole["stop_reason"] = piece["stop_reason"]
            if piece["logprobs"] is not None:
                whole["logprobs"]["content"] += piece["logprobs"]["content"]
            if "token_ids" in piece:
                whole["token_ids"] += piece["token_ids"]
            if "speculation" in piece:
                whole["speculation"]["steps"] += piece["speculation"]["steps"]
            for name in ("prompt_token_ids", "prompt_logprobs"):
                if name in piece:
                    whole[name] = piece[name]
