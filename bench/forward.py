"""What a forward and its sampling cost, against what the machine could do.

::

    python -m bench.forward                                # the default model
    python -m bench.forward --json forward.json --model FOLDER --threads 2

Four tables, everything in them measured in turns, round after round: the forward of one row against the speed at which
this machine reads memory; forwards of more rows; contexts that grow; and what sampling adds to a step of 16 sequences.
Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from bench.model_flags import add_model_flags, open_chosen
from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.interface import Executor
from model.kernels import get_kernels
from model.loader import LoadedModel
from specdec.params import SamplingParams
from specdec.sampling import RowJob, Sampler, sample_row

BLOCK_SIZE = 16
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (16, 256, 1000, 1900)
SEQUENCES = 16  # of the tables of contexts and of sampling
SAMPLING = {
    "greedy": SamplingParams(seed=0, temperature=0.0),
    "temperature 0.8": SamplingParams(seed=0, temperature=0.8),
    "top_p 0.9": SamplingParams(seed=0, temperature=0.8, top_p=0.9),
    "top_k 50": SamplingParams(seed=0, temperature=0.8, top_k=50),
    "min_p 0.05": SamplingParams(seed=0, temperature=0.8, min_p=0.05),
}
Seconds = dict[str, float]
Cases = Mapping[str, Callable[[], object]]


def in_turns(cases: Cases, rounds: int, *, clock: Callable[[], float] = time.perf_counter) -> Seconds:
    """Median seconds of each case: all run once a round, in another order each time; the first does not count."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    order, rng = list(cases), random.Random(0)
    for number in range(rounds + 1):
        rng.shuffle(order)
        for name in order:
            started = clock()
            cases[name]()
            if number:
                taken[name].append(clock() - started)
    return {name: statistics.median(times) for name, times in taken.items()}


