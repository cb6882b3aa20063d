"""The suffix drafter: what it drafts, what it keeps, and its part in the step."""

from __future__ import annotations

import random

import pytest

from kvcache.table import BlockTable
from specdec.drafters.base import DraftRequest
from specdec.drafters.confidence import OWN_TEXT, PAST_OUTPUTS, MatchLaw
from specdec.drafters.continuation import ContinuationReader
from specdec.drafters.scored import ScoredDraft
from specdec.drafters.suffix import SuffixDrafter, SuffixPolicy
from specdec.params import SamplingParams
from specdec.sequence import Sequence
from tests.specdec.builders import Bench, alone, prompts
from tests.specdec.test_suffix_tree import count_lines

VOCAB = 50
EAGER = SuffixPolicy(min_probability=0.0)


def sequence(
    tokens: list[int],
    seq_id: int = 0,
    *,
    stop_token_ids: frozenset[int] = frozenset(),
    prediction: tuple[int, ...] = (),
    salt: bytes = b"",
    private: bool = False,
) -> Sequence:
    params = SamplingParams(seed=0, stop_token_ids=stop_token_ids)
    return Sequence(seq_id, tokens, params, BlockTable(16, salt, private=private), prediction_token_ids=prediction)


def drafter(policy: SuffixPolicy = EAGER, **sizes: int) -> SuffixDrafter:
    return SuffixDrafter(vocab_size=VOCAB, policy=policy, **sizes)


def scored(suffix: SuffixDrafter, seq: Sequence, max_drafts: int = 4) -> ScoredDraft:
    (draft,) = suffix.propose_scored([DraftRequest(seq, max_drafts)])
    return draft


def propose(suffix: SuffixDrafter, seq: Sequence, max_drafts: int = 4) -> list[int]:
    (draft,) = suffix.propose([DraftRequest(seq, max_drafts)])
    return draft


def say(suffix: SuffixDrafter, seq: Sequence, tokens: list[int]) -> None:
    seq.tokens += tokens
    suffix.update(seq, len(tokens))


# --- what a draft is ---


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1], []),
        ([1, 2], []),
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # as often one as the other: the newer
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1, 2]),  # the more frequent one, though it is older
        ([7, 1, 2, 3, 9, 1, 2, 4, 9, 7, 1, 2], [3, 9, 1, 2]),  # a longer match wins over a newer one
        ([5, 5], [5, 5, 5, 5]),
    ],
)
def test_draft_is_what_followed_the_longest_match_most_often(tokens: list[int], draft: list[int]) -> None:
    assert propose(drafter(), sequence(tokens)) == draft


def test_longer_and_more_often_confirmed_matches_draft_further() -> None:
    def reach(match: int, times: int) -> int:
        rng = random.Random(0)
        tokens: list[int] = []
        passage = list(range(10, 10 + match)) + list(range(30, 46))
        for separator in range(times):
            tokens += [separator, *passage]
        tokens += [rng.randrange(5, 9), *passage[:match]]
        return len(propose(drafter(SuffixPolicy(min_probability=0.5)), sequence(tokens), 16))

    assert reach(2, 1) < reach(6, 1) < reach(12, 1)
    assert reach(2, 1) < reach(2, 2) < reach(2, 4)


def test_disagreement_lowers_the_estimate_and_shortens_the_draft() -> None:
    agreeing = [1, 2, 3, 4, 5, 6, 7, 8] * 3 + [1, 2, 3]
    disagreeing = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 9, 7, 8, 1, 2, 3, 4, 5, 6, 9, 8, 1, 2, 3]
    first, second = (scored(drafter(), sequence(tokens), 8) for tokens in (agreeing, disagreeing))
    assert first.token_ids[:2] == second.token_ids[:2]
    assert second.cumulative[2] < first.cumulative[2]
    cautious = SuffixPolicy(min_probability=0.4)
    lengths = [len(propose(drafter(cautious), sequence(tokens), 8)) for tokens in (agreeing, disagreeing)]
    assert lengths[1] < lengths[0]


