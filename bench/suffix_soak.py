"""How long the suffix drafter takes as it grows old: ``python -m bench.suffix_soak [--tokens N] [--requests N]``.

Text of a frozen vocabulary is generated for many requests of several cache salts, some of it copied from what was said
before. Each line has, for the last so many tokens, the median and the 99th percentile of one ``propose`` and of taking
in one token, and what the drafter holds. These depend on what is proposed, and more is as more was said before. So the
lookup is measured by itself too: the same probes, texts that were stored at the start, are put in turn to this drafter
and to one that holds nothing else. The ratio of the two should not grow from line to line.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcache.manager import KVCacheManager
from specdec.drafters.base import DraftRequest
from specdec.drafters.suffix import SuffixDrafter
from specdec.params import SamplingParams
from specdec.sequence import Sequence as Decoding

VOCAB = 49_152
SALTS = 8
K = 8
_STEP = 3  # tokens that a step emits
_PROMPT = 200
NUM_PROBES = 256
_PROBE_TOKENS, _PROBE_ASKED = 96, 48
_COPIED = 0.5  # of the stretches of an output are copies of earlier text


@dataclass(frozen=True, slots=True)
class Window:
    """What was measured over ``tokens`` generated tokens, up to ``total``."""

    total: int
    propose_us: tuple[float, ...]
    update_us: tuple[float, ...]  # a token
    memory_bytes: int
    accepted: int
    drafted: int
    probe_us: float | None  # of one propose for a stored text; median; None if all of them had to make room
    young_probe_us: float | None  # of a drafter that holds the probes alone


class Probes:
    """Texts stored in a drafter, under the cache salt of the others, and asked for again: their drafts never change."""

    def __init__(self, manager: KVCacheManager, seed: int) -> None:
        rng = random.Random(f"probes/{seed}")
        self._manager = manager
        self._texts = [[rng.randrange(VOCAB) for _ in range(_PROBE_TOKENS)] for _ in range(NUM_PROBES)]
        self._next_id = -1

    def store(self, drafter: SuffixDrafter) -> None:
        for i, text in enumerate(self._texts):
            sequence = self._sequence(i, text[:1])
            sequence.tokens.extend(text[1:])
            drafter.update(sequence, len(text) - 1)
            drafter.release(sequence.seq_id)

    def compare(self, old: SuffixDrafter, young: SuffixDrafter) -> tuple[float | None, float | None]:
        """Median microseconds of a proposal of either, each probe that both hold put to both, in turn first."""
        times: dict[bool, list[float]] = {False: [], True: []}
        for i, text in enumerate(self._texts):
            taken: dict[bool, float] = {}
            for is_old in (i % 2 == 0, i % 2 == 1):
                drafter = old if is_old else young
                sequence = self._sequence(i, text[:_PROBE_ASKED])
                drafter.propose([DraftRequest(sequence, K)])  # takes in its own text
                began = time.perf_counter()
                (draft,) = drafter.propose([DraftRequest(sequence, K)])
                seconds = time.perf_counter() - began
                if draft and draft == text[_PROBE_ASKED : _PROBE_ASKED + len(draft)]:
                    taken[is_old] = 1e6 * seconds
                drafter.release(sequence.seq_id)
            if len(taken) == 2:
                for is_old, us in taken.items():
                    times[is_old].append(us)
        if not times[True]:
            return None, None
        return statistics.median(times[True]), statistics.median(times[False])

    def _sequence(self, i: int, tokens: list[int]) -> Decoding:
        self._next_id -= 1
        table = self._manager.new_table(str(i % SALTS).encode())
        return Decoding(self._next_id, list(tokens), SamplingParams(seed=0), table)


def soak(tokens: int, window: int, request_tokens: int, *, drafter: SuffixDrafter, seed: int = 0) -> Iterator[Window]:
    """Generate ``tokens`` tokens in requests of ``request_tokens``; a window for each ``window`` of them."""
    rng = random.Random(seed)
    manager = KVCacheManager(1, 16)
    past: dict[int, list[int]] = {salt: [] for salt in range(SALTS)}
    propose_us: list[float] = []
    update_us: list[float] = []
    accepted = drafted = total = 0
    number = 0
    probes, young = Probes(manager, seed), SuffixDrafter(vocab_size=VOCAB)
    for one in (drafter, young):
        probes.store(one)
    while total < tokens:
        salt = number % SALTS
        prompt = [rng.randrange(VOCAB) for _ in range(_PROMPT)]
        output = _output(rng, past[salt], request_tokens)
        past[salt] = [*past[salt], *output][-50_000:]
        params = SamplingParams(seed=number, max_tokens=request_tokens)
        sequence = Decoding(number, prompt, params, manager.new_table(str(salt).encode()))
        for at in range(0, request_tokens, _STEP):
            coming = output[at : at + _STEP]
            began = time.perf_counter()
            (draft,) = drafter.propose([DraftRequest(sequence, K)])
            proposed = time.perf_counter()
            sequence.tokens.extend(coming)
            drafter.update(sequence, len(coming))
            done = time.perf_counter()
            propose_us.append(1e6 * (proposed - began))
            update_us.append(1e6 * (done - proposed) / len(coming))
            drafted += len(draft)
            accepted += _right(draft, output[at:])
            total += len(coming)
            if total // window > (total - len(coming)) // window:
                old_us, young_us = probes.compare(drafter, young)
                yield Window(
                    total,
                    tuple(propose_us),
                    tuple(update_us),
                    drafter.memory_bytes,
                    accepted,
                    drafted,
                    old_us,
                    young_us,
                )
                propose_us, update_us, accepted, drafted = [], [], 0, 0
        drafter.release(number)
        number += 1


def _output(rng: random.Random, past: Sequence[int], count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        length = rng.randrange(8, 60)
        if past and rng.random() < _COPIED:
            first = rng.randrange(len(past))
            found += past[first : first + length]
        else:
            found += [rng.randrange(VOCAB) for _ in range(length)]
    return found[:count]


def _right(draft: Sequence[int], truth: Sequence[int]) -> int:
    count = 0
    for token, true in zip(draft, truth, strict=False):
        if token != true:
            break
        count += 1
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.suffix_soak", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000, help="generated in all (100,000)")
    parser.add_argument("--window", type=int, default=10_000, help="tokens a line (10,000)")
    parser.add_argument("--request-tokens", type=int, default=400, help="output of a request (400)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if min(options.tokens, options.window, options.request_tokens) < 1:
        parser.error("--tokens, --window and --request-tokens must be at least 1")
    drafter = SuffixDrafter(vocab_size=VOCAB)
    print(f"memory at most {drafter.max_memory_bytes / 2**20:.0f} MiB")
    print(
        "  tokens  propose us: median  p99   take in one us: median  p99   probe us (alone) ratio   MiB  "
        "accepted of drafted"
    )
    for one in soak(options.tokens, options.window, options.request_tokens, drafter=drafter, seed=options.seed):
        assert one.memory_bytes <= drafter.max_memory_bytes, one.memory_bytes
        lookup, update = _figures(one.propose_us), _figures(one.update_us)
        print(
            f"{one.total:8,}  {lookup[0]:18.1f} {lookup[1]:4.0f}  {update[0]:22.1f} {update[1]:4.0f}  "
            f"{_probe_figures(one)}  {one.memory_bytes / 2**20:4.1f}  {one.accepted:,} of {one.drafted:,}",
            flush=True,
        )
    return 0


def _probe_figures(window: Window) -> str:
    old, young = window.probe_us, window.young_probe_us
    if old is None or young is None:
        return f"{'(gone)':>24}"
    return f"{old:9.1f} ({young:5.1f}) {old / young:6.2f}"


def _figures(times: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    ordered = sorted(times)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


if __name__ == "__main__":
    raise SystemExit(main())
