"""What a step of plain decoding costs as requests, context and vocabulary grow.

::

    python -m bench.scaling                                # the default model
    python -m bench.scaling --json scaling.json --model FOLDER --threads 2

Whole steps of the engine, without HTTP: planning, building the batch, the forward, sampling, committing. Every request
decodes one token a step; prompts are not counted. The runs of a table take turns, so that a machine that slows down
slows all of them. The table of vocabularies is of random models whose layers are as wide as the default model's, and
only two. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bench.forward import table
from bench.json_numbers import rounded
from bench.model_flags import MAX_BATCHED_TOKENS, add_model_flags, open_chosen
from bench.offline import OfflineConfig, OfflineEngine, Submission, blocks_for
from bench.tiny_models import save_tiny_model
from model.kernels import KernelsChoice
from model.loader import LoadedModel, load_model
from specdec.params import SamplingParams

Name = TypeVar("Name", bound=Hashable)

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT = 200  # tokens of prompt, in the tables of requests and of vocabularies
CONTEXTS = (100, 500, 1000, 2000, 4000, 8000)
SEQUENCES = 4  # in the table of contexts
VOCABULARIES = (8_192, 32_768, 65_536, 131_072, 262_144)
BATCH = 16  # in the table of vocabularies
TEMPERATURE = 0.8
BLOCK_SIZE = 16
# Of the random models: the default model's widths, and two layers of it.
SHAPE: Mapping[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians over the decode steps of a run, seconds."""

    steps: int
    step: float  # from one step's begin to the next one's
    forward: float
    sampling: float

    @property
    def other(self) -> float:
        """Planning, building the batch, committing."""
        return self.step - self.forward - self.sampling


def decode_times(
    loaded: LoadedModel, *, requests: int, context: int, tokens: int, temperature: float, seed: int = 0
) -> StepTimes:
    """``requests`` of random ids behind ``context`` tokens each. Raises ValueError if not one step had all of them."""
    rng = random.Random(seed)
    info = loaded.executor.info
    prompts = [tuple(rng.randrange(info.num_token_ids) for _ in range(context)) for _ in range(requests)]
    output = _output_tokens(requests, context, tokens)
    both = [
        (prompt, SamplingParams(seed=i, max_tokens=output, temperature=temperature, stop_token_ids=frozenset()))
        for i, prompt in enumerate(prompts)
    ]
    engine = OfflineEngine(
        loaded.executor,
        OfflineConfig(
            block_size=BLOCK_SIZE,
            num_speculative_tokens=0,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_num_seqs=requests,
            prefix_cache=False,
            kernels=loaded.kernels,
            ledger=False,
        ),
        num_blocks=2 * blocks_for(both, BLOCK_SIZE, 1),  # who is taken in must find room beside what others may grow to
    )
    walls = []
    stepping = engine.stepping([Submission(prompt, params, salt=str(i)) for i, (prompt, params) in enumerate(both)])
    began = time.perf_counter()
    for _ in stepping:
        now = time.perf_counter()
        walls.append(now - began)
        began = now
    full = [
        (wall, step.stage_seconds)
        for wall, step in zip(walls, engine.steps, strict=True)
        if step.num_rows == step.num_sequences == requests
    ]
    if not full:
        raise ValueError(f"no step had all of the {requests} requests")
    return StepTimes(
        steps=len(full),
        step=statistics.median(wall for wall, _ in full),
        forward=statistics.median(stages["verify"] for _, stages in full),
        sampling=statistics.median(stages["accept"] for _, stages in full),
    )


