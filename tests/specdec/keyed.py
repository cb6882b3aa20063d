"""Keyed sampling for many seeds at once: noise written from its documented layout, and whole paths of tokens.

::

    paths[i]    x0 x1 .. x_depth-1      tokens that seed i gives; ENDED behind a stop token
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from specdec.history import History
from specdec.params import SamplingParams
from specdec.pipeline import SamplingRules, adjusted_logits, candidates
from tests.specdec.laws import naive_law

Floats = NDArray[np.float64]
Seeds = NDArray[np.uint64]
Paths = NDArray[np.int64]
LogitsOf = Callable[[Seq[int]], NDArray[np.float32]]  # tokens so far -> the row that decides the next one

ENDED = -1
_CHUNK = 8192  # counters at a time: the rounds then stay in the processor's cache


def seed_range(count: int, start: int = 0) -> Seeds:
    """``count`` adjacent seeds, modulo 2**64."""
    return np.arange(count, dtype=np.uint64) + np.uint64(start & (2**64 - 1))


def uniforms_of(seeds: Seeds, t: int | NDArray[np.uint64], token_ids: Seq[int] | NDArray[np.int64]) -> Floats:
    """U of (seeds[i], t or t[i], token_ids[j]): ``[n, ids]``. Philox4x32-10 as specdec.noise documents it."""
    ids = np.asarray(token_ids, dtype=np.uint64)
    pairs, where = np.unique(ids >> np.uint64(1), return_inverse=True)
    steps = np.broadcast_to(np.asarray(t, dtype=np.uint64), seeds.shape)
    out = np.empty((len(seeds), len(ids)))
    rows = max(1, _CHUNK // len(pairs))
    for first in range(0, len(seeds), rows):
        some = slice(first, first + rows)
        words = _philox(seeds[some, None], steps[some, None], pairs[None, :])
        high, low = (np.stack([words[i], words[i + 2]], axis=-1)[:, where, ids & np.uint64(1)] for i in (1, 0))
        bits = ((high << np.uint64(32)) | low) >> np.uint64(11)
        out[some] = np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-53, 1.0 - 2.0**-53)
    return out


def _philox(seeds: Seeds, steps: Seeds, pairs: Seeds) -> tuple[Seeds, Seeds, Seeds, Seeds]:
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y, z, w = np.broadcast_arrays(pairs, steps & low, steps >> half, np.uint64(0x7D1))
    key, other = seeds & low, seeds >> half
    for _ in range(10):
        a, b = x * np.uint64(0xD2511F53), z * np.uint64(0xCD9E8D57)
        x, y, z, w = (b >> half) ^ y ^ key, b & low, (a >> half) ^ w ^ other, a & low
        key, other = (key + np.uint64(0x9E3779B9)) & low, (other + np.uint64(0xBB67AE85)) & low
    return x, y, z, w


def winners(uniforms: Floats, law: Floats) -> NDArray[np.int64]:
    """``[n]``: argmin over v of -log U / p of each row of ``uniforms`` [n, V]; ``law`` is [V] or [n, V]."""
    with np.errstate(divide="ignore"):
        found: NDArray[np.int64] = (-np.log(uniforms) / law).argmin(axis=1)
    return found


def keyed_paths(
    logits_of: LogitsOf, params: SamplingParams, prompt: Seq[int], uniforms: Floats, *, law_of: str = "pipeline"
) -> Paths:
    """Paths ``[n, depth]`` by the race over ``uniforms`` [n, depth, V], one node of the tree of histories at a time.

    ``law_of``: the processed distribution of specdec's pipeline, or "reference" for the one from first principles.
    """
    number, depth, _ = uniforms.shape
    paths = np.full((number, depth), ENDED, dtype=np.int64)
    groups: list[tuple[list[int], NDArray[np.int64]]] = [([], np.arange(number))]
    while groups:
        output, members = groups.pop()
        tokens = [*prompt, *output]
        row = logits_of(tokens)
        law = naive_law(row.tolist(), params, tokens, len(prompt))
        if law_of == "pipeline":
            law = pipeline_law(row, params, tokens, len(prompt))
        found = winners(uniforms[members, len(output)], np.asarray(law))
        paths[members, len(output)] = found
        for token in np.unique(found).tolist():
            if len(output) + 1 < depth and token not in params.stop_token_ids:
                groups.append(([*output, token], members[found == token]))
    return paths


def pipeline_law(row: NDArray[np.float32], params: SamplingParams, tokens: Seq[int], num_prompt_tokens: int) -> Floats:
    """``[V]``: what specdec's own pipeline makes of ``row``."""
    law = np.zeros(len(row))
    scores = adjusted_logits(row, SamplingRules(params, len(row)), History(tokens, num_prompt_tokens))
    if params.greedy:
        law[scores.argmax()] = 1.0
        return law
    kept = candidates(scores, params)
    law[kept.token_ids] = kept.probabilities()
    return law


def path_law(logits_of: LogitsOf, params: SamplingParams, prompt: Seq[int], depth: int) -> dict[tuple[int, ...], float]:
    """Probability of every path of at most ``depth`` tokens, from first principles."""
    found: dict[tuple[int, ...], float] = {}
    open_paths: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_paths:
        path, mass = open_paths.pop()
        tokens = [*prompt, *path]
        for token, p in enumerate(naive_law(logits_of(tokens).tolist(), params, tokens, len(prompt))):
            if p == 0.0:
                continue
            longer = (*path, token)
            if len(longer) == depth or token in params.stop_token_ids:
                found[longer] = mass * p
            else:
                open_paths.append((longer, mass * p))
    return found


def count_paths(paths: Paths | Seq[Seq[int]], law: dict[tuple[int, ...], float]) -> tuple[list[int], list[float]]:
    """Counts and probabilities over all paths of ``law`` and, as one last outcome that cannot be, all others."""
    depth = max(len(path) for path in law)
    width = np.full((len(paths), depth), ENDED, dtype=np.int64)
    for i, path in enumerate(paths) if not isinstance(paths, np.ndarray) else ():
        width[i, : len(path)] = path
    rows = paths if isinstance(paths, np.ndarray) else width
    seen, times = np.unique(rows, axis=0, return_counts=True)
    counts = {tuple(row[row != ENDED].tolist()): int(count) for row, count in zip(seen, times, strict=True)}
    others = sum(count for path, count in counts.items() if path not in law)
    return [counts.get(path, 0) for path in law] + [others], [*law.values(), 0.0]
