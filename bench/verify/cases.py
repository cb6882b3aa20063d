"""A case: one value of each factor. Its requests, their order, seeds and aborts follow from the values alone.

The leading request has the case's prompt class, sampling set and output length. Its batch mates have the class with
every other sampling set, and the sampling set with every other class, so each pair of values is in every case that
names it.

A warm case runs its requests twice. A follow-up case runs them, then asks on: each prompt is then the earlier prompt,
its answer and a few more ids, so blocks that were filled while decoding, drafts among their slots, are read again.
Beside them come

    early      in the first run: asks on from the leader's first tokens while the leader still decodes
    sibling    the leader's second turn once more, while the first of the two runs
    stranger   the same under another cache salt: it may not find a single block
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.offline import OfflineConfig, Submission
from bench.verify.factors import ORACLES, PREEMPT_TOKENS
from bench.verify.plain import PlainAnswers
from bench.verify.pool import Cell, RequestPool
from specdec.drafters.registry import AUTO, EXIT, MODEL

MATE_TOKENS = 48
ABORTED_TOKENS = 48
WARM_UP_TOKENS = 16  # of each request, to fill the prefix cache
TURN_OUTPUT = 8  # of each later turn
_NAMED = (MODEL, EXIT, "suffix", "ngram")  # by requests beside auto; who names one that is not there gets no drafts
STRANGER = "stranger"  # the other cache salt
_SHARE = 0.3  # of what a batch's outputs take: no more of it has room in a tight pool


@dataclass(frozen=True, slots=True)
class Case:
    """``id`` is short, for people; ``spec`` names the case on any machine."""

    id: str
    values: Mapping[str, str]

    @property
    def spec(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.values.items())

    @property
    def k(self) -> int:
        return int(self.values["k"])

    @property
    def block_size(self) -> int:
        return int(self.values["block_size"])


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a case; prompt and parameters are those of its cell."""

    cell: Cell
    max_tokens: int
    arrival: int = 0
    abort_after: int | None = None
    abort_in_step: bool = False
    num_drafts: int | None = None  # that it asks for; None: up to the case's k
    drafter: str | None = None  # that it asks for; None: the case's
    salt: str = ""

    @property
    def compared(self) -> bool:
        return self.abort_after is None


@dataclass(frozen=True, slots=True)
class CasePlan:
    """What the engine is given: ``runs``, one after the other in one engine. All but the aborted are compared."""

    runs: tuple[tuple[Ask, ...], ...]
    oracle: bool  # the drafter is told the answers
    config: OfflineConfig
    num_blocks: int

    @property
    def asks(self) -> Iterator[Ask]:
        return (ask for run in self.runs for ask in run)

    @property
    def needs(self) -> dict[Cell, int]:
        """The plain answers that the case takes, and how long: for the comparison, for later turns, for an oracle.

        A function of the case alone, so that it runs in the same way whatever else was decoded before.
        """
        needed: dict[Cell, int] = {}
        for ask in self.asks:
            if ask.cell.after:
                first = ask.cell.first_turn
                needed[first] = max(needed.get(first, 0), ask.cell.after)
            if ask.compared or self.oracle:
                needed[ask.cell] = max(needed.get(ask.cell, 0), ask.max_tokens)
        return needed

    def submissions(self, plain: PlainAnswers) -> list[list[Submission]]:
        """The engine's requests; ``plain`` knows all that it needs."""
        return [[_submission(ask, plain) for ask in run] for run in self.runs]

    def by_seq(self) -> list[tuple[int, int]]:
        """(run, index in it) of each sequence of the engine, by seq_id."""
        return [
            (number, index)
            for number, run in enumerate(self.runs)
            for index in sorted(range(len(run)), key=lambda index: run[index].arrival)
        ]


