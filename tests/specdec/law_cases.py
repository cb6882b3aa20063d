"""The parameter sets whose laws are tested, on a target of five tokens."""

from __future__ import annotations

from dataclasses import replace

from specdec.params import SamplingParams
from tests.specdec.table_model import TableExecutor

VOCAB = 5
DEPTH = 3  # output tokens of a path
PROMPT = [0, 1, 3, 0, 1, 3, 0, 1]  # an n-gram drafter finds something here; 2 and 4 do not occur
TARGET = TableExecutor(VOCAB)
BASE = SamplingParams(seed=0, max_tokens=DEPTH)
STOPS = frozenset({2})
FILTERS = replace(BASE, temperature=1.4, min_p=0.1, top_k=4, top_p=0.9)
PENALTIES = replace(BASE, repetition_penalty=1.3, frequency_penalty=0.6, presence_penalty=0.4)
MASKS = replace(
    BASE,
    allowed_token_ids=(0, 1, 2, 3),
    bad_words=((3, 1), (1, 0)),
    min_tokens=1,
    stop_token_ids=STOPS,
    logit_bias=((1, 0.5),),
)
CASES = {
    "temperature 1": BASE,
    "temperature 0.5": replace(BASE, temperature=0.5),
    "temperature 1.8": replace(BASE, temperature=1.8),
    "top_k 2": replace(BASE, top_k=2),
    "top_k 3": replace(BASE, top_k=3),
    "top_p 0.6": replace(BASE, top_p=0.6),
    "top_p 0.9": replace(BASE, top_p=0.9),
    "min_p 0.2": replace(BASE, min_p=0.2),
    "repetition_penalty 1.6": replace(BASE, repetition_penalty=1.6),
    "repetition_penalty 0.7": replace(BASE, repetition_penalty=0.7),
    "frequency_penalty 1": replace(BASE, frequency_penalty=1.0),
    "presence_penalty 1": replace(BASE, presence_penalty=1.0),
    "penalties of -2": replace(BASE, frequency_penalty=-2.0, presence_penalty=-2.0),
    "logit_bias": replace(BASE, logit_bias=((2, 1.5), (0, -1.0), (4, -100.0))),
    "stop tokens": replace(BASE, stop_token_ids=STOPS),
    "min_tokens": replace(BASE, min_tokens=2, stop_token_ids=STOPS),
    "bad_words": replace(BASE, bad_words=((4,), (1, 2), (3, 0), (0, 1, 1))),
    "allowed_token_ids": replace(BASE, allowed_token_ids=(4, 0, 2)),
    "all filters": FILTERS,
    "all penalties": PENALTIES,
    "all masks": MASKS,
    "penalties and filters": replace(PENALTIES, temperature=0.8, min_p=0.05, top_k=4, top_p=0.95),
    "everything": replace(
        MASKS,
        repetition_penalty=1.2,
        frequency_penalty=-0.4,
        presence_penalty=0.5,
        temperature=1.2,
        min_p=0.05,
        top_k=3,
        top_p=0.97,
    ),
    "greedy": replace(BASE, temperature=0.0),
}