def weight_bytes(folder: Path) -> int:
    """Bytes of weights that a forward of one row reads: all in ``folder``, but no embedding that is not the head."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                sizes[name] = tensor.numel() * tensor.element_size()
    separate = any(name.endswith("lm_head.weight") for name in sizes)
    return sum(size for name, size in sizes.items() if not (separate and name.endswith("embed_tokens.weight")))


def memory_readers(size: int) -> Cases:
    """Ways to read ``size`` bytes of memory once, on all of torch's threads; the fastest tells what can be read."""
    words = torch.ones(size // 4, dtype=torch.int32)
    floats = words.view(torch.float32)
    return {
        "read: sum of floats": floats.sum,
        "read: greatest integer": words.max,
        "read: dot": lambda: floats.dot(floats),
    }


class Forwards:
    """Batches for an executor, over a cache of its own. Re-binds ``executor``."""

    def __init__(self, executor: Executor, *, sequences: int, most_tokens: int) -> None:
        self._executor = executor
        self._blocks = -(-most_tokens // BLOCK_SIZE)
        self._storage = KVStorage(
            executor.planes, num_blocks=sequences * self._blocks, block_size=BLOCK_SIZE, device=executor.info.device
        )
        executor.bind(self._storage)
        self._ids = random.Random(0)

    def of(self, sequences: int, rows: int, context: int) -> Callable[[], object]:
        """A forward of ``rows`` rows of each of ``sequences`` behind ``context`` tokens, logits for the last."""
        spans = [
            RowSpan(
                [self._ids.randrange(self._executor.info.num_token_ids) for _ in range(rows)],
                context,
                range(s * self._blocks, (s + 1) * self._blocks),
                rows - 1,
            )
            for s in range(sequences)
        ]
        batch = PackedBatch.build(spans, block_size=BLOCK_SIZE, scratch_block=self._storage.scratch_block)
        return lambda: self._executor.forward(batch)


def sampling_cases(loaded: LoadedModel, forward: Callable[[], object]) -> Cases:
    """Sampling one token for each of the rows of ``forward``."""
    logits: torch.Tensor = forward().logits  # type: ignore[attr-defined]
    rows, sampler = logits.numpy(), Sampler(get_kernels(choice=loaded.kernels))
    t = itertools.count()

    def case(params: SamplingParams) -> Callable[[], object]:
        if not sampler.batchable(params):
            return lambda: [sample_row(row, params, next(t)) for row in rows]
        jobs = [RowJob(i, 1, params, 0) for i in range(len(rows))]
        return lambda: sampler.sample_batch(logits, [RowJob(job.first_row, 1, params, next(t)) for job in jobs])

    return {name: case(params) for name, params in SAMPLING.items()}


def measure(loaded: LoadedModel, folder: Path, rounds: int) -> dict[str, object]:
    """All figures, seconds and bytes, as plain data."""
    executor = loaded.executor
    most = executor.info.max_model_len
    contexts = [context for context in CONTEXTS if context < most]
    forwards = Forwards(executor, sequences=SEQUENCES, most_tokens=min(most, max(*contexts, 256 + max(ROWS)) + 1))
    size = weight_bytes(folder)
    short = min(64, most - 1)
    one = in_turns({"forward": forwards.of(1, 1, short), **memory_readers(size)}, 3 * rounds)
    read = min(seconds for name, seconds in one.items() if name != "forward")
    rows = in_turns({str(n): forwards.of(1, n, 0) for n in ROWS if n <= most}, rounds)
    behind = in_turns({str(context): forwards.of(SEQUENCES, 1, context) for context in contexts}, rounds)
    step = forwards.of(SEQUENCES, 1, short)
    sampling = in_turns({"forward": step, **sampling_cases(loaded, step)}, rounds)
    cached = SEQUENCES * sum(plane.bytes_per_slot for plane in executor.planes)
    return {
        "model": executor.info.name,
        "executor": executor.kind,
        "dtype": executor.info.dtype,
        "threads": torch.get_num_threads(),
        "weight_bytes": size,
        "read_bytes_per_s": size / read,
        "one_row_s": one["forward"],
        "one_row_bandwidth_share": read / one["forward"],
        "rows_s": rows,
        "contexts_s": behind,
        "sequences": SEQUENCES,
        "kv_bytes_per_position": cached,
        "sampling_s": sampling,
    }


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (head, *lines)
    )


def told(found: Mapping[str, object]) -> str:
    """The tables for people."""
    seconds: Mapping[str, Mapping[str, float]] = found  # type: ignore[assignment]
    number: Mapping[str, float] = found  # type: ignore[assignment]
    speed = number["read_bytes_per_s"]
    one = number["one_row_s"]
    parts = [
        f"{found['model']}, {found['dtype']}, {found['executor']}, {found['threads']} threads",
        f"one row: {one * 1e3:.2f} ms for {number['weight_bytes'] / 1e6:.0f} MB of weights = "
        f"{number['weight_bytes'] / one / 1e9:.1f} GB/s; memory can be read at {speed / 1e9:.1f} GB/s: "
        f"{number['one_row_bandwidth_share']:.0%}",
    ]
    lines = [
        [rows, f"{taken * 1e3:.2f}", f"{taken * 1e3 / int(rows):.3f}", f"{taken / one:.2f}",
         f"{int(rows) * number['weight_bytes'] / taken / 1e9:.0f}"]
        for rows, taken in seconds["rows_s"].items()
    ]  # fmt: skip
    parts.append(table(["rows", "ms", "ms/row", "x one row", "G multiply-adds/s (bf16)"], lines))
    contexts = seconds["contexts_s"]
    first, base = next(iter(contexts.items()))
    lines = []
    for context, taken in contexts.items():
        extra = (int(context) - int(first)) * number["kv_bytes_per_position"]
        share = extra / (taken - base) / speed if extra and taken > base else None
        lines.append([context, f"{taken * 1e3:.2f}", f"{extra / 1e6:.0f}", "" if share is None else f"{share:.0%}"])
    parts.append(
        table([f"context ({SEQUENCES} sequences)", "ms", "MB of K and V more", "their bandwidth, of reading"], lines)
    )
    step = seconds["sampling_s"]["forward"]
    lines = [
        [name, f"{taken * 1e6:.0f}", f"{taken / (step + taken):.1%}"]
        for name, taken in seconds["sampling_s"].items()
        if name != "forward"
    ]
    parts.append(table([f"sampling of {SEQUENCES} rows", "us", "of forward and sampling"], lines))
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 if the model cannot be loaded."""
    parser = argparse.ArgumentParser(prog="python -m bench.forward", description=(__doc__ or "").split("\n", 1)[0])
    add_model_flags(parser)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="rounds of each table (15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(argv)
    opened = open_chosen("forward", options)
    if opened is None:
        return 1
    loaded, folder = opened
    found = measure(loaded, folder, options.rounds)
    print(told(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
