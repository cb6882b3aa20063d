"""What a case of ``truedraft verify`` is made of: the factors, their values, and which combinations are left out."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bench.verify.covering import Constraint, Design, Factor, Row
from specdec.drafters.registry import EXIT

BATCHES = ("1", "2", "4", "8", "16")  # requests in flight together
# Output tokens of the leading request: these, and the first of LONGEST that leaves half of the context to the prompt.
LENGTHS = ("1", "2", "7", "16", "64")
LONGEST = ("512", "256", "128")
CHUNKS = ("5", "16", "33", "128", "512")  # max_num_batched_tokens: below, in and above each row tile of the kernels
BLOCK_SIZES = ("1", "4", "16", "64")
DRAFT_LENGTHS = tuple(str(k) for k in range(9))
PRESSURES = (
    "none",
    "preempt",
    "tight",
)  # preempt: every choice after every token; tight: a batch does not fit to its end
# warm: prompts that were computed before; follow-up: later turns, which hold what the same engine generated before.
CACHES = ("cold", "warm", "follow-up", "off")
ARRIVALS = ("together", "shuffled", "staggered")

NO_DRAFTER = "none"
ORACLES = {"perfect": 0.0, "oracle": 0.2}  # the known answer, each token spoiled with this probability
DANGEROUS = ("k", "block_size", "chunk", "condition", "drafter")  # crossed three by three in the full suite

PREEMPT_ROWS = 5000  # most rows that a case preempted at every step computes again
PREEMPT_TOKENS = 4  # output tokens of batch mates that are preempted at every step
LONG_PROMPT = 200  # tokens: over several attention chunks, and several steps of all chunk classes but the largest
_PROMPT_TOKENS = {"long": LONG_PROMPT}
_USUAL_PROMPT = 60
_FROM_TEXT = ("ngram", "suffix")  # drafters that find nothing where nothing comes again
REPETITIVE = ("repeated", "code", "json")


def thread_counts() -> tuple[str, ...]:
    """One thread, and two where there are two cores."""
    return ("1", "2") if (os.cpu_count() or 1) > 1 else ("1",)


def lengths_for(max_model_len: int) -> tuple[str, ...]:
    """The output lengths that leave half of the context to the prompt; at least one token."""
    most = max(1, max_model_len // 2)
    longest = [length for length in LONGEST if int(length) <= most][:1]
    return tuple(length for length in (*LENGTHS, *longest) if int(length) <= most)


def build_design(
    *,
    sampling: Sequence[str],
    prompts: Sequence[str],
    drafters: Sequence[str],
    max_model_len: int,
    threads: Sequence[str],
) -> Design:
    """``sampling`` and ``prompts`` are the names of the sets that the model can have; ``drafters`` those to prove."""
    lengths = lengths_for(max_model_len)
    factors = (
        Factor("batch", BATCHES, usual=("4", "8", "2", "16")),
        Factor("sampling", tuple(sampling)),
        Factor("prompts", tuple(prompts), usual=tuple(name for name in prompts if name != "long")),
        Factor("length", lengths, usual=tuple(x for x in ("16", "64") if x in lengths)),
        Factor("condition", PRESSURES, usual=("none", "tight")),
        Factor("cache", CACHES, usual=("cold", "warm", "off")),
        Factor("drafter", (*drafters, NO_DRAFTER) if NO_DRAFTER not in drafters else tuple(drafters)),
        Factor("k", DRAFT_LENGTHS, usual=DRAFT_LENGTHS[1:]),
        Factor("block_size", BLOCK_SIZES),
        Factor("chunk", CHUNKS, usual=("512", "128", "33", "16")),
        Factor("threads", tuple(threads), usual=tuple(threads[-1:])),
        Factor("arrival", ARRIVALS),
        Factor("aborts", ("no", "yes")),
    )
    return Design(factors, (*_constraints(), _far(tuple(sampling), tuple(prompts))))


def _far(sampling: Sequence[str], prompts: Sequence[str]) -> Constraint:
    """Each request that is asked for the longest output costs as many forwards of one row."""
    wide, narrow = (sampling, prompts) if len(sampling) >= len(prompts) else (prompts, sampling)
    pairs = {frozenset((name, narrow[i % len(narrow)])) for i, name in enumerate(wide)}
    return Constraint(
        "a request that decodes far is decoded plainly as far, alone: each kind of prompt meets few sampling sets "
        "there, and each sampling set few kinds of prompts",
        ("length", "sampling", "prompts"),
        lambda r: r["length"] not in LONGEST or frozenset((r["sampling"], r["prompts"])) in pairs,
    )


def _constraints() -> tuple[Constraint, ...]:
    """What makes a value mean what it says; whether it came about is measured all the same."""
    return (
        Constraint("k = 0 is no drafter", ("k", "drafter"), lambda r: (r["k"] == "0") == (r["drafter"] == NO_DRAFTER)),
        Constraint(
            "one request alone arrives in one way only",
            ("batch", "arrival"),
            lambda r: r["batch"] != "1" or r["arrival"] == "together",
        ),
        Constraint(
            "beside requests that are aborted it is not alone",
            ("batch", "aborts"),
            lambda r: r["batch"] != "1" or r["aborts"] == "no",
        ),
        Constraint(
            "4 and more requests run together only where a step has rows for all and for the prompts of the last",
            ("batch", "chunk"),
            lambda r: int(r["batch"]) < 4 or 4 * int(r["batch"]) <= int(r["chunk"]),
        ),
        Constraint(
            "16 requests that are preempted at every step do not come back together",
            ("batch", "condition"),
            lambda r: r["batch"] != "16" or r["condition"] != "preempt",
        ),
        Constraint(
            "a tight pool is fought for by at least 4 requests that run together, need several blocks each, and none "
            "most of it",
            ("batch", "condition", "length", "block_size", "chunk"),
            lambda r: (
                r["condition"] != "tight"
                or (
                    int(r["batch"]) >= max(4, int(r["length"]) // 32)
                    and int(r["block_size"]) <= 16
                    and int(r["chunk"]) >= 128
                )
            ),
        ),
        Constraint(
            f"preempted at every step, a case has several steps and computes at most {PREEMPT_ROWS:,} rows again",
            ("condition", "batch", "length", "prompts"),
            lambda r: r["condition"] != "preempt" or (int(r["length"]) >= 7 and rows_again(r) <= PREEMPT_ROWS),
        ),
        Constraint(
            f"{EXIT} drafts for sequences that lack the KV of their last token alone, and right after a preemption a "
            "prefix cache leaves that only with blocks of one token",
            ("condition", "drafter", "block_size", "cache"),
            lambda r: (
                r["condition"] != "preempt" or r["drafter"] != EXIT or (r["block_size"] == "1" and r["cache"] != "off")
            ),
        ),
        Constraint(
            f"alone, {EXIT} drafts from the second step on, so never for two tokens",
            ("batch", "length", "drafter"),
            lambda r: r["batch"] != "1" or r["drafter"] != EXIT or int(r["length"]) > 2,
        ),
        Constraint(
            "a single token is not drafted",
            ("batch", "length", "k"),
            lambda r: r["batch"] != "1" or r["length"] != "1" or r["k"] == "0",
        ),
        Constraint(
            f"alone, {' and '.join(_FROM_TEXT)} draft in texts that repeat themselves ({', '.join(REPETITIVE)}) or in "
            "long ones",
            ("batch", "length", "prompts", "drafter"),
            lambda r: (
                r["batch"] != "1"
                or r["drafter"] not in _FROM_TEXT
                or int(r["length"]) >= 64
                or (r["prompts"] in REPETITIVE and int(r["length"]) >= 7)
            ),
        ),
        Constraint(
            "a request alone finds its prefix only if that fills a block",
            ("batch", "cache", "block_size", "prompts"),
            lambda r: (
                r["batch"] != "1"
                or r["cache"] not in ("warm", "follow-up")
                or int(r["block_size"]) <= 4
                or r["prompts"] == "long"
            ),
        ),
    )


def rows_again(row: Row) -> int:
    """About how many rows are computed again if every choice is preempted after each of its tokens."""
    length = int(row["length"])
    prompt = _PROMPT_TOKENS.get(row["prompts"], _USUAL_PROMPT)
    # Half of a batch has the case's prompts, the other half prompts of every class.
    mate = (prompt + _USUAL_PROMPT) // 2
    mates = (int(row["batch"]) - 1) * min(length, PREEMPT_TOKENS) * (mate + PREEMPT_TOKENS // 2)
    return length * (prompt + length // 2) + mates
