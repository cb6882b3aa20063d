"""What a case of ``truedraft verify`` is made of: the factors, their values, and which combinations are left out."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bench.verify.covering import Constraint, Design, Factor, Row

BATCHES = ("1", "2", "4", "8", "16")  # requests in flight together
LENGTHS = ("1", "2", "7", "16", "64", "128", "512")  # output tokens of the leading request
CHUNKS = ("5", "16", "33", "128", "512")  # max_num_batched_tokens: below, in and above each row tile of the kernels
BLOCK_SIZES = ("1", "4", "16", "64")
DRAFT_LENGTHS = tuple(str(k) for k in range(9))
PRESSURES = ("none", "preempt", "tight")  # preempt: every choice after every token; tight: one request fills the pool
CACHES = ("cold", "warm", "off")
ARRIVALS = ("together", "shuffled", "staggered")

NO_DRAFTER = "none"
ORACLES = {"perfect": 0.0, "oracle": 0.2, "wrong": 1.0}  # the known answer, each token spoiled with this probability
DANGEROUS = ("k", "block_size", "chunk", "condition", "drafter")  # crossed three by three in the full suite

PREEMPT_ROWS = 4000  # most rows that a case preempted at every step computes again
LONG_PROMPT = 200  # tokens: over several attention chunks, and several steps of all chunk classes but the largest
_PROMPT_TOKENS = {"long": LONG_PROMPT}
_USUAL_PROMPT = 60


def thread_counts() -> tuple[str, ...]:
    """One thread, and two where there are two cores."""
    return ("1", "2") if (os.cpu_count() or 1) > 1 else ("1",)


def lengths_for(max_model_len: int) -> tuple[str, ...]:
    """The output lengths that leave half of the context to the prompt; at least one token."""
    return tuple(length for length in LENGTHS if int(length) <= max(1, max_model_len // 2))


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
        Factor("cache", CACHES, usual=("cold", "off", "cold", "warm")),
        Factor("drafter", (*drafters, NO_DRAFTER) if NO_DRAFTER not in drafters else tuple(drafters)),
        Factor("k", DRAFT_LENGTHS, usual=DRAFT_LENGTHS[1:]),
        Factor("block_size", BLOCK_SIZES),
        Factor("chunk", CHUNKS, usual=("512", "128", "33", "16")),
        Factor("threads", tuple(threads), usual=tuple(threads[-1:])),
        Factor("arrival", ARRIVALS),
        Factor("aborts", ("no", "yes")),
    )
    constraints = (
        Constraint(
            "k = 0 is no drafter", ("k", "drafter"), lambda row: row["k"] != "0" or row["drafter"] == NO_DRAFTER
        ),
        Constraint(
            "one request alone arrives in one way only",
            ("batch", "arrival"),
            lambda row: row["batch"] != "1" or row["arrival"] == "together",
        ),
        Constraint(
            "beside requests that are aborted it is not alone",
            ("batch", "aborts"),
            lambda row: row["batch"] != "1" or row["aborts"] == "no",
        ),
        Constraint(
            f"preempted at every step, a case computes at most {PREEMPT_ROWS} rows again",
            ("condition", "batch", "length", "prompts"),
            lambda row: row["condition"] != "preempt" or rows_again(row) <= PREEMPT_ROWS,
        ),
    )
    return Design(factors, constraints)


def rows_again(row: Row) -> int:
    """About how many rows are computed again if every choice is preempted after each of its tokens."""
    batch, length = int(row["batch"]), int(row["length"])
    # Half of a batch has the case's prompts, the other half prompts of every class.
    prompt = (_PROMPT_TOKENS.get(row["prompts"], _USUAL_PROMPT) + _USUAL_PROMPT) // 2
    return batch * length * (prompt + length // 2)
