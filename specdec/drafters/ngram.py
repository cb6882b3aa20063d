"""The n-gram drafter: what followed the last few tokens the last time they stood there.

::

    tokens      ... c a t | s a t ... c a t          max_n = 3
                    -----              -----
                    the same 3 tokens, so propose s a t

The longest match wins; among equally long ones the most recent. It costs no model and pays wherever output repeats the
prompt or itself: quoting, code, JSON, tables, names, loops.

Why ``min_n = 2`` by default: a row that is verified in vain costs a few percent of a step. After a single equal token
the guess is mostly wrong, after two it is right often enough to pay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

from specdec.drafters.base import DraftRequest
from specdec.sequence import Sequence


class _Index:
    """For each n, the end of every n-gram's most recent occurrence that has a continuation.

    ``tokens`` is the sequence's own list, which normally only grows. Of ``tokens[:end]`` every n-gram is indexed;
    the one that ends at ``len(tokens)`` never is, since nothing follows it. ``tail`` are the tokens before ``end``.
    """

    __slots__ = ("end", "last_ends", "sizes", "tail", "tokens")

    def __init__(self, tokens: list[int], sizes: range) -> None:
        self.tokens = tokens
        self.sizes = sizes
        self.end = 0
        self.tail: list[int] = []
        self.last_ends: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in sizes)

    def follows(self, tokens: list[int]) -> bool:
        """False if ``tokens`` is another list, shrank, or was rewritten where it had been indexed last."""
        end = self.end
        return self.tokens is tokens and end < len(tokens) and tokens[end - len(self.tail) : end] == self.tail

    def catch_up(self) -> None:
        """Index the n-grams that got a continuation since the last call: O(1) per new token and n."""
        tokens, first, last = self.tokens, self.end + 1, len(self.tokens)
        for n, last_ends in zip(self.sizes, self.last_ends, strict=True):
            for end in range(max(first, n), last):
                last_ends[tuple(tokens[end - n : end])] = end
        self.end = last - 1
        self.tail = tokens[max(0, last - 1 - self.sizes[0]) : last - 1]

    def find(self) -> int | None:
        """Where the continuation of the longest match starts; None without a match."""
        tokens = self.tokens
        length = len(tokens)
        for n, last_ends in zip(self.sizes, self.last_ends, strict=True):
            if n < length:
                end = last_ends.get(tuple(tokens[length - n :]))
                if end is not None:
                    return end
        return None


class NgramDrafter:
    """Looks up the last ``max_n`` down to ``min_n`` tokens in prompt and output.

    State follows ``sequence.tokens`` by itself: it is rebuilt when the list shrank, changed or was replaced, so
    preemption, resuming and rollback need no call. Memory: one dict entry per token and n, for at most
    ``max_sequences`` sequences (the one used longest ago is forgotten first, and rebuilt if it comes back);
    :meth:`release` frees it.
    Raises ValueError unless ``1 <= min_n <= max_n`` and the other sizes are positive.
    """

    def __init__(self, *, vocab_size: int, max_n: int = 4, min_n: int = 2, max_sequences: int = 1024) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"an n-gram drafter needs 1 <= min_n <= max_n, got min_n = {min_n} and max_n = {max_n}")
        if vocab_size < 1 or max_sequences < 1:
            raise ValueError(f"vocab_size and max_sequences must be positive, got {vocab_size} and {max_sequences}")
        self._vocab_size = vocab_size
        self._sizes = range(max_n, min_n - 1, -1)
        self._max_sequences = max_sequences
        self._indexes: OrderedDict[int, _Index] = OrderedDict()

    @property
    def name(self) -> str:
        return "ngram"

    @property
    def num_sequences(self) -> int:
        """Sequences with an index."""
        return len(self._indexes)

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        """See :class:`specdec.drafters.base.Drafter`. A draft ends with the first stop token in it."""
        return [self._propose(request.sequence, request.max_drafts) for request in requests]

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        """Index what was emitted, if the sequence has an index."""
        if sequence.seq_id in self._indexes:
            self._index(sequence)

    def release(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)

    def _propose(self, sequence: Sequence, max_drafts: int) -> list[int]:
        start = self._index(sequence).find()
        if start is None:
            return []
        tokens = sequence.tokens
        draft = tokens[start : start + max_drafts]
        # The match is close to the end: go on reading in the draft itself, as if the text were periodic.
        for i in range(max_drafts - len(draft)):
            draft.append(draft[i])
        stops = sequence.params.stop_token_ids
        for i, token in enumerate(draft):
            if token >= self._vocab_size:  # a prompt may hold ids that the head cannot sample
                return draft[:i]
            if token in stops:  # nothing after it can be emitted
                return draft[: i + 1]
        return draft

    def _index(self, sequence: Sequence) -> _Index:
        """The sequence's index, up to date."""
        seq_id, tokens = sequence.seq_id, sequence.tokens
        index = self._indexes.get(seq_id)
        if index is None or not index.follows(tokens):
            index = self._indexes[seq_id] = _Index(tokens, self._sizes)
        self._indexes.move_to_end(seq_id)
        if len(self._indexes) > self._max_sequences:
            self._indexes.popitem(last=False)
        index.catch_up()
        return index
