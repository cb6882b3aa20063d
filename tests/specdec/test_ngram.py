"""The n-gram drafter against a naive search over prompt and output."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvcache.table import BlockTable
from specdec.drafters.base import DraftRequest
from specdec.drafters.ngram import NgramDrafter
from specdec.params import SamplingParams
from specdec.sequence import Sequence

VOCAB = 50


def sequence(tokens: list[int], seq_id: int = 0, stop_token_ids: frozenset[int] = frozenset()) -> Sequence:
    return Sequence(seq_id, tokens, SamplingParams(seed=0, stop_token_ids=stop_token_ids), BlockTable(16))


class CountingList(list[int]):
    """Counts the elements that are read by index or slice."""

    reads = 0

    def __getitem__(self, key: object) -> object:  # type: ignore[override]
        self.reads += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
        return super().__getitem__(key)  # type: ignore[index]


class CountingSequence(Sequence):
    def __init__(self, seq: Sequence) -> None:
        super().__init__(seq.seq_id, seq.tokens, seq.params, seq.table)
        self.tokens = CountingList(seq.tokens)

    @property
    def reads(self) -> int:
        return self.tokens.reads  # type: ignore[attr-defined,no-any-return]

    def forget_reads(self) -> None:
        self.tokens.reads = 0  # type: ignore[attr-defined]


def drafter(max_n: int = 4, min_n: int = 2, max_sequences: int = 1024) -> NgramDrafter:
    return NgramDrafter(vocab_size=VOCAB, max_n=max_n, min_n=min_n, max_sequences=max_sequences)


def propose(ngram: NgramDrafter, seq: Sequence, max_drafts: int = 4) -> list[int]:
    (draft,) = ngram.propose([DraftRequest(seq, max_drafts)])
    return draft


def naive(tokens: list[int], max_drafts: int, max_n: int, min_n: int) -> list[int]:
    """Search backwards for each n; the continuation is read from tokens and the draft itself."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for i in range(max_drafts):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1], []),
        ([1, 2], []),
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # the most recent of equally long matches
        ([7, 1, 2, 3, 9, 1, 2, 4, 9, 7, 1, 2], [3, 9, 1, 2]),  # a longer match wins over a more recent one
        ([5, 5], []),  # one equal token is below min_n
        ([5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 1, 2], [1, 2, 1, 2]),
        ([8, 1, 2, 3, 1, 2, 3], [1, 2, 3, 1]),
    ],
)
def test_draft_is_the_continuation_of_the_best_match(tokens: list[int], draft: list[int]) -> None:
    assert propose(drafter(), sequence(tokens)) == draft


def test_periodic_text_fills_any_number_of_drafts() -> None:
    assert propose(drafter(), sequence([3, 1, 2, 1, 2]), 9) == [1, 2, 1, 2, 1, 2, 1, 2, 1]


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    max_drafts=st.integers(1, 12),
    min_n=st.integers(1, 3),
    extra=st.integers(0, 3),
)
def test_same_proposals_as_a_naive_search(tokens: list[int], max_drafts: int, min_n: int, extra: int) -> None:
    seq = sequence(tokens)
    assert propose(drafter(min_n + extra, min_n), seq, max_drafts) == naive(tokens, max_drafts, min_n + extra, min_n)


def test_draft_ends_with_the_first_stop_token() -> None:
    seq = sequence([1, 2, 3, 9, 4, 1, 2], stop_token_ids=frozenset({9}))
    assert propose(drafter(), seq) == [3, 9]


def test_draft_stays_within_the_vocabulary() -> None:
    assert propose(drafter(), sequence([1, 2, 3, VOCAB, 4, 1, 2])) == [3]


def test_each_request_gets_its_own_draft() -> None:
    first, second, third = sequence([1, 2, 3, 1, 2], 1), sequence([4, 5, 6, 4, 5], 2), sequence([1], 3)
    requests = [DraftRequest(first, 2), DraftRequest(second, 1), DraftRequest(third, 3)]
    assert drafter().propose(requests) == [[3, 1], [6], []]


def test_sequence_is_not_mutated() -> None:
    seq = sequence([1, 2, 3, 1, 2])
    before = copy.deepcopy(seq.tokens)
    propose(drafter(), seq, 8)
    assert seq.tokens == before


def test_release_frees_the_state_and_unknown_ids_are_fine() -> None:
    ngram = drafter()
    seq = sequence([1, 2, 3], 5)
    propose(ngram, seq)
    assert ngram.num_sequences == 1
    ngram.release(5)
    ngram.release(5)
    assert ngram.num_sequences == 0


