"""Text of one choice, token by token: UTF-8 that spans tokens, and stop strings that span tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from scheduler.request import TextDecision

REPLACEMENT = "\ufffd"
# An incomplete character is at most three bytes, so at most three tokens; what stands this far back is settled.
SETTLED_AFTER = 4
# Invalid bytes without end would make the window, and the cost of a token, grow without end.
MAX_HELD = 16


class Decoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalText:
    """Turns token ids into text piece by piece; the pieces joined are the decoded whole.

    ::

        ids      . . . . . | a b c | d e
                 text given  ^prefix ^read     d e: held, their last character is incomplete

    ``ids[prefix:read]`` gives the decoder the context it needs (a leading space depends on what precedes it).
    A piece ends only where the text does not end in U+FFFD: that is a character whose bytes are not all there yet.
    """

    __slots__ = ("_context", "_decoder", "_ids", "_read", "_skip_special", "_skipped")

    def __init__(
        self, decoder: Decoder, skip_special_tokens: bool = True, shown_special_ids: frozenset[int] = frozenset()
    ) -> None:
        self._decoder = decoder
        self._skipped = decoder.special_token_ids - shown_special_ids if skip_special_tokens else frozenset()
        self._skip_special = skip_special_tokens and not shown_special_ids  # else those to skip never get to decode
        self._ids: list[int] = []  # from the prefix on
        self._read = 0  # text of _ids[:_read] was given: it is _context
        self._context = ""

    def push(self, token_id: int) -> str:
        """The text that became final with this token; often "", never part of a character."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._decoder.decode(self._ids, self._skip_special)
        if text.endswith(REPLACEMENT):
            return self._give_settled(text) if len(self._ids) - self._read > MAX_HELD else ""
        return self._advance(text)

    def flush(self) -> str:
        """What is held, with U+FFFD for bytes that never became a character."""
        if self._read == len(self._ids):
            return ""
        return self._advance(self._decoder.decode(self._ids, self._skip_special))

    def _give_settled(self, text: str) -> str:
        """Give up to a token boundary that splits no character and that no later token can change."""
        for end in range(len(self._ids) - SETTLED_AFTER, self._read, -1):
            head = self._decoder.decode(self._ids[:end], self._skip_special)
            if head + self._decoder.decode(self._ids[end:], self._skip_special) == text:
                later = self._ids[end:]
                del self._ids[end:]
                piece = self._advance(head)
                self._ids += later
                return piece
        return ""

    def _advance(self, text: str) -> str:
        if text.startswith(self._context):
            piece = text[len(self._context) :]
        else:
            # A run of byte tokens that was valid so far and is not with the new bytes: what was given stays.
            piece = self._decoder.decode(self._ids[self._read :], self._skip_special)
        if piece:
            # The prefix moves only over tokens with text, so the context is never empty for want of visible tokens.
            del self._ids[: self._read]
            self._context = self._decoder.decode(self._ids, self._skip_special)
        self._read = len(self._ids)
        return piece


class StopText:
    """Finds the earliest stop string in text that arrives in pieces, and holds back what may become one."""

    __slots__ = ("_held", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_stop
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """(text that is final, the stop string that ended it or None)."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = min(((text.find(stop), -len(stop), stop) for stop in self._stops if stop in text), default=None)
        if found is not None:
            start, _, stop = found
            self._held = ""
            return text[: start + len(stop) if self._include else start], stop
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """First index from which the rest of the text is the start of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)


class ChoiceText:
    """The text filter of one choice (scheduler.request.TextFilter): decides what is committed.

    A stop string ends the choice at the token that completed it; later tokens of the run are discarded. What a run
    holds never changes the outcome: tokens are looked at one by one. The text of a stop token is left out unless
    ``include_stop``. Stop strings count only from output token ``min_tokens`` on.
    """

    __slots__ = ("_finished", "_include_stop", "_min_tokens", "_num_tokens", "_stop_ids", "_stops", "_text")

    def __init__(
        self,
        decoder: Decoder,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_special_ids: frozenset[int] = frozenset(),
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._text = IncrementalText(decoder, skip_special_tokens, shown_special_ids)
        self._stops = StopText(stop, include_stop)
        self._include_stop = include_stop
        self._stop_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._finished = False

    def push(self, token_ids: Sequence[int], is_last: bool) -> TextDecision:
        if self._finished:
            raise ValueError("the choice has ended; its text filter takes no more tokens")
        texts: list[str] = []  # per token, before stop strings hold anything back
        final: list[str] = []
        for i, token_id in enumerate(token_ids):
            last = is_last and i == len(token_ids) - 1
            piece = ""
            if not (last and token_id in self._stop_ids and not self._include_stop):
                piece = self._text.push(token_id)
            if last:
                piece += self._text.flush()
            self._num_tokens += 1
            texts.append(piece)
            text, stop = self._find(piece)
            final.append(text)
            if stop is not None:
                self._finished = True
                return TextDecision(i + 1, "".join(final), tuple(texts), stopped=True, stop_reason=stop)
        if is_last:
            self._finished = True
            if not token_ids:
                piece = self._text.flush()
                text, stop = self._find(piece)
                final.append(text)
                if stop is not None:
                    return TextDecision(0, "".join(final), (), stopped=True, stop_reason=stop)
            final.append(self._stops.flush())
        return TextDecision(len(token_ids), "".join(final), tuple(texts))

    def _find(self, piece: str) -> tuple[str, str | None]:
        if self._num_tokens < self._min_tokens:
            # Neither found nor held: text before min_tokens cannot be part of a stop.
            return piece, None
        return self._stops.push(piece)
