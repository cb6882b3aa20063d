"""What is run: cells, the variants that are compared in each, and the order of the rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.serving.engine import Account
from bench.serving.loops import LoadResult, Request
from bench.serving.options import Load, Mode, Size
from bench.serving.outputs import Tally
from bench.serving.target import Target
from bench.serving.workloads import WorkloadPrompt


@dataclass(frozen=True, slots=True)
class Variant:
    """A server and a mode. ``group``: whose outputs have to be alike; the requests of a group are the same."""

    name: str
    target: Target
    mode: Mode
    group: str
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class LoadCell:
    """All variants run it, in rounds."""

    workload: str
    load: Load
    prompts: tuple[WorkloadPrompt, ...]

    def __str__(self) -> str:
        return f"{self.workload}, {self.load}"

    def cost(self, size: Size) -> float:
        """Of one run of one variant, in units that Pace learns to know: tokens, cheaper together than alone."""
        seats = self.load.seats or 4
        prompt = sum(len(p.text) for p in self.prompts) / len(self.prompts) / 4
        tokens = size.requests_of(self.load) * (size.tokens + prompt / 8)
        estimate: float = tokens / math.sqrt(min(seats, size.requests_of(self.load)))
        return max(estimate, 60.0 * size.requests_of(self.load) / self.load.rate) if self.load.rate else estimate


@dataclass(slots=True)
class Results:
    """What one variant did in one cell, round by round."""

    cell: LoadCell
    variant: Variant
    runs: list[LoadResult] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)


def round_order(variants: Sequence[Variant], number: int) -> list[Variant]:
    """Every round begins with another one and every second runs backwards, so that a drift favours nobody."""
    shift = number // 2 % len(variants)
    turned = [*variants[shift:], *variants[:shift]]
    return turned if number % 2 == 0 else turned[::-1]


def requests_of(cell: LoadCell, variant: Variant, size: Size, number: int, salt: str) -> list[Request]:
    """The requests of one round: the next prompts in each, the same for all variants. What decides an output, prompt
    and seed, is of the prompt alone; ``salt`` keeps a run from what earlier ones left in caches."""
    count = size.requests_of(cell.load)
    made = []
    for i in range(count):
        index = (number * count + i) % len(cell.prompts)
        prompt = cell.prompts[index]
        what: dict[str, Any] = {"messages": list(prompt.messages)} if size.chat else {"prompt": prompt.text}
        again = (i // len(cell.prompts)) * "+"  # a prompt that comes again in the run is not to find itself
        optional = {**optional_fields(size, size.seed + index, salt + again), **variant.mode.fields}
        body = variant.target.body(what, size.tokens, optional)
        made.append(Request(prompt.name, (variant.group, cell.workload, index), body))
    return made


def optional_fields(size: Size, seed: int, salt: str) -> dict[str, Any]:
    """Everything that a stranger's API may not know; the rest is OpenAI's oldest."""
    fields: dict[str, Any] = {
        "temperature": size.temperature,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": salt,
    }
    if size.temperature > 0:
        fields["seed"] = seed
    if size.ignore_eos:
        fields["ignore_eos"] = True
    return fields
