"""The test drafters do what they say, and the registry knows its names."""

from __future__ import annotations

import pytest

from kvcache.table import BlockTable
from specdec.drafters.base import DraftRequest
from specdec.drafters.registry import DRAFTER_NAMES, make_drafter
from specdec.drafters.synthetic import EmptyDrafter, OracleDrafter, RandomDrafter, WrongDrafter
from specdec.params import SamplingParams
from specdec.sequence import Sequence


def request(seq_id: int, output: list[int], max_drafts: int) -> DraftRequest:
    seq = Sequence(seq_id, [1, 2, 3], SamplingParams(seed=0), BlockTable(16))
    seq.tokens += output
    return DraftRequest(seq, max_drafts)


def test_empty_drafter_proposes_nothing() -> None:
    assert EmptyDrafter().propose([request(0, [], 4), request(1, [], 1)]) == [[], []]


def test_random_drafts_are_ragged_and_within_bounds() -> None:
    requests = [request(i, [], 4) for i in range(200)]
    drafts = RandomDrafter(0, 7).propose(requests)
    assert {len(draft) for draft in drafts} == {0, 1, 2, 3, 4}
    assert {token for draft in drafts for token in draft} == set(range(7))
    assert {len(draft) for draft in RandomDrafter(0, 7, ragged=False).propose(requests)} == {4}


def test_random_drafts_depend_on_seed_sequence_and_length_only() -> None:
    a, b = request(1, [5], 4), request(2, [], 4)
    drafter = RandomDrafter(3, 1000, ragged=False)
    together = drafter.propose([a, b])
    assert [drafter.propose([b])[0], drafter.propose([a])[0]] == together[::-1]
    assert together[0] != together[1]
    assert RandomDrafter(4, 1000, ragged=False).propose([a, b]) != together


def test_oracle_continues_where_the_output_stands() -> None:
    oracle = OracleDrafter({1: [10, 11, 12, 13]})
    assert oracle.propose([request(1, [], 2), request(1, [10, 11, 12], 4), request(2, [], 4)]) == [[10, 11], [13], []]


def test_oracle_is_silent_off_its_track() -> None:
    assert OracleDrafter({1: [10, 11, 12]}).propose([request(1, [10, 99], 2)]) == [[]]


def test_wrong_drafter_changes_every_token_or_none() -> None:
    known = [i % 5 for i in range(40)]
    oracle = OracleDrafter({1: known})
    (wrong,) = WrongDrafter(oracle, 0, 5).propose([request(1, [], 40)])
    assert len(wrong) == 40
    assert all(token != right and 0 <= token < 5 for token, right in zip(wrong, known, strict=True))
    assert WrongDrafter(oracle, 0, 5, error_rate=0.0).propose([request(1, [], 40)]) == [known]


@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_registry_builds_a_drafter_of_that_name(name: str) -> None:
    drafter = make_drafter(name, 100)
    assert drafter.name == name
    (draft,) = drafter.propose([request(0, [1, 2, 3], 4)])
    assert len(draft) <= 4
    assert all(0 <= token < 100 for token in draft)
    drafter.update(request(0, [1, 2, 3], 4).sequence, 1)
    drafter.release(0)


def test_unknown_drafter_is_refused_with_the_names() -> None:
    with pytest.raises(
        ValueError, match="unknown drafter 'medusa'; there are ngram, random, none, suffix, model, exit, auto"
    ):
        make_drafter("medusa", 100)