def test_update_of_a_sequence_without_drafts_keeps_no_state() -> None:
    ngram = drafter()
    ngram.update(sequence([1, 2, 3]), 1)
    assert ngram.num_sequences == 0


def test_number_of_indexed_sequences_is_bounded_and_the_forgotten_come_back() -> None:
    ngram = drafter(max_sequences=2)
    sequences = [sequence([1, 2, 3, 1, 2], i) for i in range(3)]
    for seq in [*sequences, sequences[0]]:
        assert propose(ngram, seq, 1) == [3]
        assert ngram.num_sequences <= 2


def test_the_sequence_used_longest_ago_is_forgotten_first() -> None:
    ngram = drafter(max_sequences=2)
    first, second, third = (CountingSequence(sequence([1, 2, 3, 1, 2], i)) for i in range(3))
    for seq in (first, second, first, third):
        propose(ngram, seq)
    first.forget_reads()
    propose(ngram, first)
    still_there = first.reads
    second.forget_reads()
    propose(ngram, second)
    assert still_there < second.reads


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_rollback_of_tokens_leaves_no_trace(count: int) -> None:
    ngram = drafter()
    seq = sequence([1, 2, 3, 4, 1, 2, 7, 8, 1, 2])
    propose(ngram, seq)
    del seq.tokens[-count:]
    assert propose(ngram, seq) == naive(seq.tokens, 4, 4, 2)


def test_tokens_rewritten_unseen_leave_no_trace() -> None:
    ngram = drafter()
    seq = sequence([1, 2, 3, 1, 2])
    propose(ngram, seq)
    seq.tokens[2:] = [4, 5, 1, 2]
    assert propose(ngram, seq) == [4, 5, 1, 2]


def test_index_grows_by_new_tokens_only() -> None:
    """Amortised O(1): once indexed, a prefix is not read again."""
    seq = CountingSequence(sequence([i % 50 for i in range(2000)]))
    ngram = drafter()
    propose(ngram, seq)
    seq.forget_reads()
    for token in range(10):
        seq.tokens.append(token)
        ngram.update(seq, 1)
        propose(ngram, seq)
    assert seq.reads < 10 * 100


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_n": 1, "min_n": 2}, "min_n = 2 and max_n = 1"),
        ({"max_n": 1, "min_n": 0}, "min_n = 0"),
        ({"max_sequences": 0}, "must be positive"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafter(**sizes)


class NgramMachine(RuleBasedStateMachine):
    """Any history of growth, rollback, replacement and release leaves the proposals those of a fresh search."""

    @initialize(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20), min_n=st.integers(1, 2))
    def build(self, tokens: list[int], min_n: int) -> None:
        self.min_n = min_n
        self.ngram = drafter(4, min_n, max_sequences=2)
        self.sequences = {i: sequence(tokens, i) for i in range(3)}

    @rule(seq_id=st.integers(0, 2), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5), told=st.booleans())
    def grow(self, seq_id: int, tokens: list[int], told: bool) -> None:
        self.sequences[seq_id].tokens += tokens
        if told:
            self.ngram.update(self.sequences[seq_id], len(tokens))

    @rule(seq_id=st.integers(0, 2), count=st.integers(1, 5))
    def shrink(self, seq_id: int, count: int) -> None:
        tokens = self.sequences[seq_id].tokens
        del tokens[max(1, len(tokens) - count) :]
        self.ngram.update(self.sequences[seq_id], 0)

    @rule(seq_id=st.integers(0, 2), tail=st.lists(st.integers(0, 2), min_size=1, max_size=5), more=st.integers(0, 3))
    def rewrite(self, seq_id: int, tail: list[int], more: int) -> None:
        tokens = self.sequences[seq_id].tokens
        tokens[max(1, len(tokens) - len(tail)) :] = tail + [0] * more

    @rule(seq_id=st.integers(0, 2), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20))
    def replace(self, seq_id: int, tokens: list[int]) -> None:
        self.sequences[seq_id] = sequence(tokens, seq_id)

    @rule(seq_id=st.integers(0, 2))
    def release(self, seq_id: int) -> None:
        self.ngram.release(seq_id)

    @rule(seq_ids=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True), max_drafts=st.integers(1, 6))
    def propose(self, seq_ids: list[int], max_drafts: int) -> None:
        drafts = self.ngram.propose([DraftRequest(self.sequences[i], max_drafts) for i in seq_ids])
        assert drafts == [naive(self.sequences[i].tokens, max_drafts, 4, self.min_n) for i in seq_ids]
        assert self.ngram.num_sequences <= 2


TestNgramMachine = NgramMachine.TestCase
TestNgramMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
