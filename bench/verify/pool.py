"""The requests that cases are made of: one for each prompt class and sampling set, the same in every run.

Each request's plain answer is computed once and serves every case that holds the request, so there are few of them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import prompts as texts
from bench.verify.factors import LONG_PROMPT, lengths_for
from model.interface import ModelInfo
from model.tokenizer import Tokenizer
from specdec.noise import mix_seed
from specdec.params import SamplingParams

TOP_LOGPROBS = 2
TURN_TOKENS = 3  # ids that a later turn adds behind the answer

_CLASSES: dict[str, tuple[texts.Prompt, ...]] = {
    "short": texts.SHORT,
    "long": texts.LONG[:2],
    "multi-turn": texts.MULTI_TURN,
    "code": texts.CODE,
    "json": texts.JSON,
    "mixed": texts.MIXED,
    "repeated": texts.COPY,
}
_RANDOM_LENGTHS = {"short": (1, 2, 3, 7), "random": (5, 17, 33, 64, 90), "repeated": (48, 63, 80), "long": (300, 240)}
_STOP_STRIDE = 61  # one of so many ids is a stop token, where a sampling set has them


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """Names one request. With ``after`` it is a later turn: prompt, so many tokens of the answer, a few more ids."""

    prompts: str
    sampling: str
    after: int = 0

    @property
    def first_turn(self) -> Cell:
        """The request whose answer a later turn holds."""
        return Cell(self.prompts, self.sampling)

    def __str__(self) -> str:
        return f"{self.prompts}, {self.sampling}" + (f", a turn after {self.after} tokens" if self.after else "")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    size: int  # ids below it can be sampled and fed back
    eos: tuple[int, ...]
    common: tuple[int, ...]  # ids that answers tend to hold: what a mask forbids has to matter

    @property
    def stops(self) -> frozenset[int]:
        """End-of-text ids and some others, so that answers of any model end in the middle of accepted drafts."""
        spread = range(min(17, self.size - 1), self.size, _STOP_STRIDE)
        return frozenset(self.eos) | frozenset(spread if self.size > 2 * _STOP_STRIDE else ())

    def bias(self) -> tuple[tuple[int, float], ...]:
        first, *others = self.common
        return tuple({**dict.fromkeys(others[:2], 1.5), first: -2.0, self.size // 3: 2.0}.items())


_Changes = Callable[[_Vocabulary], dict[str, Any]]

SAMPLING: Mapping[str, _Changes] = {
    "greedy": lambda v: {"temperature": 0.0},
    "greedy-penalties": lambda v: {
        "temperature": 0.0,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
        "logit_bias": v.bias(),
    },
    "temperature-1": lambda v: {},
    "top-p": lambda v: {"temperature": 0.8, "top_p": 0.9, "stop_token_ids": v.stops},
    "top-k-min-p": lambda v: {"top_k": 40, "min_p": 0.02},
    "everything": lambda v: {
        "temperature": 1.0,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": v.bias(),
        "min_tokens": 6,
        "stop_token_ids": v.stops,
        "bad_words": ((v.common[0],), (v.common[-1], v.common[0]), (v.common[0], v.common[-1])),
    },
    "allowed-ids": lambda v: {
        "temperature": 0.7,
        "allowed_token_ids": tuple(range(0, v.size, 2)),
        "bad_words": tuple((token,) for token in v.common[:1] if v.size > 4),
    },
    "hot": lambda v: {"temperature": 1.5, "top_k": 200},
}
"""What each sampling set changes in the parameters; all are seeded."""


class RequestPool:
    """All requests for one model. ``seed`` changes every seed and every random prompt."""

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer | None, seed: int = 0) -> None:
        self._seed = seed
        self.max_model_len = info.max_model_len
        self._size = info.num_token_ids
        self.most_tokens = int(lengths_for(info.max_model_len)[-1])
        self.longest_prompt = max(1, min(LONG_PROMPT, info.max_model_len - self.most_tokens))
        self._prompts = self._random_prompts()
        if tokenizer is not None:
            self._prompts |= self._encoded_prompts(tokenizer)
        eos = tuple(token for token in info.eos_token_ids if token < self._size)
        self._vocabulary = _Vocabulary(self._size, eos, self._common_ids(tokenizer))
        self.sampling = tuple(SAMPLING)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompt classes; without a tokenizer there are only those that random ids can stand for."""
        order = [*_CLASSES, "random"]
        return tuple(sorted(self._prompts, key=order.index))

    @property
    def variants(self) -> dict[str, list[tuple[int, ...]]]:
        """The different prompts of each class."""
        return {name: list(self._prompts[name]) for name in self.prompts}

    def cells(self) -> list[Cell]:
        """All requests."""
        return [Cell(prompts, sampling) for prompts in self.prompts for sampling in self.sampling]

    def num_prompt(self, cell: Cell) -> int:
        """Tokens of the prompt; of a later turn the most that it can have."""
        return len(self.request(cell.first_turn, 1)[0]) + (cell.after + TURN_TOKENS if cell.after else 0)

    def later_turn(self, cell: Cell, answer: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], SamplingParams]:
        """The request ``cell``, whose first turn was answered with ``answer`` (``cell.after`` tokens or fewer)."""
        prompt, params = self.request(cell.first_turn, max_tokens)
        rng = random.Random(f"turn/{self._seed}/{cell}")
        added = [rng.randrange(self._size) for _ in range(TURN_TOKENS)]
        return (*prompt, *answer, *added), dataclasses.replace(params, seed=mix_seed(params.seed, cell.after))

    def request(self, cell: Cell, max_tokens: int) -> tuple[tuple[int, ...], SamplingParams]:
        """Prompt and parameters of a first turn. Those of one class and different sampling sets may share a prompt."""
        assert not cell.after
        number = self.sampling.index(cell.sampling)
        variants = self._prompts[cell.prompts]
        params = SamplingParams(
            seed=mix_seed(self._seed, 1 + number + 64 * self.prompts.index(cell.prompts)),
            max_tokens=max_tokens,
            logprobs=TOP_LOGPROBS,
        )
        changes = SAMPLING[cell.sampling](self._vocabulary)
        return variants[number % len(variants)], dataclasses.replace(params, **changes)

    def _random_prompts(self) -> dict[str, list[tuple[int, ...]]]:
        rng = random.Random(f"prompts/{self._seed}")
        prompts: dict[str, list[tuple[int, ...]]] = {}
        for name, lengths in _RANDOM_LENGTHS.items():
            for length in lengths:
                length = min(length, self.longest_prompt)
                ids = [rng.randrange(self._size) for _ in range(min(5, length) if name == "repeated" else length)]
                prompts.setdefault(name, []).append(tuple((ids * length)[:length]))
        return prompts

    def _encoded_prompts(self, tokenizer: Tokenizer) -> dict[str, list[tuple[int, ...]]]:
        found: dict[str, list[tuple[int, ...]]] = {}
        for name, variants in _CLASSES.items():
            for prompt in variants:
                ids = [i for i in tokenizer.encode(prompt.text, add_special_tokens=False) if i < self._size]
                if ids:
                    found.setdefault(name, []).append(tuple(ids[: self.longest_prompt]))
        return found

    def _common_ids(self, tokenizer: Tokenizer | None) -> tuple[int, ...]:
        """Four different ids at most, at least one."""
        ids: list[int] = []
        if tokenizer is not None:
            for text in (" the", ",", ".", "\n"):
                ids += tokenizer.encode(text, add_special_tokens=False)[-1:]
        ids += [self._size // 5, self._size // 2, 2 * self._size // 3, self._size - 1]
        return tuple(dict.fromkeys(i for i in ids if i < self._size))[:4]