def test_estimates_never_rise_along_a_draft_and_are_probabilities() -> None:
    rng = random.Random(3)
    suffix = drafter()
    for seq_id in range(20):
        draft = scored(suffix, sequence([rng.randrange(4) for _ in range(60)], seq_id), 12)
        assert len(draft.cumulative) == len(draft.token_ids)
        assert all(0.0 < later <= earlier <= 1.0 for earlier, later in zip([1.0, *draft.cumulative], draft.cumulative))  # noqa: B905
        assert draft.expected_accepted == pytest.approx(sum(draft.cumulative))


def test_a_draft_can_be_kept_shorter_than_its_match() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]
    shorter = SuffixPolicy(min_probability=0.0, max_drafts_per_match=1.0, max_drafts_offset=-1)
    assert propose(drafter(shorter), sequence(tokens), 8) == [5, 6, 7]
    assert propose(drafter(shorter), sequence([1, 2, 1]), 8) == []
    assert propose(drafter(), sequence(tokens), 8) == [5, 6, 7, 8, 9, 1, 2, 3]


def test_draft_ends_with_the_first_stop_token() -> None:
    stops = frozenset({9})
    assert propose(drafter(), sequence([1, 2, 3, 9, 4, 1, 2], stop_token_ids=stops)) == [3, 9]
    twice = [5, 1, 2, 3, 9, 4, 6, 1, 2, 3, 9, 4, 7, 1, 2]  # two places that agree
    assert propose(drafter(), sequence(twice, stop_token_ids=stops)) == [3, 9]


def test_draft_stays_within_the_vocabulary() -> None:
    assert propose(drafter(), sequence([1, 2, 3, VOCAB, 4, 1, 2])) == [3]
    twice = [5, 1, 2, 3, VOCAB, 4, 6, 1, 2, 3, VOCAB, 4, 7, 1, 2]  # two places that agree
    assert propose(drafter(), sequence(twice)) == [3]
    assert propose(drafter(), sequence([VOCAB - 1, 0, VOCAB - 1]), 2) == [0, VOCAB - 1]


def test_sequence_is_not_mutated_and_answers_are_the_caller_s() -> None:
    suffix, seq = drafter(), sequence([1, 2, 3, 1, 2])
    first = propose(suffix, seq, 8)
    expected = list(first)
    first.clear()
    assert seq.tokens == [1, 2, 3, 1, 2]
    assert propose(suffix, seq, 8) == expected
    nothing = sequence([1], 1)
    propose(suffix, nothing).append(3)
    assert propose(suffix, nothing) == []


def test_places_whose_text_ended_have_no_vote() -> None:
    reader = ContinuationReader(OWN_TEXT.table(4, 4), min_probability=0.0, vocab_size=VOCAB)
    text = [-3, 1, 2, 3, -1, -4, 1, 2, 3, -1, -5, 1, 2, 3, 4, -1]
    ids, cumulative = reader.read(text, (2, 7, 12), 1, 9, frozenset())
    assert ids == [2, 3, 4]
    assert cumulative[2] / cumulative[1] == pytest.approx(OWN_TEXT.confidence(3, 1, 1))
    assert reader.read(text, (4, 9), 1, 9, frozenset()) == ([], [])


# --- prediction ---


def test_a_prediction_is_drafted_from_the_first_token_on() -> None:
    seq = sequence([1, 2, 3], prediction=(20, 21, 22, 23))
    assert propose(drafter(), seq) == [20, 21, 22, 23]


def test_a_prediction_is_taken_up_again_after_a_deviation() -> None:
    suffix = drafter()
    seq = sequence([1, 2, 3], prediction=(20, 21, 22, 23, 24, 25))
    say(suffix, seq, [20, 40, 22, 23])
    assert propose(suffix, seq) == [24, 25]


# --- the store ---


