"""What the suffix drafter is worth where outputs copy their prompts: its acceptance against the n-gram drafter's."""

from __future__ import annotations

import re

import pytest

from bench.prompts import COPY
from kvcache.table import BlockTable
from specdec.drafters.base import Drafter, DraftRequest
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.registry import make_drafter
from specdec.params import SamplingParams
from specdec.sequence import Sequence


def pieces(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Words with the space before them, and single characters."""
    return [vocabulary.setdefault(piece, len(vocabulary)) for piece in re.findall(r" ?\w+|[^\w]", text)]


def copies() -> list[tuple[str, str]]:
    """The copy prompts, with what they ask for."""
    repeat, rename, chorus, begun = (prompt.text for prompt in COPY)
    text = repeat.split("exactly:\n")[1].split("<|im_end|>")[0]
    code = rename.split("all of it:\n")[1].split("<|im_end|>")[0]
    return [
        (repeat, text),
        (rename, code.replace("middle", "mid")),
        (chorus, chorus),
        (begun, begun.split("\n\n")[0][90:]),
    ]


def acceptance(make: Drafter, k: int) -> tuple[int, int, int]:
    """Drafted and accepted tokens and steps when the copy prompts are answered as they ask."""
    vocabulary: dict[str, int] = {}
    drafted = accepted = steps = 0
    for seq_id, (prompt, answer) in enumerate(copies()):
        seq = Sequence(seq_id, pieces(prompt, vocabulary), SamplingParams(seed=0), BlockTable(16))
        left = pieces(answer, vocabulary)
        while left:
            (draft,) = make.propose([DraftRequest(seq, k)])
            matched = 0
            while matched < min(len(draft), len(left) - 1) and draft[matched] == left[matched]:
                matched += 1
            drafted, accepted, steps = drafted + len(draft), accepted + matched, steps + 1
            seq.tokens += left[: matched + 1]
            left = left[matched + 1 :]
            make.update(seq, matched + 1)
        make.release(seq_id)
    return drafted, accepted, steps


@pytest.mark.parametrize("k", [4, 8])
def test_copies_are_accepted_better_than_n_gram_drafts(k: int) -> None:
    ngram_drafted, ngram_accepted, ngram_steps = acceptance(NgramDrafter(vocab_size=1000), k)
    drafted, accepted, steps = acceptance(make_drafter("suffix", 1000), k)
    assert accepted / drafted > ngram_accepted / ngram_drafted
    assert steps <= ngram_steps
