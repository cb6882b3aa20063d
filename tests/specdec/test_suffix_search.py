"""The suffix drafter against a search through the own text and the store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.drafters.base import DraftRequest
from specdec.drafters.confidence import OWN_TEXT, PAST_OUTPUTS, MatchLaw
from specdec.drafters.output_store import OutputStore
from specdec.drafters.scored import ScoredDraft
from specdec.drafters.suffix import SuffixPolicy
from tests.specdec.test_suffix import VOCAB, drafter, propose, say, scored, sequence


@dataclass
class Text:
    """Tokens, of which ``tokens[first:stop]`` are occurrences of what stands before them."""

    tokens: list[int]
    first: int
    stop: int
    endless: bool = False  # reading goes on in the draft


def naive_draft(
    texts: list[Text], query: list[int], max_drafts: int, law: MatchLaw, policy: SuffixPolicy
) -> tuple[int, list[int], list[float]]:
    for length in range(min(policy.max_match, len(query)), policy.min_match - 1, -1):
        places = [
            (text, at)
            for text in texts
            for at in range(max(text.first, length), text.stop)
            if text.tokens[at - length : at] == query[-length:]
        ]
        if places:
            break
    else:
        return 0, [], []
    alive = places[-policy.max_occurrences :]
    draft: list[int] = []
    cumulative: list[float] = []
    probability = 1.0
    while len(draft) < policy.max_drafts(length, max_drafts):
        readable = []
        for text, at in alive:
            source = text.tokens + draft if text.endless else text.tokens
            if at + len(draft) < len(source):
                readable.append((text, at, source[at + len(draft)]))
        if not readable:
            break
        counts = Counter(token for _, _, token in readable)
        most = max(counts.values())
        token = next(token for _, _, token in reversed(readable) if counts[token] == most)
        probability *= law.confidence(min(length + len(draft), policy.max_match), most, len(readable))
        if probability < policy.min_probability or token >= VOCAB:
            break
        draft.append(token)
        cumulative.append(probability)
        alive = [(text, at) for text, at, found in readable if found == token]
    return length, draft, cumulative


class SuffixMachine(RuleBasedStateMachine):
    """Any history of growth, rollback, restarts, releases and salts leaves the drafts those of a search."""

    TOKENS = st.integers(0, 2)
    UNIT, AHEAD = 4, 2
    POLICY = SuffixPolicy(max_match=5, max_occurrences=3, min_probability=0.02)
    SALTS = (b"", b"", b"a", b"b")

    @initialize(min_match=st.integers(1, 2), prediction=st.lists(TOKENS, max_size=8))
    def build(self, min_match: int, prediction: list[int]) -> None:
        self.policy = replace(self.POLICY, min_match=min_match)
        self.suffix = drafter(self.policy, max_sequences=3)
        self.suffix.store = OutputStore(
            unit_tokens=self.UNIT,
            ahead_tokens=self.AHEAD,
            max_depth=self.policy.max_match,
            max_recent=self.policy.max_occurrences,
        )
        self.units: dict[bytes, list[Text]] = {salt: [] for salt in self.SALTS}
        self.known: dict[int, int] = {}  # seq_id: tokens that need not go to the store; the order is that of use
        self.sequences = {
            i: sequence([0, 1, 2], i, salt=salt, prediction=tuple(prediction) if i == 1 else ())
            for i, salt in enumerate(self.SALTS)
        }

    def use(self, seq_id: int, stored: int) -> None:
        self.known[seq_id] = self.known.pop(seq_id, stored)
        if len(self.known) > 3:
            self.forget(next(iter(self.known)))

    def keep(self, seq_id: int, at_least: int) -> None:
        tokens, table = self.sequences[seq_id].tokens, self.sequences[seq_id].table
        while len(tokens) - self.known[seq_id] >= at_least:
            first = self.known[seq_id]
            start = max(0, first - self.policy.max_match)
            unit = tokens[first : first + self.UNIT]
            text = tokens[start:first] + unit + tokens[first + len(unit) :][: self.AHEAD]
            self.units[table.salt].append(Text(text, first - start, first - start + len(unit)))
            self.known[seq_id] = first + len(unit)

    def forget(self, seq_id: int) -> None:
        if seq_id in self.known:
            self.keep(seq_id, 1)
            del self.known[seq_id]

    @rule(seq_id=st.integers(0, 3), tokens=st.lists(TOKENS, min_size=1, max_size=9))
    def emit(self, seq_id: int, tokens: list[int]) -> None:
        seq = self.sequences[seq_id]
        before = len(seq.tokens)
        say(self.suffix, seq, tokens)
        self.use(seq_id, before)
        self.keep(seq_id, self.UNIT + self.AHEAD)

    @rule(seq_id=st.integers(0, 3))
    def release(self, seq_id: int) -> None:
        self.suffix.release(seq_id)
        self.forget(seq_id)

    @rule(seq_id=st.integers(0, 3), tokens=st.lists(TOKENS, min_size=1, max_size=12))
    def start_over_with_other_tokens(self, seq_id: int, tokens: list[int]) -> None:
        old = self.sequences[seq_id]
        new = sequence(tokens, seq_id, salt=old.table.salt, prediction=old.prediction_token_ids)
        self.sequences[seq_id] = new
        assert isinstance(propose(self.suffix, new, 1), list)
        self.known.pop(seq_id, None)
        self.use(seq_id, len(tokens))

    @rule(seq_id=st.integers(0, 3), count=st.integers(1, 4))
    def shrink(self, seq_id: int, count: int) -> None:
        tokens = self.sequences[seq_id].tokens
        if self.sequences[seq_id].num_output_tokens >= count:
            del tokens[-count:]
            assert isinstance(propose(self.suffix, self.sequences[seq_id], 1), list)
            self.known.pop(seq_id, None)
            self.use(seq_id, len(tokens))

    @rule(seq_ids=st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True), max_drafts=st.integers(1, 6))
    def propose(self, seq_ids: list[int], max_drafts: int) -> None:
        drafts = self.suffix.propose_scored([DraftRequest(self.sequences[i], max_drafts) for i in seq_ids])
        for seq_id, draft in zip(seq_ids, drafts, strict=True):
            self.use(seq_id, len(self.sequences[seq_id].tokens))
            seq = self.sequences[seq_id]
            own = [Text(seq.tokens, 1, len(seq.tokens), endless=True)]
            if seq.prediction_token_ids:
                head = seq.tokens[max(0, seq.num_prompt_tokens - self.policy.max_match) : seq.num_prompt_tokens]
                predicted = [*head, *seq.prediction_token_ids]
                own.insert(0, Text(predicted, len(head), len(predicted)))
            found = naive_draft(own, seq.tokens, max_drafts, OWN_TEXT, self.policy)
            source = "own"
            if found[0] < self.policy.max_match:
                other = naive_draft(self.units[seq.table.salt], seq.tokens, max_drafts, PAST_OUTPUTS, self.policy)
                if sum(other[2]) > sum(found[2]):
                    found, source = other, "store"
            length, ids, cumulative = found
            expected = ScoredDraft(ids, cumulative, length, source) if ids else ScoredDraft([], [])
            assert draft.token_ids == expected.token_ids
            assert draft.cumulative == pytest.approx(expected.cumulative)
            assert (draft.match_length, draft.source) == (expected.match_length, expected.source)

    @invariant()
    def counts_hold(self) -> None:
        if hasattr(self, "suffix"):
            self.suffix.check_integrity()
            assert self.suffix.num_sequences == len(self.known)
            assert self.suffix.store.num_tokens == sum(
                unit.stop - unit.first for held in self.units.values() for unit in held
            )


TestSuffixMachine = SuffixMachine.TestCase
TestSuffixMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    max_drafts=st.integers(1, 12),
    policy=st.builds(
        SuffixPolicy,
        max_match=st.integers(2, 6),
        max_occurrences=st.integers(2, 5),
        min_probability=st.sampled_from([0.0, 0.1, 0.3, 0.6]),
        max_drafts_per_match=st.sampled_from([1.0, 2.0, float("inf")]),
        max_drafts_offset=st.integers(-1, 1),
    ),
)
def test_same_drafts_as_a_search_through_the_text(tokens: list[int], max_drafts: int, policy: SuffixPolicy) -> None:
    draft = scored(drafter(policy), sequence(tokens), max_drafts)
    _, ids, cumulative = naive_draft([Text(tokens, 1, len(tokens), endless=True)], tokens, max_drafts, OWN_TEXT, policy)
    assert draft.token_ids == ids
    assert draft.cumulative == pytest.approx(cumulative)