def test_an_output_helps_later_requests_of_its_salt_and_no_others() -> None:
    suffix = drafter()
    first = sequence([1, 2, 3], 0, salt=b"a")
    propose(suffix, first)
    say(suffix, first, [20, 21, 22, 23, 24, 25])
    suffix.release(0)
    mine, others = sequence([4, 20, 21], 1, salt=b"a"), sequence([4, 20, 21], 2, salt=b"b")
    found = scored(suffix, mine, 3)
    assert (found.token_ids, found.source) == ([22, 23, 24], "store")
    assert propose(suffix, others, 3) == []
    assert propose(suffix, sequence([4, 20, 21], 3), 3) == []


def test_prompts_are_not_given_to_others() -> None:
    suffix = drafter()
    first = sequence([1, 20, 21, 22, 23, 24], 0)
    propose(suffix, first)
    say(suffix, first, [30])
    suffix.release(0)
    assert propose(suffix, sequence([5, 20, 21], 1)) == []


def test_running_outputs_are_shared_before_they_end() -> None:
    suffix = drafter()
    tokens = [i % VOCAB for i in range(7, 7 + 40)] + [i * 7 % VOCAB for i in range(40)]
    running = sequence([1], 0)
    for token in tokens:
        say(suffix, running, [token])
    other = sequence([3, *tokens[:4]], 1)
    assert propose(suffix, other) == tokens[4:8]


def test_a_preempted_sequence_gives_its_output_once() -> None:
    suffix = drafter()
    seq = sequence([1, 2, 3], 0)
    for part in ([20, 21], [22, 23, 24], [25]):
        propose(suffix, seq)
        say(suffix, seq, part)
        suffix.release(0)  # preempted, or ended at last
    assert suffix.store.num_tokens == seq.num_output_tokens


def test_a_sequence_that_never_drafts_feeds_the_store() -> None:
    suffix = drafter()
    silent = sequence([1, 2, 3], 0)
    for part in ([20, 21], [22, 23]):
        say(suffix, silent, part)
    suffix.release(0)
    assert propose(suffix, sequence([20, 21], 1), 2) == [22, 23]


def test_a_private_table_gives_nothing_to_the_store_and_takes_nothing() -> None:
    suffix = drafter()
    for seq_id, private in enumerate((True, False)):
        seq = sequence([1], seq_id, private=private)
        say(suffix, seq, [20 + seq_id, 30, 31])
        suffix.release(seq_id)
    assert suffix.store.num_tokens == 3
    assert propose(suffix, sequence([21, 30], 5, private=True)) == []
    assert propose(suffix, sequence([21, 30], 6)) == [31]


def test_without_a_store_nothing_is_kept_of_the_past() -> None:
    suffix = drafter(max_store_bytes=0)
    first = sequence([1], 0)
    say(suffix, first, [20, 21, 22])
    suffix.release(0)
    assert propose(suffix, sequence([20, 21], 1)) == []
    assert suffix.memory_bytes > 0
    suffix.release(1)
    assert suffix.memory_bytes == 0


# --- estimates ---


@pytest.mark.parametrize("law", [OWN_TEXT, PAST_OUTPUTS])
def test_estimates_grow_with_length_and_agreement_and_stay_far_below_a_divided_vote(law: MatchLaw) -> None:
    by_length = [law.confidence(length, 1, 1) for length in range(1, 33)]
    assert by_length == sorted(by_length)
    by_count = [law.confidence(3, count, count) for count in range(1, 9)]
    assert by_count == sorted(by_count)
    for agreeing in range(1, 8):
        assert law.confidence(32, agreeing, 8) <= (agreeing / 8) ** 2


# --- state and memory ---


def test_release_frees_the_own_text_and_unknown_ids_are_fine() -> None:
    suffix = drafter(max_store_bytes=0)
    propose(suffix, sequence([1, 2, 3], 5))
    assert (suffix.num_sequences, suffix.memory_bytes > 0) == (1, True)
    suffix.release(5)
    suffix.release(5)
    assert (suffix.num_sequences, suffix.memory_bytes) == (0, 0)