def plan_case(case: Case, pool: RequestPool) -> CasePlan:
    """The case's requests. The same values and pool give the same plan, on any machine."""
    values = case.values
    rng = random.Random(f"case/{case.spec}")
    batch, block_size = int(values["batch"]), case.block_size
    asks = _batch(case, pool)
    if values["arrival"] == "shuffled":
        rng.shuffle(asks)
    if values["arrival"] == "staggered":
        # In a tight pool those that come late would only wait.
        span = 2 if values["condition"] == "tight" else 2 + batch // 2
        asks = [replace(ask, arrival=rng.randrange(span)) for ask in asks]
    runs = [asks]
    if values["cache"] == "warm":
        warm_up = [replace(ask, max_tokens=min(ask.max_tokens, WARM_UP_TOKENS), arrival=0) for ask in asks]
        runs = [warm_up, asks]
    if values["cache"] == "follow-up":
        runs = _turns(asks, case, pool)
    if values["aborts"] == "yes":
        # Beside the batch that the other values are about.
        at = len(runs) - 1 if values["cache"] == "warm" else 0
        runs[at] = [*runs[at], *(_aborted(i, rng, pool) for i in range(max(1, batch // 4)))]
    config = OfflineConfig(
        block_size=block_size,
        num_speculative_tokens=case.k,
        drafter="none",  # the runner brings the drafter
        max_num_batched_tokens=int(values["chunk"]),
        max_num_seqs=max(len(run) for run in runs),
        prefix_cache=values["cache"] != "off",
        preempt_every_step=values["condition"] == "preempt",
    )
    blocks = _blocks(case, runs, pool)
    return CasePlan(tuple(map(tuple, runs)), values["drafter"] in ORACLES, config, blocks)


def _batch(case: Case, pool: RequestPool) -> list[Ask]:
    """The leader and its mates."""
    values = case.values
    batch, length = int(values["batch"]), int(values["length"])
    mate_tokens = min(MATE_TOKENS, pool.most_tokens)
    if values["condition"] == "preempt":
        mate_tokens = min(mate_tokens, PREEMPT_TOKENS)
    leader = Cell(values["prompts"], values["sampling"])
    cells = _company(leader, pool, batch)
    mates = [Ask(cell, mate_tokens, **_own_wishes(case, i)) for i, cell in enumerate(cells[1:], 1)]
    if values["cache"] == "follow-up":
        mates = [_aligned(ask, case.block_size, pool) if i % 2 == 1 else ask for i, ask in enumerate(mates)]
    # One that ends at once comes last, when the others are there.
    return [Ask(leader, length), *mates] if length > 2 else [*mates, Ask(leader, length)]


def _own_wishes(case: Case, number: int) -> dict[str, Any]:
    """What a batch mate asks for itself. Some do not speculate, and beside auto some name a drafter."""
    if number % 4 == 3:
        return {"num_drafts": 0}
    if case.values["drafter"] != AUTO or number % 4 != 1:
        return {}
    # With a number of its own a request gets so many drafts whatever they bring.
    own = {"num_drafts": case.k} if number % 8 == 5 else {}
    return {"drafter": _NAMED[number // 4 % len(_NAMED)], **own}


def _aligned(ask: Ask, block_size: int, pool: RequestPool) -> Ask:
    """``ask`` so long that its last token is the last of a block: the one whose KV is not there when it ends."""
    prompt = pool.num_prompt(ask.cell)
    tokens = ask.max_tokens - (prompt + ask.max_tokens) % block_size
    return replace(ask, max_tokens=tokens) if tokens > 0 else ask


def _turns(asks: list[Ask], case: Case, pool: RequestPool) -> list[list[Ask]]:
    """The runs of a follow-up case."""
    first, second = list(asks), [_next_turn(ask, ask.max_tokens, pool) for ask in asks]
    leader = max(range(len(asks)), key=lambda i: asks[i].max_tokens)
    others = [i for i in range(len(asks)) if i != leader]
    if len(others) >= 3:
        longest = asks[leader]
        steps = -(-pool.num_prompt(longest.cell) // int(case.values["chunk"]))
        early = _next_turn(longest, max(1, longest.max_tokens // 2), pool)
        when = longest.arrival + steps + longest.max_tokens // (2 + case.k)
        first[others[-1]] = replace(early, arrival=when)
        second[others[-1]] = replace(second[leader], arrival=second[leader].arrival + 2)
    stranger = replace(second[leader], salt=STRANGER)
    if not others:
        return [first, second, [stranger]]
    second[others[0]] = stranger
    return [first, second]


def _next_turn(ask: Ask, after: int, pool: RequestPool) -> Ask:
    """Asks on after ``after`` tokens of the answer; the same request again where the context is too small."""
    cell = Cell(ask.cell.prompts, ask.cell.sampling, after)
    room = pool.max_model_len - pool.num_prompt(cell)
    return replace(ask, cell=cell, max_tokens=min(TURN_OUTPUT, room)) if room > 0 else ask


def _aborted(number: int, rng: random.Random, pool: RequestPool) -> Ask:
    cell = Cell(rng.choice(pool.prompts), rng.choice(pool.sampling))
    tokens = min(ABORTED_TOKENS, pool.most_tokens)
    return Ask(cell, tokens, rng.randrange(4), rng.randrange(1, 8), number % 2 == 1)


def _blocks(case: Case, runs: Sequence[Sequence[Ask]], pool: RequestPool) -> int:
    """Room for all that any run leaves in the cache, or, in a tight pool, for a part of the largest batch."""
    size = case.block_size

    def slots(ask: Ask) -> int:
        return pool.num_prompt(ask.cell) + ask.max_tokens

    if case.values["condition"] != "tight":
        return sum(-(-(slots(ask) + case.k + size) // size) for run in runs for ask in run)
    # The scheduler admits a request only while each running one could still have a block. With that much room all
    # are admitted, and as each needs several blocks for its output they fight.
    shares = case.values["cache"] != "off"
    together = 0
    for run in runs:
        seen: set[tuple[int, ...]] = set()
        prompts = outputs = 0
        compared = [ask for ask in run if ask.compared]
        for ask in compared:
            blocks = -(-pool.num_prompt(ask.cell) // size)
            prompts += blocks
            # No longer than its mates: what only one of them needs in the end is not fought for.
            outputs += -(-(pool.num_prompt(ask.cell) + min(ask.max_tokens, MATE_TOKENS)) // size) - blocks
            prompt = pool.request(ask.cell.first_turn, 1)[0]
            if shares and prompt in seen:
                prompts -= len(prompt) // size
            seen.add(prompt)
        # What those that come first grow until the last one's prompt is in.
        steps = sum(pool.num_prompt(ask.cell) for ask in compared) // int(case.values["chunk"])
        grown = steps * len(compared) * (4 + case.k) // (8 * size)
        together = max(together, prompts + len(compared) + min(grown, int(_SHARE * outputs)))
    # The last token needs no slot.
    largest = max(-(-(slots(ask) - 1) // size) for run in runs for ask in run)
    return max(1, largest, together)


def _submission(ask: Ask, plain: PlainAnswers) -> Submission:
    prompt, params = plain.request(ask.cell, ask.max_tokens)
    params = replace(params, num_speculative_tokens=ask.num_drafts, drafter=ask.drafter)
    return Submission(prompt, params, ask.arrival, ask.abort_after, ask.abort_in_step, ask.salt)


def _company(leader: Cell, pool: RequestPool, batch: int) -> list[Cell]:
    """``batch`` cells: the leader, then others of its class and of its sampling set in turn, then all over again."""
    at = pool.sampling.index(leader.sampling), pool.prompts.index(leader.prompts)
    cells = [leader]
    if "repeated" in pool.prompts and leader.prompts != "repeated":
        cells.append(Cell("repeated", leader.sampling))  # where every drafter finds something
    for i in range(1, max(len(pool.sampling), len(pool.prompts))):
        if i < len(pool.sampling):
            cells.append(Cell(leader.prompts, pool.sampling[(at[0] + i) % len(pool.sampling)]))
        if i < len(pool.prompts):
            cells.append(Cell(pool.prompts[(at[1] + i) % len(pool.prompts)], leader.sampling))
    cells = list(dict.fromkeys(cells))
    return [cells[i % len(cells)] for i in range(batch)]


def parse_spec(spec: str, names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """``batch=8,sampling=greedy,..`` as values by factor. Raises ValueError unless each has a known value."""
    values: dict[str, str] = {}
    for part in spec.split(","):
        name, _, value = part.partition("=")
        if name not in names:
            raise ValueError(f"unknown factor {name!r}; there are {', '.join(names)}")
        if value not in names[name]:
            raise ValueError(f"{name} = {value!r}: must be one of {', '.join(names[name])}")
        values[name] = value
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(f"no value for {', '.join(missing)}")
    return {name: values[name] for name in names}
