"""A case: one value of each factor. Its requests, their order, seeds and aborts follow from the values alone.

The leading request has the case's prompt class, sampling set and output length. Its batch mates have the class with
every other sampling set, and the sampling set with every other class, so each pair of values is in every case that
names it; they are at most MATE_TOKENS long, so that requests leave the batch at different times.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.offline import OfflineConfig, Submission, blocks_for, in_order
from bench.verify.pool import Cell, RequestPool

MATE_TOKENS = 64
ABORTED_TOKENS = 48
WARM_UP_TOKENS = 16  # of each request, to fill the prefix cache


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
class CasePlan:
    """What the engine is given. ``cells[i]`` names submission i; the first ``num_compared`` are compared."""

    cells: tuple[Cell, ...]
    submissions: tuple[Submission, ...]
    num_compared: int
    warm_up: tuple[Submission, ...]  # run before, in the same engine; compared too, all of them
    config: OfflineConfig
    num_blocks: int

    @property
    def needs(self) -> dict[Cell, int]:
        """The plain answers that the comparison takes, and how long they must be."""
        needed: dict[Cell, int] = {}
        for cell, submission in zip(self.cells[: self.num_compared], self.submissions, strict=False):
            needed[cell] = max(needed.get(cell, 0), submission.params.max_tokens)
        return needed


def plan_case(case: Case, pool: RequestPool) -> CasePlan:
    """The case's requests. The same values and pool give the same plan, on any machine."""
    values = case.values
    rng = random.Random(f"case/{case.spec}")
    batch, length, k = int(values["batch"]), int(values["length"]), case.k
    cells = _company(Cell(values["prompts"], values["sampling"]), pool, batch)
    lengths = [length, *(min(length, MATE_TOKENS) for _ in cells[1:])]
    arrivals = [0] * batch
    if values["arrival"] == "staggered":
        arrivals = [rng.randrange(3 * batch) for _ in cells]
    if values["arrival"] == "shuffled":
        order = list(range(batch))
        rng.shuffle(order)
        cells, lengths = [cells[i] for i in order], [lengths[i] for i in order]
    submissions = []
    for i, (cell, tokens, arrival) in enumerate(zip(cells, lengths, arrivals, strict=True)):
        prompt, params = pool.request(cell, tokens)
        if i % 4 == 3:  # some rows do not speculate, beside rows that do
            params = dataclasses.replace(params, num_speculative_tokens=0)
        submissions.append(Submission(prompt, params, arrival))
    if values["aborts"] == "yes":
        for i in range(max(1, batch // 4)):
            cell = Cell(rng.choice(pool.prompts), rng.choice(pool.sampling))
            cells.append(cell)
            prompt, params = pool.request(cell, min(ABORTED_TOKENS, pool.most_tokens))
            submissions.append(Submission(prompt, params, rng.randrange(4), rng.randrange(1, 8), i % 2 == 1))
    warm_up: list[Submission] = []
    if values["cache"] == "warm":
        warm_up = [
            Submission(s.prompt, dataclasses.replace(s.params, max_tokens=min(s.params.max_tokens, WARM_UP_TOKENS)))
            for s in submissions[:batch]
        ]
    block_size = case.block_size
    lookahead = k + block_size
    requests = [(s.prompt, s.params) for s in submissions]
    blocks = blocks_for(requests, block_size, lookahead)
    if values["condition"] == "tight":
        # The longest request alone, without its last token, which needs no slot, and without room for drafts.
        blocks = max(-(-(len(prompt) + params.max_tokens - 1) // block_size) for prompt, params in requests)
    config = OfflineConfig(
        block_size=block_size,
        num_speculative_tokens=k,
        drafter="none",  # the runner brings the drafter
        max_num_batched_tokens=int(values["chunk"]),
        max_num_seqs=len(submissions),
        prefix_cache=values["cache"] != "off",
        preempt_every_step=values["condition"] == "preempt",
    )
    return CasePlan(tuple(cells), tuple(submissions), batch, tuple(warm_up), config, max(1, blocks))


def answers_by_seq(plan: CasePlan, answers: Mapping[Cell, Sequence[int]]) -> dict[int, Sequence[int]]:
    """What each sequence of the engine will say, by seq_id, where it is known."""
    known: dict[int, Sequence[int]] = {}
    seq_id = 0
    for submissions in (plan.warm_up, plan.submissions):
        for index in in_order(submissions):
            tokens = answers.get(plan.cells[index], ())
            known[seq_id] = tokens[: submissions[index].params.max_tokens]
            seq_id += 1
    return known


def _company(leader: Cell, pool: RequestPool, batch: int) -> list[Cell]:
    """``batch`` cells: the leader, then others of its class and of its sampling set in turn, then all over again."""
    at = pool.sampling.index(leader.sampling), pool.prompts.index(leader.prompts)
    cells = [leader]
    for i in range(1, max(len(pool.sampling), len(pool.prompts))):
        if i < len(pool.sampling):
            cells.append(Cell(leader.prompts, pool.sampling[(at[0] + i) % len(pool.sampling)]))
        if i < len(pool.prompts):
            cells.append(Cell(pool.prompts[(at[1] + i) % len(pool.prompts)], leader.sampling))
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
