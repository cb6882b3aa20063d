"""Grammars under speculation: the output is that of plain decoding, whatever drafts, batches and preemptions do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from specdec.drafters.base import Drafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.grammar.constraint import GrammarConstraint
from specdec.grammar.text import choice
from specdec.params import SamplingParams
from specdec.sequence import Sequence
from tests.specdec.builders import VOCAB, Bench, Result, ScriptedDrafter, outputs, prompts
from tests.specdec.grammar_builders import EOS, GRAMMARS, ambiguous, ids, toy_cache, written
from tests.specdec.test_pathwise import DRAFTERS, facts, make_drafter

CACHE = toy_cache()
BASE = SamplingParams(seed=5, max_tokens=24, logprobs=1, stop_token_ids=frozenset({EOS}), temperature=1.0)
BRACE, COMMA, OPENING = ids("]")[0], ids(",1")[0], ids("<k>")[0]
# Those under a grammar, with everything else that changes a token, among plain ones.
PARAMS = [
    replace(BASE, grammar=GRAMMARS["schema"], temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.3),
    replace(BASE, stop_token_ids=frozenset({1, 2})),
    replace(BASE, grammar=GRAMMARS["regex"], seed=9, presence_penalty=-2.0, min_p=0.05, min_tokens=3),
    replace(BASE, grammar=GRAMMARS["choice"], logit_bias=((5, 3.0), (EOS, -5.0)), top_p=0.9),
    replace(BASE, grammar=GRAMMARS["lark"], logit_bias=((BRACE, 4.0),), bad_words=((COMMA,), (3, 3)), top_k=30),
    replace(BASE, temperature=0.0, presence_penalty=2.0),
    replace(BASE, grammar=GRAMMARS["call"], logit_bias=((OPENING, 6.0), (EOS, -100.0)), seed=2**63),
    replace(BASE, grammar=GRAMMARS["schema"], max_tokens=3),
]
PROMPTS = prompts(len(PARAMS))
CALL = 6


def run(drafter: Drafter | None, k: int, **options: object) -> dict[int, Result]:
    return outputs(PROMPTS, PARAMS, drafter=drafter, k=k, constraint=GrammarConstraint(CACHE), **options)


@pytest.fixture(scope="module")
def truth() -> list[Result]:
    """Each request alone, one token a step."""
    return [
        outputs([prompt], [params], constraint=GrammarConstraint(CACHE))[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def drafter_named(name: str, truth: Mapping[int, list[int]]) -> Drafter:
    return SuffixDrafter(vocab_size=VOCAB) if name == "suffix" else make_drafter(name, truth)


NAMES = [*DRAFTERS, "suffix"]
PAIRS = [(name, k) for i, name in enumerate(NAMES) for k in (1 + i, 1 + (i + 3) % 8)]


@pytest.mark.parametrize(("name", "k"), PAIRS)
@pytest.mark.case("V 11484")
def test_speculation_on_equals_off_under_grammars_among_plain_requests(name: str, k: int, truth: list[Result]) -> None:
    drafter = drafter_named(name, {i: result.token_ids for i, result in enumerate(truth)})
    found = run(drafter, k, block_size=(1, 4, 16)[k % 3])
    for seq_id, expected in enumerate(truth):
        assert facts(found[seq_id]) == facts(expected), (seq_id, name, k)


@pytest.mark.case("O 4081")
def test_every_output_is_what_its_grammar_says_or_was_cut_by_its_length(truth: list[Result]) -> None:
    patterns = {
        0: r'\{"abc":\[(0|1|12|true)(,(0|1|12|true)){0,3}\]\}',
        2: r"(ab|abc|0[12]*){2,8}k",
        3: r"abcabc|abk|true|012",
        4: r"\[.*\]",
        CALL: r"(?s:.*)<k>\{\"abc\":(0|12)\}",
    }
    for seq_id, pattern in patterns.items():
        result = truth[seq_id]
        assert result.finish_reason in ("stop", "length")
        if result.finish_reason == "stop":
            assert re.fullmatch(pattern, re.sub(r"\s", "", written(result.token_ids))), seq_id
    assert sum(truth[seq_id].finish_reason == "stop" for seq_id in patterns) >= 3
    assert truth[7].finish_reason == "length"


def test_drafts_that_leave_the_grammar_are_not_verified(truth: list[Result]) -> None:
    """The scripted draft leaves it at once, so what is verified is what the grammar forces, and all of it is right."""
    bench = Bench(
        drafter=ScriptedDrafter(lambda sequence, limit: ids("xx")[:limit]), k=4, constraint=GrammarConstraint(CACHE)
    )
    seq_id = bench.add(PROMPTS[0], PARAMS[0])
    bench.run()
    assert bench.results[seq_id].token_ids == truth[0].token_ids
    assert bench.num_drafted == bench.num_accepted > 0


@pytest.mark.case("O 4081")
def test_end_of_text_anywhere_in_a_draft_changes_nothing(truth: list[Result]) -> None:
    for at in range(5):

        def script(sequence: Sequence, limit: int, at: int = at) -> list[int]:
            known = truth[sequence.seq_id].token_ids[sequence.num_output_tokens :]
            return [*known[:at], EOS, *known[at:]][:limit]

        found = run(ScriptedDrafter(script), 6)
        assert [facts(found[i]) for i in range(len(truth))] == [facts(result) for result in truth], at


def test_a_grammar_that_begins_inside_a_draft_holds_from_there_on(truth: list[Result]) -> None:
    result = truth[CALL]
    marker = result.token_ids.index(OPENING)
    assert json.loads(written(result.token_ids[marker + 1 :]))["abc"] in (0, 12)
    wrong = ids("aaaaaa")

    def script(sequence: Sequence, limit: int) -> list[int]:
        """The text up to the marker, then what the free text would have allowed."""
        known = result.token_ids[sequence.num_output_tokens : marker + 1]
        return [*known, *wrong][:limit]

    bench = Bench(drafter=ScriptedDrafter(script), k=marker + 4, constraint=GrammarConstraint(CACHE))
    seq_id = bench.add(PROMPTS[CALL], PARAMS[CALL])
    bench.run()
    assert facts(bench.results[seq_id]) == facts(result)
    assert bench.results[seq_id].accepted[0] >= marker, "the marker was an accepted draft, not a draft's end"


def test_preemption_at_any_step_changes_nothing(truth: list[Result]) -> None:
    drafter = make_drafter("half wrong", {i: result.token_ids for i, result in enumerate(truth)})
    bench = Bench(drafter=drafter, k=3, constraint=GrammarConstraint(CACHE))
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        bench.add(prompt, params)
    step = 0
    while bench.sequences:
        bench.run_step()
        step += 1
        for seq_id in list(bench.sequences):
            if (seq_id + step) % 3 == 0:
                bench.preempt(seq_id)
    assert [facts(bench.results[i]) for i in range(len(truth))] == [facts(result) for result in truth]


def test_a_grammar_that_becomes_too_complex_ends_its_own_request_alone(truth: list[Result]) -> None:
    params = [*PARAMS, replace(BASE, grammar=ambiguous(20), logit_bias=((EOS, -100.0),))]
    prompts_ = [*PROMPTS, PROMPTS[0]]
    alone = outputs([PROMPTS[0]], params[-1:], constraint=GrammarConstraint(CACHE))[0]
    assert alone.error is not None
    assert "the grammar is too complex at output position" in alone.error
    for drafted in ("abck" * 8, "a"):

        def script(sequence: Sequence, limit: int, text: str = drafted) -> list[int]:
            return ids(text)[:limit]

        drafter = ScriptedDrafter(script)
        found = outputs(prompts_, params, drafter=drafter, k=8, constraint=GrammarConstraint(CACHE))
        assert [facts(found[i]) for i in range(len(truth))] == [facts(result) for result in truth]
        assert "the grammar is too complex" in str(found[len(truth)].error)


def test_a_grammar_without_a_constraint_is_an_error_of_its_sequence_alone(truth: list[Result]) -> None:
    found = outputs(PROMPTS, PARAMS)
    assert found[0].error is not None
    assert "not available" in found[0].error
    assert facts(found[1]) == facts(truth[1])


def test_a_grammar_that_cannot_be_compiled_is_an_error_of_its_sequence_alone(truth: list[Result]) -> None:
    params = [replace(PARAMS[0], grammar="nonsense"), *PARAMS[1:]]
    found = outputs(PROMPTS, params, constraint=GrammarConstraint(CACHE), drafter=make_drafter("random", {}), k=3)
    assert found[0].error is not None
    assert "the grammar cannot be compiled" in found[0].error
    assert [facts(found[i]) for i in range(1, len(truth))] == [facts(result) for result in truth[1:]]


def test_parameters_that_leave_no_token_are_an_error_that_names_them() -> None:
    params = replace(BASE, grammar=choice(["ab"]), min_tokens=9)
    found = outputs([PROMPTS[0]], [params], constraint=GrammarConstraint(CACHE))
    assert found[0].error is not None
    assert "the structured-output constraint together with min_tokens (9" in found[0].error
