"""The history that a sequence's processed distribution depends on, kept up to date token by token.

Derived from ``Sequence.tokens`` and nothing else: it may be dropped and built again at any time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray


class History:
    """Tokens so far with their counts. Tokens are pushed at the end and taken back in reverse order.

    ::

        entries      p0 p1 p2 | o0 o1 ..            distinct ids: the prompt's, then the output's new ones
        counts        2  0  1 |  1  3               occurrences in the output
                      ^ num_prompt_entries

    An output entry whose count returns to 0 is always the last one, because tokens leave in reverse order.
    """

    def __init__(self, tokens: Seq[int], num_prompt_tokens: int) -> None:
        self.tokens: list[int] = []
        self.num_prompt_tokens = num_prompt_tokens
        prompt_ids = list(dict.fromkeys(tokens[:num_prompt_tokens]))
        self._num_prompt_entries = len(prompt_ids)
        self._num_entries = len(prompt_ids)
        self._where = {token: entry for entry, token in enumerate(prompt_ids)}
        self._ids = np.array(prompt_ids, dtype=np.int64)
        self._counts = np.zeros(len(prompt_ids), dtype=np.int64)
        self.tokens.extend(tokens[:num_prompt_tokens])
        for token in tokens[num_prompt_tokens:]:
            self.push(token)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def seen_ids(self) -> NDArray[np.int64]:
        """Distinct ids of prompt and output, ``[n]``; a view, valid until the next push."""
        return self._ids[: self._num_entries]

    @property
    def output_counts(self) -> NDArray[np.int64]:
        """How often each of ``seen_ids`` stands in the output, ``[n]``; a view, valid until the next push."""
        return self._counts[: self._num_entries]

    def push(self, token: int) -> None:
        """``token`` follows."""
        entry = self._where.get(token)
        if entry is None:
            entry = self._num_entries
            if entry == len(self._ids):
                self._grow()
            self._where[token] = entry
            self._ids[entry] = token
            self._counts[entry] = 0
            self._num_entries += 1
        self._counts[entry] += 1
        self.tokens.append(token)

    def truncate(self, num_tokens: int) -> None:
        """Take back output tokens until ``num_tokens`` remain. Raises ValueError if the prompt would be cut."""
        if num_tokens < self.num_prompt_tokens:
            raise ValueError(f"cannot cut a history to {num_tokens} tokens: its prompt has {self.num_prompt_tokens}")
        while len(self.tokens) > num_tokens:
            token = self.tokens.pop()
            entry = self._where[token]
            self._counts[entry] -= 1
            if entry >= self._num_prompt_entries and self._counts[entry] == 0:
                assert entry == self._num_entries - 1, (token, entry, self._num_entries)
                del self._where[token]
                self._num_entries -= 1

    def sync(self, tokens: Seq[int]) -> None:
        """Catch up with ``tokens``, which this history is a prefix of, or the other way round."""
        if len(tokens) < len(self.tokens):
            self.truncate(len(tokens))
        for position in range(len(self.tokens), len(tokens)):
            self.push(tokens[position])

    def _grow(self) -> None:
        room = max(64, 2 * len(self._ids))
        ids, counts = np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.int64)
        ids[: self._num_entries] = self._ids[: self._num_entries]
        counts[: self._num_entries] = self._counts[: self._num_entries]
        self._ids, self._counts = ids, counts

    def check_integrity(self, tokens: Seq[int]) -> None:
        """Raise AssertionError unless this equals a history built from ``tokens`` in one go."""
        fresh = History(tokens, self.num_prompt_tokens)
        assert self.tokens == list(tokens), "the history holds other tokens than the sequence"
        mine = dict(zip(self.seen_ids.tolist(), self.output_counts.tolist(), strict=True))
        theirs = dict(zip(fresh.seen_ids.tolist(), fresh.output_counts.tolist(), strict=True))
        assert mine == theirs, (mine, theirs)