def test_a_text_for_which_there_is_no_room_is_done_without() -> None:
    suffix = drafter(max_own_bytes=30_000)
    first = sequence([i % 3 for i in range(20)], 0)
    assert propose(suffix, first)
    crowd = sequence([i % 3 for i in range(100)], 1)
    assert propose(suffix, crowd) == []
    rng = random.Random(0)
    for _ in range(60):
        say(suffix, first, [rng.randrange(VOCAB) for _ in range(3)])
        suffix.check_integrity()
    suffix.release(0)
    assert propose(suffix, sequence([i % 3 for i in range(20)], 2))


def test_a_prediction_for_which_there_is_no_room_is_done_without() -> None:
    suffix = drafter(max_own_bytes=10_000)
    assert propose(suffix, sequence([1, 2, 3], prediction=tuple(range(50)) * 2)) == []
    suffix.check_integrity()


def test_a_step_takes_in_a_bounded_number_of_tokens_and_the_rest_follows() -> None:
    """Long predictions of many choices must not hold up everybody for seconds."""
    long = tuple(i % 7 for i in range(300))
    seqs = [sequence([20 + i, 30, 31], i, prediction=long) for i in range(3)]
    bounded, eager = drafter(max_store_bytes=0, max_inserts=100), drafter(max_store_bytes=0)
    requests = [DraftRequest(seq, 4) for seq in seqs]
    whole = eager.propose(requests)
    counts = [0]
    for _ in range(12):
        drafts = bounded.propose(requests)
        bounded.check_integrity()
        counts.append(sum(track.tree.num_occurrences for track in bounded._tracks.values() if track.tree is not None))
        assert 0 <= counts[-1] - counts[-2] <= 100
        assert drafts[0] == [0, 1, 2, 3]  # the first tokens of the first one are there at once
    assert drafts == whole
    assert counts[-1] == 3 * (300 + 2)
    assert counts[-1] == counts[-2]


def test_what_is_emitted_meanwhile_is_taken_in_too() -> None:
    rng = random.Random(3)
    bounded, eager = drafter(max_store_bytes=0, max_inserts=7), drafter(max_store_bytes=0)
    seq = sequence([rng.randrange(6) for _ in range(200)], prediction=tuple(rng.randrange(6) for _ in range(50)))
    for _ in range(60):
        new = [rng.randrange(6) for _ in range(rng.randint(1, 4))]
        seq.tokens += new
        for one in (bounded, eager):
            one.update(seq, len(new))
            drafts = propose(one, seq)
            one.check_integrity()
    assert drafts == propose(bounded, seq)
    assert bounded.memory_bytes == eager.memory_bytes


def test_a_text_is_planted_only_where_there_is_room_for_all_of_it() -> None:
    """Else it would be built and given up again in every step."""
    found = set()
    for room in range(150_000, 200_000, 2_500):
        suffix = drafter(max_own_bytes=room, max_store_bytes=0, max_inserts=50)
        seq = sequence([1, 2, 3], prediction=tuple(i % VOCAB for i in range(400)))
        propose(suffix, seq)
        planted = suffix.memory_bytes > 0
        for _ in range(10):
            propose(suffix, seq)
            suffix.check_integrity()
            assert (suffix.memory_bytes > 0) == planted
        found.add(planted)
    assert found == {True, False}


def soak_tokens(kind: str) -> list[int]:
    rng = random.Random(1)
    if kind == "random":
        return [rng.randrange(VOCAB) for _ in range(100_000)]
    return [i % 7 if rng.random() > 0.001 else rng.randrange(VOCAB) for i in range(100_000)]


