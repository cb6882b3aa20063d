"""The suffix drafter: what followed the longest earlier match of the last tokens, here or in past outputs.

::

    own text      prompt and output so far, and the predicted output if the client sent one
    store         outputs under the same cache salt, running and finished, the newest that fit
    match         the longest suffix of the sequence's tokens that stood in one of them before, up to max_match tokens
    draft         what followed its latest max_occurrences places: the most frequent token each time

A draft goes on while the product of the estimates (longer matches and more that agree: likelier; see
:mod:`specdec.drafters.confidence`) stays above ``min_probability``, so its length follows from match length and counts.
Of the two sources the one is taken whose draft is expected to have more tokens accepted.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specdec.drafters.base import DraftRequest
from specdec.drafters.confidence import OWN_TEXT, PAST_OUTPUTS, MatchLaw
from specdec.drafters.context_tree import BYTES_PER_TEXT_ENTRY, MAX_BYTES_PER_OCCURRENCE, ContextTree
from specdec.drafters.continuation import ContinuationReader
from specdec.drafters.output_store import OutputStore
from specdec.drafters.reliability import Reliability
from specdec.drafters.scored import ScoredDraft
from specdec.sequence import Sequence

_START, _PREDICTION_END = -1, -2  # no other text may hold these
_TAIL = 8  # tokens compared to notice that a sequence's tokens were changed
_MAX_BYTES_PER_TOKEN = BYTES_PER_TEXT_ENTRY + MAX_BYTES_PER_OCCURRENCE


@dataclass(frozen=True, slots=True)
class SuffixPolicy:
    """What is matched and how much is proposed.

    A draft has at most ``max_drafts_per_match`` times match length plus ``max_drafts_offset`` tokens: (1, -1) keeps
    drafts shorter than their match, which suits crowded batches and sampling; infinity leaves it to the probabilities.
    Raises ValueError for impossible sizes.
    """

    min_match: int = 1  # tokens
    max_match: int = 32  # tokens; longer matches count as this
    max_occurrences: int = 8  # places a match is continued from, the newest
    min_probability: float = 0.1  # of a whole draft, by the drafter's own estimate
    max_drafts_per_match: float = math.inf
    max_drafts_offset: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(f"1 <= min_match <= max_match, got {self.min_match} and {self.max_match}")
        if self.max_occurrences < 2:
            raise ValueError(f"max_occurrences is at least 2, got {self.max_occurrences}")
        if not 0.0 <= self.min_probability <= 1.0:
            raise ValueError(f"min_probability lies in [0, 1], got {self.min_probability}")
        if not self.max_drafts_per_match >= 0.0:
            raise ValueError(f"max_drafts_per_match is not negative, got {self.max_drafts_per_match}")

    def max_drafts(self, match_length: int, limit: int) -> int:
        """The most tokens to draft after a match, at most ``limit``."""
        if self.max_drafts_per_match == math.inf:
            return limit
        return min(limit, int(self.max_drafts_per_match * match_length) + self.max_drafts_offset)


class _Track:
    """What is known of one sequence."""

    __slots__ = ("checked", "draft", "gap", "inserted", "salt", "seen", "stored", "tail", "tokens", "tree")

    def __init__(self, tokens: list[int], salt: bytes | None, stored: int) -> None:
        self.tokens = tokens  # the sequence's own list
        self.salt = salt  # None: its output does not go to the store, and it draws nothing from there
        self.stored = stored  # tokens[:stored] are prompt, or in the store
        self.seen = 0  # tokens[:seen] are in the tree's text
        self.inserted = 0  # places of the text before this one are in the tree, where they belong there
        self.gap = 0  # this place and the next are no occurrences: nothing stands before them
        self.checked = 0  # so many tokens there were when last looked at
        self.tail: list[int] = []  # the last of these
        self.tree: ContextTree | None = None
        self.draft: ScoredDraft | None = None  # proposed, and not yet compared with what came

    def see(self) -> None:
        self.seen = len(self.tokens)
        self.look()

    def look(self) -> None:
        """Remember where the tokens end, so that a change is noticed."""
        tokens = self.tokens
        self.checked = len(tokens)
        self.tail = tokens[-_TAIL:]

    def follows(self, tokens: list[int]) -> bool:
        """False if ``tokens`` is another list, shrank, or was changed where it ended last."""
        checked = self.checked
        return self.tokens is tokens and tokens[max(0, checked - _TAIL) : checked] == self.tail


class SuffixDrafter:
    """Drafts from the longest earlier match. State follows ``sequence.tokens`` by itself, as the n-gram drafter's does.

    A proposal and a token each cost one walk of at most ``max_match`` nodes in each source, however much they hold. A
    step takes in at most ``max_inserts`` tokens of prompts and predictions, so that long ones hold up nobody else;
    the rest follows in the steps after, and is not drafted from until then.
    Memory, as estimated by ``memory_bytes``, stays within ``max_own_bytes`` (own texts; a sequence for which there is
    no room left drafts from the store alone) plus ``max_store_bytes`` (0: no store). At most ``max_sequences`` are
    followed, the one used longest ago is forgotten first. Outputs reach the store some tens of tokens at a time, and
    when they end. Raises ValueError for impossible sizes.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        policy: SuffixPolicy | None = None,
        max_own_bytes: int = 256 * 2**20,
        max_store_bytes: int = 64 * 2**20,
        max_salts: int = 4096,
        max_sequences: int = 1024,
        max_inserts: int = 2048,
    ) -> None:
        if min(vocab_size, max_sequences, max_inserts) < 1 or max_own_bytes < 0:
            raise ValueError(
                "vocab_size, max_sequences and max_inserts must be positive and max_own_bytes not negative, "
                f"got {vocab_size}, {max_sequences}, {max_inserts} and {max_own_bytes}"
            )
        self._max_inserts = max_inserts
        self._inserts_left = 0  # of this step
        self.policy = policy = SuffixPolicy() if policy is None else policy
        self._max_own_bytes = max_own_bytes
        self._max_sequences = max_sequences
        self._own_bytes = 0
        self._tracks: OrderedDict[int, _Track] = OrderedDict()
        self.store = OutputStore(
            max_bytes=max_store_bytes,
            max_salts=max_salts,
            max_depth=policy.max_match,
            max_recent=policy.max_occurrences,
        )
        self.reliability = Reliability()
        self._read_own = self._reader(OWN_TEXT, vocab_size).read
        self._read_store = self._reader(PAST_OUTPUTS, vocab_size).read

    @property
    def name(self) -> str:
        return "suffix"

    @property
    def num_sequences(self) -> int:
        """Sequences that are followed."""
        return len(self._tracks)

    @property
    def memory_bytes(self) -> int:
        """Estimate of all that is held: own texts and store."""
        return self._own_bytes + self.store.memory_bytes

    @property
    def max_memory_bytes(self) -> int:
        """What ``memory_bytes`` never exceeds."""
        return self._max_own_bytes + self.store.max_bytes

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        """See :class:`specdec.drafters.base.Drafter`. A draft ends with the first stop token in it."""
        return [draft.token_ids for draft in self.propose_scored(requests)]

    def propose_scored(self, requests: Seq[DraftRequest]) -> list[ScoredDraft]:
        """The same drafts with estimates; the source is ``own`` or ``store``."""
        self._inserts_left = self._max_inserts
        return [self._propose(request.sequence, request.max_drafts) for request in requests]

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        """See what became of the draft and feed the store; the own text grows when the sequence is asked again."""
        tokens = sequence.tokens
        track = self._follow(sequence, len(tokens) - num_emitted)
        if track.draft is not None:
            draft, track.draft = track.draft, None
            self.reliability.record(draft.token_ids, draft.cumulative, tokens[len(tokens) - num_emitted :])
        track.look()
        if track.salt is not None:
            self._store(track, track.salt, self.store.unit_tokens + self.store.ahead_tokens)

    def release(self, seq_id: int) -> None:
        track = self._tracks.pop(seq_id, None)
        if track is not None:
            self._drop_tree(track)
            if track.salt is not None:
                self._store(track, track.salt, 1)

    def check_integrity(self) -> None:
        """Raise AssertionError unless texts, trees, store and bytes agree."""
        self.store.check_integrity()
        trees = [track.tree for track in self._tracks.values() if track.tree is not None]
        for tree in trees:
            tree.check_integrity()
        assert self._own_bytes == sum(tree.memory_bytes for tree in trees) <= self._max_own_bytes, self._own_bytes
        assert len(self._tracks) <= self._max_sequences, len(self._tracks)

    def _reader(self, law: MatchLaw, vocab_size: int) -> ContinuationReader:
        policy = self.policy
        confidence = law.table(policy.max_match, policy.max_occurrences)
        return ContinuationReader(confidence, min_probability=policy.min_probability, vocab_size=vocab_size)

    def _propose(self, sequence: Sequence, max_drafts: int) -> ScoredDraft:
        track = self._follow(sequence, len(sequence.tokens))
        if track.tree is None:
            self._plant(track, sequence)
        if track.tree is not None:
            self._inserts_left -= self._grow(track, self._inserts_left)
        track.see()
        tree, policy = track.tree, self.policy
        stops = sequence.params.stop_token_ids
        best = ScoredDraft([], [])
        length = 0
        if tree is not None:
            text = tree.text
            length, occurrences = tree.find(text, len(text))
            if length >= policy.min_match:
                limit = policy.max_drafts(length, max_drafts)
                ids, cumulative = self._read_own(text, occurrences, length, limit, stops)
                if ids:
                    best = ScoredDraft(ids, cumulative, length, "own")
        else:
            text = [_START, *track.tokens[-policy.max_match :]]
        if track.salt is not None and length < policy.max_match:
            length, occurrences, store_text = self.store.find(track.salt, text, len(text))
            if length >= policy.min_match:
                limit = policy.max_drafts(length, max_drafts)
                ids, cumulative = self._read_store(store_text, occurrences, length, limit, stops)
                if sum(cumulative) > best.expected_accepted:
                    best = ScoredDraft(ids, cumulative, length, "store")
        track.draft = best if best.token_ids else None
        return best

    def _follow(self, sequence: Sequence, stored: int) -> _Track:
        """The sequence's track: a new one, with ``tokens[:stored]`` as stored, if the tokens are not those seen."""
        seq_id, tokens, table = sequence.seq_id, sequence.tokens, sequence.table
        track = self._tracks.get(seq_id)
        if track is not None and track.follows(tokens):
            self._tracks.move_to_end(seq_id)
            return track
        if track is not None:
            self._drop_tree(track)
        track = _Track(tokens, None if table.private or not self.store.max_bytes else table.salt, max(0, stored))
        self._tracks[seq_id] = track
        self._tracks.move_to_end(seq_id)
        if len(self._tracks) > self._max_sequences:
            self.release(next(iter(self._tracks)))
        return track

    def _plant(self, track: _Track, sequence: Sequence) -> None:
        """A tree for the own text, if the worst that it can need is there."""
        prediction = sequence.prediction_token_ids
        need = (len(prediction) + len(track.tokens) + self.policy.max_match + 2) * _MAX_BYTES_PER_TOKEN
        if self._own_bytes + need > self._max_own_bytes:
            return
        tree = track.tree = ContextTree(max_depth=self.policy.max_match, max_recent=self.policy.max_occurrences)
        text = tree.text
        if prediction:  # as if it had followed the prompt once
            num_prompt = sequence.num_prompt_tokens
            text += [_START, *track.tokens[max(0, num_prompt - self.policy.max_match) : num_prompt], *prediction]
            track.inserted, track.gap = len(text) - len(prediction), len(text)
            text += [_PREDICTION_END, track.tokens[0]]
        else:
            text += [_START, track.tokens[0]]
            track.inserted, track.gap = 0, 0
        self._own_bytes += tree.memory_bytes
        track.seen = 1

    def _grow(self, track: _Track, limit: int) -> int:
        """Take the tokens that it has not seen into the text, and up to ``limit`` places into the tree; give both up if
        there is no room. Returns how many places it were."""
        tree, tokens, seen = track.tree, track.tokens, track.seen
        assert tree is not None
        text, first = tree.text, track.inserted
        unseen = len(tokens) - seen
        waiting = len(text) - first + unseen
        if waiting == 0:
            return 0
        before = tree.memory_bytes
        need = waiting * MAX_BYTES_PER_OCCURRENCE + unseen * BYTES_PER_TEXT_ENTRY
        if self._own_bytes + need > self._max_own_bytes:
            self._drop_tree(track)
            return 0
        text += tokens[seen:]
        track.inserted = first + min(waiting, limit)
        for position in range(first, track.inserted):
            if not track.gap <= position <= track.gap + 1:
                tree.insert(position)
        self._own_bytes += tree.memory_bytes - before
        return track.inserted - first

    def _drop_tree(self, track: _Track) -> None:
        if track.tree is not None:
            self._own_bytes -= track.tree.memory_bytes
            track.tree = None

    def _store(self, track: _Track, salt: bytes, at_least: int) -> None:
        """Bring whole units of output to the store while ``at_least`` tokens wait for it."""
        store, tokens = self.store, track.tokens
        while len(tokens) - track.stored >= at_least:
            first = track.stored
            end = min(first + store.unit_tokens, len(tokens))
            store.add(
                salt,
                tokens[max(0, first - store.context_tokens) : first],
                tokens[first:end],
                tokens[end : end + store.ahead_tokens],
            )
            track.stored = end
