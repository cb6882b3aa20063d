"""Which tokens of a predicted output came true as accepted drafts: OpenAI's ``accepted_prediction_tokens``.

::

    prediction      p0 p1 p2 p3 p4 p5         each counts once at most
    output          p0 p1  x  y p4 p5
    accepted draft   *  *     *     *         p0, p1 and p5 count: y stands nowhere in the prediction behind x

An output token stands at a place of the prediction if the token before it does too (p0: if that is the prompt's last).
So it does not matter who drafted it: the text may stand in the prompt as well, and then be drafted from there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class PredictionIndex:
    """The places of a prediction, for all choices of a request. Raises ValueError for an empty one."""

    __slots__ = ("_places", "last_prompt_token", "token_ids")

    def __init__(self, last_prompt_token: int, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise ValueError("a prediction has at least one token")
        self.last_prompt_token = last_prompt_token
        self.token_ids = token_ids
        self._places: dict[tuple[int, int], list[int]] = {}  # by the token before and the token itself, rising
        before = last_prompt_token
        for place, token in enumerate(token_ids):
            self._places.setdefault((before, token), []).append(place)
            before = token

    def find(self, before: int, token: int, start: int) -> int | None:
        """Where ``token`` stands behind ``before``: the first place from ``start`` on, else the first of all."""
        places = self._places.get((before, token))
        if places is None:
            return None
        at = bisect_left(places, start)
        return places[at if at < len(places) else 0]


class PredictionTally:
    """Of one choice. Takes its output in order; a token costs one look-up, however long the prediction is."""

    __slots__ = ("_before", "_index", "_next", "_seen", "num_accepted")

    def __init__(self, index: PredictionIndex) -> None:
        self.num_accepted = 0
        self._index = index
        self._seen = bytearray(len(index.token_ids))  # 1: this place counts already
        self._before = index.last_prompt_token
        self._next = 0  # behind the last place where the output was

    def take(self, token_ids: Sequence[int], num_drafts: int) -> None:
        """New output tokens, the first ``num_drafts`` of them accepted drafts."""
        for i, token in enumerate(token_ids):
            # Where the output runs along the prediction, this finds the next place: it is the first from there on.
            place = self._index.find(self._before, token, self._next)
            if place is not None:
                self._next = place + 1
                if i < num_drafts and not self._seen[place]:
                    self._seen[place] = 1
                    self.num_accepted += 1
            self._before = token