def _output_tokens(requests: int, context: int, tokens: int) -> int:
    """So many that all decode together for ``tokens`` steps, though the first begin while others' prompts are taken."""
    return tokens + -(-requests * context // MAX_BATCHED_TOKENS) + 1


def median_of(rounds: Sequence[StepTimes]) -> StepTimes:
    return StepTimes(
        steps=sum(one.steps for one in rounds),
        step=statistics.median(one.step for one in rounds),
        forward=statistics.median(one.forward for one in rounds),
        sampling=statistics.median(one.sampling for one in rounds),
    )


def in_turns(cases: Mapping[Name, Callable[..., StepTimes]], rounds: int) -> dict[Name, StepTimes]:
    """Medians of each case, a call with a ``seed``: all run once a round."""
    found: dict[Name, list[StepTimes]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, case in cases.items():
            found[name].append(case(seed=number))
    return {name: median_of(times) for name, times in found.items()}


def by_requests(loaded: LoadedModel, tokens: int, rounds: int) -> dict[int, StepTimes]:
    """Steps of so many requests, each behind ``CONTEXT`` tokens, at a temperature."""
    context = min(CONTEXT, loaded.executor.info.max_model_len // 2)
    run = partial(decode_times, loaded, context=context, tokens=tokens, temperature=TEMPERATURE)
    return in_turns({count: partial(run, requests=count) for count in REQUESTS}, rounds)


def by_context(loaded: LoadedModel, tokens: int, rounds: int) -> dict[int, StepTimes]:
    """Steps of ``SEQUENCES`` requests behind so many tokens each, as far as the model's context goes."""
    run = partial(decode_times, loaded, requests=SEQUENCES, tokens=tokens, temperature=0.0)
    cases = {
        context: partial(run, context=context)
        for context in CONTEXTS
        if context + _output_tokens(SEQUENCES, context, tokens) <= loaded.executor.info.max_model_len
    }
    return in_turns(cases, rounds)


def by_vocabulary(
    sizes: Sequence[int],
    tokens: int,
    rounds: int,
    *,
    kernels: KernelsChoice | None,
    threads: int | None,
    shape: Mapping[str, Any] = SHAPE,
) -> dict[int, dict[str, StepTimes]]:
    """Steps of ``BATCH`` requests of random models, greedy and at a temperature."""
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            path = save_tiny_model("llama", Path(folder) / str(size), vocab_size=size, **shape)
            loaded = load_model(
                path,
                kernels=kernels,
                num_threads=threads,
                max_batched_tokens=MAX_BATCHED_TOKENS,
                home=Path(folder),
            )
            run = partial(decode_times, loaded, requests=BATCH, context=CONTEXT, tokens=tokens)
            cases[size, "greedy"] = partial(run, temperature=0.0)
            cases[size, "temperature"] = partial(run, temperature=TEMPERATURE)
        found = in_turns(cases, rounds)
    return {size: {name: found[size, name] for name in ("greedy", "temperature")} for size in sizes}


def requests_table(found: Mapping[int, StepTimes]) -> str:
    lines = [
        [
            str(count),
            _ms(times.step),
            _ms(times.step / count),
            f"{count / times.step:.0f}",
            f"{times.forward / times.step:.0%}",
            f"{times.sampling / times.step:.1%}",
            f"{times.other / times.step:.1%}",
        ]
        for count, times in found.items()
    ]
    return table(["requests", "ms a step", "ms a token", "tokens/s", "forward", "sampling", "the rest"], lines)


def context_table(found: Mapping[int, StepTimes]) -> str:
    first = next(iter(found.values()))
    lines = [
        [str(context), _ms(times.step), _ms(times.step - first.step), f"{times.step / first.step:.2f}"]
        for context, times in found.items()
    ]
    return table([f"context ({SEQUENCES} requests)", "ms a step", "more than the first", "times the first"], lines)


def vocabulary_table(found: Mapping[int, Mapping[str, StepTimes]]) -> str:
    lines = [
        [
            str(size),
            _ms(both["greedy"].forward),
            _ms(both["greedy"].sampling, 3),
            _ms(both["temperature"].sampling, 3),
        ]
        for size, both in found.items()
    ]
    return table(
        [f"vocabulary ({BATCH} requests)", "forward ms", "sampling ms, greedy", f"at temperature {TEMPERATURE:g}"],
        lines,
    )


def _ms(seconds: float, digits: int = 2) -> str:
    return f"{seconds * 1e3:.{digits}f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 if the model cannot be loaded."""
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=(__doc__ or "").split("\n", 1)[0])
    add_model_flags(parser)
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="steps of a run in which all decode (24)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each line (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(argv)
    opened = open_chosen("scaling", options)
    if opened is None:
        return 1
    loaded, _ = opened
    info = loaded.executor.info
    print(f"{info.name}, {info.dtype}, {loaded.executor.kind}")
    requests = by_requests(loaded, options.tokens, options.rounds)
    print("\n" + requests_table(requests), flush=True)
    contexts = by_context(loaded, options.tokens, options.rounds)
    print("\n" + context_table(contexts), flush=True)
    vocabularies = by_vocabulary(
        VOCABULARIES, options.tokens, options.rounds, kernels=options.kernels, threads=options.threads
    )
    print("\n" + vocabulary_table(vocabularies))
    if options.json is not None:
        found = {
            "model": info.name,
            "dtype": info.dtype,
            "executor": loaded.executor.kind,
            "requests_s": {count: asdict(times) for count, times in requests.items()},
            "contexts_s": {context: asdict(times) for context, times in contexts.items()},
            "vocabularies_s": {
                size: {name: asdict(times) for name, times in both.items()} for size, both in vocabularies.items()
            },
        }
        options.json.write_text(json.dumps(rounded(found, 5), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