@pytest.mark.parametrize("kind", ["random", "repetitive"])
def test_memory_stays_within_its_bound_over_100_000_tokens_and_proposals_cost_no_more(kind: str) -> None:
    tokens = soak_tokens(kind)
    suffix = drafter(SuffixPolicy(max_match=16), max_store_bytes=300_000, max_own_bytes=400_000)
    largest = 0
    lines: list[int] = []  # that ran in proposals
    for first in range(0, len(tokens), 500):
        seq = sequence([1, 2, 3], first, salt=b"a" if first % 3000 else b"b")
        for at in range(first, first + 500, 5):
            if at % 100 == 0:
                lines.append(count_lines(propose, suffix, seq))
            say(suffix, seq, tokens[at : at + 5])
        largest = max(largest, suffix.memory_bytes)
        assert suffix.memory_bytes <= suffix.max_memory_bytes
        suffix.release(first)
    suffix.check_integrity()
    assert suffix.store.num_evicted > 0  # the bound was met, not only kept
    assert largest > 0.5 * suffix.store.max_bytes
    early, late = lines[20:120], lines[-100:]
    assert sum(late) <= 1.5 * sum(early)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"min_match": 0}, "got 0"),
        ({"min_match": 5, "max_match": 4}, "got 5 and 4"),
        ({"max_occurrences": 1}, "got 1"),
        ({"min_probability": 1.5}, "got 1.5"),
        ({"max_drafts_per_match": -1.0}, "got -1.0"),
    ],
)
def test_impossible_policies_are_refused(sizes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuffixPolicy(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [{"max_sequences": 0}, {"max_own_bytes": -1}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(sizes.values()))}"):
        drafter(**sizes)


# --- estimates against truth ---


def test_a_draft_is_counted_up_to_its_first_wrong_token() -> None:
    suffix = drafter()
    seq = sequence([1, 2, 3, 4, 5, 6, 1, 2])
    draft = scored(suffix, seq, 4)
    assert draft.token_ids == [3, 4, 5, 6]
    say(suffix, seq, [3, 9, 5])
    bins = suffix.reliability.bins
    assert (sum(one.tried for one in bins), sum(one.right for one in bins)) == (2, 1)
    estimates = [draft.cumulative[0], draft.cumulative[1] / draft.cumulative[0]]
    assert sum(one.predicted for one in bins) == pytest.approx(sum(estimates))


def test_tokens_that_were_not_proposed_to_are_not_counted() -> None:
    suffix = drafter()
    seq = sequence([1, 2, 3, 1, 2])
    propose(suffix, seq, 1)
    say(suffix, seq, [3])
    say(suffix, seq, [1])
    assert sum(one.tried for one in suffix.reliability.bins) == 1


# --- in the step ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_output_is_the_output_without_drafts(temperature: float, k: int) -> None:
    """Requests of two salts that come one after the other, choices of one prompt, and preemption in between."""
    texts = prompts(3) + [prompts(3)[2]] * 2
    suffix = SuffixDrafter(vocab_size=40, policy=SuffixPolicy(min_probability=0.02))
    bench = Bench(drafter=suffix, k=k)
    params = [
        SamplingParams(seed=i, temperature=temperature, max_tokens=30, stop_token_ids=frozenset({3})) for i in range(5)
    ]
    for _round in range(2):
        ids = [bench.add(text, own) for text, own in zip(texts, params, strict=True)]
        for _step in range(3):
            bench.run_step()
        for seq_id in list(bench.sequences)[:2]:
            bench.preempt(seq_id)
        bench.run()
        for seq_id, text, own in zip(ids, texts, params, strict=True):
            expected = alone(text, own)
            assert bench.results[seq_id].token_ids == expected.token_ids
            assert bench.results[seq_id].finish_reason == expected.finish_reason
    assert bench.step.num_drafter_failures == 0
    assert sum(step.stats.num_accepted for step in bench.steps) > 0
    suffix.check_integrity()


def test_a_sequence_that_shrinks_between_two_updates_is_another_one() -> None:
    """Though nobody asked it for drafts in between: what was taken back does not reach the store."""
    suffix = drafter(SuffixPolicy(), max_sequences=3)
    seq = sequence([0, 1, 2], 1)
    say(suffix, seq, [0, 0])
    del seq.tokens[-1:]
    propose(suffix, seq, 1)
    suffix.release(1)
    assert suffix.store.num_tokens == 0
