"""The processed distribution from first principles."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence as Seq

from specdec.params import SamplingParams


def float32(x: float) -> float:
    """The nearest float32."""
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded


def naive_law(logits: Seq[float], params: SamplingParams, tokens: Seq[int], num_prompt_tokens: int) -> list[float]:
    """Probability of each token after ``tokens``, in plain Python, written straight from the contract."""
    output = list(tokens[num_prompt_tokens:])
    counts = Counter(output)
    scores = [float(x) for x in logits]
    forbidden = set()
    if params.allowed_token_ids is not None:
        forbidden |= set(range(len(scores))) - set(params.allowed_token_ids)
    for word in params.bad_words:
        if tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]:
            forbidden.add(word[-1])
    if len(output) < params.min_tokens:
        forbidden |= params.stop_token_ids
    for token, bias in params.logit_bias:
        scores[token] = float32(scores[token] + bias)
    for token in set(tokens):
        x = scores[token]
        scores[token] = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
    for token, count in counts.items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    scores = [float32(x) for x in scores]
    alive = [token for token in range(len(scores)) if token not in forbidden and scores[token] > -math.inf]
    if params.greedy:
        best = max(alive, key=lambda token: (scores[token], -token))
        return [float(token == best) for token in range(len(scores))]
    top = max(scores[token] for token in alive)
    weights = {token: math.exp((scores[token] - top) / params.temperature) for token in alive}
    least = params.min_p * max(weights.values())
    weights = {token: w for token, w in weights.items() if w >= least}
    ranked = sorted(weights, key=lambda token: (-weights[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    total = sum(weights[token] for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        kept.append(token)
        mass += weights[token]
        if mass >= params.top_p * total:
            break
    total = sum(weights[token] for token in kept)
    law = [0.0] * len(scores)
    for token in kept:
        law[token] = weights[token] / total
    return law
