"""A draft from what followed earlier matches: the most frequent token each time, as long as it is likely enough."""

from __future__ import annotations

from collections.abc import Container


class ContinuationReader:
    """Reads drafts out of texts.

    ``confidence[length][occurrences][agreeing]`` is the probability of the next token (see
    :mod:`specdec.drafters.confidence`); a draft ends before the product of these falls below ``min_probability``,
    before an id outside the vocabulary, and with the first stop token.
    """

    def __init__(self, confidence: list[list[list[float]]], *, min_probability: float, vocab_size: int) -> None:
        self._confidence = confidence
        self._solo = [row[1][1] for row in confidence]
        self._longest = len(confidence) - 1
        self._min_probability = min_probability
        self._vocab_size = vocab_size

    def read(
        self, text: list[int], occurrences: tuple[int, ...], length: int, limit: int, stops: Container[int]
    ) -> tuple[list[int], list[float]]:
        """At most ``limit`` ids after a match of ``length`` tokens that stood before each of ``occurrences``.

        Those that went another way than the draft drop out as it grows, and so do those whose text ended (at a negative
        number). Of equally frequent tokens the one after the newest occurrence is taken. At the end of ``text`` reading
        goes on in the draft itself, as if the text were periodic. Returns the ids, and for each the probability that it
        and all before it are right.
        """
        ids: list[int] = []
        cumulative: list[float] = []
        alive = list(occurrences)
        end, longest = len(text), self._longest
        probability = 1.0
        while (count := len(ids)) < limit:
            if len(alive) == 1:
                self._read_one(text, alive[0], length, limit, stops, ids, cumulative)
                break
            tokens = [text[at] if (at := first + count) < end else ids[at - end] for first in alive]
            token = tokens[-1]
            agreeing = tokens.count(token)
            if agreeing < len(tokens) or token < 0:
                if min(tokens) < 0:
                    alive = [first for first, found in zip(alive, tokens, strict=True) if found >= 0]
                    if not alive:
                        break
                    continue
                if 2 * agreeing <= len(tokens):
                    token = max(reversed(tokens), key=tokens.count)
                    agreeing = tokens.count(token)
                alive = [first for first, found in zip(alive, tokens, strict=True) if found == token]
            probability *= self._confidence[min(length + count, longest)][len(tokens)][agreeing]
            if probability < self._min_probability or token >= self._vocab_size:
                break
            ids.append(token)
            cumulative.append(probability)
            if token in stops:
                break
        return ids, cumulative

    def _read_one(
        self,
        text: list[int],
        first: int,
        length: int,
        limit: int,
        stops: Container[int],
        ids: list[int],
        cumulative: list[float],
    ) -> None:
        """Go on with one occurrence, which needs no votes."""
        solo, longest = self._solo, self._longest
        lowest, vocab_size = self._min_probability, self._vocab_size
        probability = cumulative[-1] if cumulative else 1.0
        at, end = first + len(ids), len(text)
        reach = length + len(ids)
        for _ in range(limit - len(ids)):
            token = text[at] if at < end else ids[at - end]
            probability *= solo[reach if reach < longest else longest]
            if probability < lowest or not 0 <= token < vocab_size:
                return
            ids.append(token)
            cumulative.append(probability)
            if token in stops:
                return
            at += 1
            reach += 1
