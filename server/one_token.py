"""One token a chunk: what one step brought of a choice, taken apart again, for clients that count chunks."""

from __future__ import annotations

from dataclasses import replace

from scheduler.request import ChoiceEvent


class TokenByToken:
    """Splits the events of one choice into events of at most one token. Joined they are the events that came.

    A token brings the text that it completed, as far as the event has that text: a stop string that may be on its way
    holds text back, which then comes with the event's last token. ::

        token_texts of all tokens so far   . . . . . . . . | a b c | d e | f g
        text of all events so far          . . . . . .       behind: what the tokens have and no event gave yet
    """

    __slots__ = ("_behind",)

    def __init__(self) -> None:
        self._behind = 0  # characters

    def split(self, event: ChoiceEvent) -> list[ChoiceEvent]:
        """In order; the prompt's logprobs come with the first, the end with the last."""
        known = self._behind  # characters of the event's text that the tokens up to here have brought
        ends = [known := known + len(text) for text in event.token_texts]
        self._behind = max(0, known - len(event.text))
        last = len(event.token_ids) - 1
        if last < 1:
            return [event]
        parts: list[ChoiceEvent] = []
        given = 0
        for i in range(last):
            end = max(given, min(ends[i], len(event.text)))
            part = _token(event, i, event.text[given:end])
            parts.append(replace(part, finish_reason=None, stop_reason=None, timing=None))
            given = end
        return [*parts, _token(event, last, event.text[given:])]


def _token(event: ChoiceEvent, i: int, text: str) -> ChoiceEvent:
    return replace(
        event,
        token_ids=event.token_ids[i : i + 1],
        text=text,
        token_texts=event.token_texts[i : i + 1],
        logprobs=None if event.logprobs is None else event.logprobs[i : i + 1],
        prompt_logprobs=event.prompt_logprobs if i == 0 else None,
    )
