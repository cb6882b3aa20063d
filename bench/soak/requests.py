"""What the soak's clients ask for, and how they behave: everything mixed, and the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.soak.wire import Manner

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SLOW_READ_SECONDS = 0.02
PATIENCE = 90.0  # seconds that a client waits for all of an answer: then it hangs
_DRAWS = 60  # to find one with a feature
_WORDS = (
    "the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "the", "rain", "in", "the", "valley",
    "def add(first, second):", "return first + second", "今天的天气很好", "naïve café", "🙂", "one", "two", "three",
)  # fmt: skip
_SALTS = ("north", "south", "east")

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "days": {"enum": [1, 2, 3]},
        "warm": {"type": "boolean"},
    },
    "required": ["name", "days", "warm"],
    "additionalProperties": False,
}
_GRAMMARS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("json_schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": _SCHEMA}}}),
    ("json_object", {"response_format": {"type": "json_object"}}),
    ("regex", {"structured_outputs": {"regex": r"[A-Z][a-z]{2,6}( [0-9]{1,3}){1,4}"}}),
    ("choice", {"structured_outputs": {"choice": ["north", "south by west", "nowhere at all"]}}),
    ("grammar", {"structured_outputs": {"grammar": 'start: "(" start ")" | /[0-9]{1,6}/'}}),
)
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Find the {name}.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 7]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "road")
]


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a server a request has to know."""

    model: str
    vocab_size: int
    max_model_len: int
    max_drafts: int
    drafters: tuple[str, ...] = ()

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Facts:
        """From the body of GET /v1/server_info."""
        speculation = info["speculation"]
        return cls(
            info["model"]["served_names"][0],
            info["model"]["vocab_size"],
            info["limits"]["max_model_len"],
            speculation["num_speculative_tokens"],
            tuple(drafter["name"] for drafter in speculation["drafters"]),
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. ``features``: what it exercises, by name. ``expected``: the only status it may be refused with, but
    for those that any request may meet."""

    number: int
    path: str
    body: dict[str, Any]
    raw: bytes
    manner: Manner
    features: frozenset[str]
    method: str = "POST"
    expected: int | None = None

    @property
    def request_id(self) -> str:
        return f"soak-{self.number}"


class Mix:
    """An endless sequence of requests, decided by ``seed``."""

    def __init__(self, facts: Facts, seed: int) -> None:
        self._facts = facts
        self._rng = random.Random(seed)
        self._number = 0

    def next(self, wanted: Collection[str] = ()) -> Planned:
        """Mostly well-formed, mostly patient; every third time one with a feature that is ``wanted``, if any is."""
        rng = self._rng
        if rng.random() < 0.06:
            return self._refused()
        draws = _DRAWS if wanted and rng.random() < 0.33 else 1
        for _ in range(draws):
            path, body, features = self._chat() if rng.random() < 0.3 else self._completion()
            planned = self._plan(path, body, features, self._manner())
            if not planned.features.isdisjoint(wanted):
                break
        return planned

    def again(self, planned: Planned) -> Planned:
        """The same request under another number."""
        self._number += 1
        return replace(planned, number=self._number)

    def burst(self) -> Planned:
        """A short one, by a patient client."""
        body = {
            "model": self._facts.model,
            "prompt": self._text(6),
            "max_tokens": self._rng.choice((4, 12)),
            "seed": self._seed(),
            "stream": self._rng.random() < 0.5,
            "return_token_ids": True,
        }
        return self._plan(COMPLETIONS, body, {"burst"}, Manner())

    def stuck(self) -> Planned:
        """Whose answer is far larger than what any buffer takes, and who does not read it."""
        body = {
            "model": self._facts.model,
            "prompt": self._text(4),
            "max_tokens": min(400, self._facts.max_model_len // 2),
            "ignore_eos": True,
            "logprobs": 20,
            "n": 2,
            "stream": True,
            "seed": self._seed(),
        }
        return self._plan(COMPLETIONS, body, {"stuck"}, Manner("stuck", stuck=True))

    def victim(self, point: str) -> Planned:
        """One for whom a part of the server fails, each time that it is its turn there; by a patient client."""
        body: dict[str, Any] = {
            "model": self._facts.model,
            "prompt": self._text(8),
            "max_tokens": 24,
            "ignore_eos": True,
            "seed": self._seed(),
            "stream": self._rng.random() < 0.5,
            "return_token_ids": True,
        }
        if point == "draft":
            body["speculation"] = {"num_speculative_tokens": min(4, self._facts.max_drafts)}
        elif point == "grammar":
            del body["ignore_eos"]
            body["structured_outputs"] = {"regex": "[a-z]{40,50}"}
        return self._plan(COMPLETIONS, body, {"victim of " + point}, Manner())

    def own(self, path: str, body: dict[str, Any]) -> Planned:
        """A request that is none of the mix, by a patient client."""
        return self._plan(path, {"model": self._facts.model, **body}, set(), Manner())

    def _plan(self, path: str, body: dict[str, Any], features: set[str], manner: Manner) -> Planned:
        self._number += 1
        found = {*features, manner.name, "chat" if path == CHAT else "completion"}
        found.add("stream" if body.get("stream") else "whole")
        if "timeout" in body:
            found.add("deadline")
        return Planned(self._number, path, body, json.dumps(body).encode(), manner, frozenset(found))

    def _manner(self) -> Manner:
        rng = self._rng
        chosen = rng.random()
        if chosen < 0.62:
            return Manner()
        if chosen < 0.68:
            return Manner("slow reader", read_pause=SLOW_READ_SECONDS)
        if chosen < 0.72:
            return Manner("slow sender", send_pause=0.1)
        resets = rng.random() < 0.5
        if chosen < 0.76:
            return Manner(
                "leaves in the body", body_share=rng.uniform(0.0, 0.99), leaves_after_seconds=0.0, resets=resets
            )
        if chosen < 0.82:
            return Manner("leaves at once", leaves_after_seconds=0.0, resets=resets)
        if chosen < 0.92:
            return Manner("leaves after a time", leaves_after_seconds=rng.uniform(0.0, 1.0), resets=resets)
        return Manner("leaves in the answer", leaves_after_bytes=rng.randrange(1, 6000), resets=resets)

    def _completion(self) -> tuple[str, dict[str, Any], set[str]]:
        rng = self._rng
        body = self._common(rng.choice((1, 2, 8, 24, 48, 80)))
        features = set(self._sampling(body))
        count = rng.choice((1, 1, 1, 2, 3))
        prompts: list[Any] = [self._prompt() for _ in range(count)]
        body["prompt"] = prompts if count > 1 else prompts[0]
        if count > 1:
            features.add("several prompts")
            # A list holds texts, or lists of ids.
            body["prompt"] = [self._text(10) for _ in prompts] if rng.random() < 0.5 else [self._ids() for _ in prompts]
        choices = rng.choice((1, 1, 1, 2, 3))
        if choices > 1:
            body["n"] = choices
            features.add("n")
        if not body["stream"] and rng.random() < 0.1:
            body["best_of"] = choices + 1
            features.add("best_of")
        if rng.random() < 0.15:
            body["logprobs"] = rng.choice((0, 3, 20))
            features.add("logprobs")
        if rng.random() < 0.1:
            body["echo"] = True
            features.add("echo")
        if not body["stream"] and rng.random() < 0.08:
            body["prompt_logprobs"] = rng.choice((0, 2))
            features.add("prompt_logprobs")
        if rng.random() < 0.1:
            body["prediction"] = {"type": "content", "content": self._text(30)}
            features.add("prediction")
        if rng.random() < 0.05:
            body["truncate_prompt_tokens"] = rng.choice((1, 7, 40))
            features.add("truncated prompt")
        return COMPLETIONS, body, features

    def _chat(self) -> tuple[str, dict[str, Any], set[str]]:
        rng = self._rng
        body = self._common(rng.choice((4, 16, 40, 80)))
        with_tools = rng.random() < 0.4
        features = set(self._sampling(body, grammars=not with_tools))
        roles = ("user", "assistant")
        turns = 1 if with_tools else rng.choice((1, 1, 3, 5))  # tools are long, written in so few tokens
        body["messages"] = [{"role": roles[i % 2], "content": self._text(12)} for i in range(turns)]
        if rng.random() < 0.3:
            body["messages"].insert(0, {"role": "system", "content": "Answer in one word."})
        if rng.random() < 0.1:
            body |= {"logprobs": True, "top_logprobs": 2}
            features.add("logprobs")
        if with_tools:
            for field in ("min_tokens", "bad_words", "allowed_token_ids", "ignore_eos"):
                body.pop(field, None)  # together with a grammar they may leave no token
            named = {"type": "function", "function": {"name": "road"}}
            choice = rng.choice(("auto", "required", named))
            body |= {"tools": _TOOLS, "tool_choice": choice}
            features.add("tools" if choice == "auto" else "forced tools")
        return CHAT, body, features

    def _common(self, max_tokens: int) -> dict[str, Any]:
        rng = self._rng
        body: dict[str, Any] = {
            "model": self._facts.model,
            "max_tokens": max_tokens,
            "stream": rng.random() < 0.6,
            "return_token_ids": True,
        }
        if rng.random() < 0.8:
            body["seed"] = self._seed()
        if body["stream"] and rng.random() < 0.8:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.2}
        if rng.random() < 0.4:
            body["cache_salt"] = rng.choice(_SALTS)
        if rng.random() < 0.06:
            body["timeout"] = rng.choice((rng.uniform(0.01, 0.3), 60.0))
        if rng.random() < 0.2:
            body["priority"] = rng.randrange(-2, 3)
            if body["priority"] > 0:  # it may wait for as long as others come
                body.setdefault("timeout", PATIENCE / 4)
        if rng.random() < 0.5:
            most = self._facts.max_drafts
            body["speculation"] = {"num_speculative_tokens": min(most, rng.choice((0, 1, 3, 8)))}
            if self._facts.drafters and most and rng.random() < 0.5:
                body["speculation"]["drafter"] = rng.choice(self._facts.drafters)
        return body

    def _sampling(self, body: dict[str, Any], *, grammars: bool = True) -> Sequence[str]:
        """Adds fields to ``body``; returns what they exercise."""
        rng = self._rng
        features = []
        body |= rng.choice(
            (
                {"temperature": 0},
                {"temperature": 0},
                {},
                {"temperature": 0.7, "top_p": 0.9},
                {"temperature": 1.3, "top_k": 20},
                {"temperature": 1, "min_p": 0.05},
            )
        )
        if rng.random() < 0.25:
            body |= rng.choice(
                (
                    {"frequency_penalty": rng.uniform(-2, 2)},
                    {"presence_penalty": rng.uniform(-2, 2), "repetition_penalty": 1.2},
                    {"repetition_penalty": 0.8},
                )
            )
            features.append("penalties")
        if rng.random() < 0.15:
            body["logit_bias"] = {str(self._id()): rng.uniform(-5, 5) for _ in range(rng.randrange(1, 5))}
            features.append("bias")
        if rng.random() < 0.2:
            body["stop"] = rng.choice((["e"], ["th", "天"], "a b"))
            body["include_stop_str_in_output"] = rng.random() < 0.3
            features.append("stop")
        if grammars and rng.random() < 0.2:
            name, fields = rng.choice(_GRAMMARS)
            if name == "regex":  # mostly a new one, so that something is compiled all the time
                pattern = f"{fields['structured_outputs']['regex']}|{rng.randrange(10**4)}"
                fields = {"structured_outputs": {"regex": pattern}}
            body |= fields
            features += [name, "grammars"]
            return features
        if rng.random() < 0.2:
            body |= rng.choice(
                (
                    {"min_tokens": min(3, body["max_tokens"])},
                    {"bad_words": ["e", "the"]},
                    {"allowed_token_ids": sorted({self._id() for _ in range(40)})},
                    {"stop_token_ids": [self._id(), self._id()]},
                    {"ignore_eos": True},
                )
            )
            features.append("masks")
        return features

    def _refused(self) -> Planned:
        """One that has to be refused."""
        rng = self._rng
        good: dict[str, Any] = {"model": self._facts.model, "prompt": "a", "max_tokens": 4}
        path, change, status = rng.choice(
            (
                (COMPLETIONS, {"model": "another"}, 404),
                (COMPLETIONS, {"n": 10**6}, 400),
                (COMPLETIONS, {"temperature": 5}, 400),
                (COMPLETIONS, {"prompt": []}, 400),
                (COMPLETIONS, {"prompt": [-1]}, 400),
                (COMPLETIONS, {"max_tokens": 10**6}, 400),
                (COMPLETIONS, {"prompt": "a " * 20_000}, 400),
                (COMPLETIONS, {"structured_outputs": {"regex": "a(b"}}, 400),
                (COMPLETIONS, {"structured_outputs": {"json": {"type": "nothing"}}}, 400),
                (COMPLETIONS, {"stream": True, "structured_outputs": {"choice": []}}, 400),
                (COMPLETIONS, {"seventh_sense": 7}, 400),
                (CHAT, {}, 400),
                ("/v1/nothing", {}, 404),
            )
        )
        planned = self._plan(path, {**good, **change}, {"refused"}, Manner())
        raw, method = planned.raw, "POST"
        what = rng.random()
        if path == COMPLETIONS and what < 0.1:
            raw, status = b'{"model": ', 400
        elif path == COMPLETIONS and what < 0.15:
            raw, method, status = b"", "GET", 405
        return Planned(
            planned.number, path, planned.body, raw, planned.manner, planned.features, method=method, expected=status
        )

    def _prompt(self) -> Any:
        return self._text(self._rng.choice((1, 4, 12, 30))) if self._rng.random() < 0.5 else self._ids()

    def _text(self, words: int) -> str:
        # Few beginnings, so that some prompts share their first blocks.
        first = ["the quick brown fox jumps over the lazy dog"] if words > 8 and self._rng.random() < 0.5 else []
        return " ".join([*first, *self._rng.choices(_WORDS, k=words)])

    def _ids(self) -> list[int]:
        return [self._id() for _ in range(self._rng.choice((1, 5, 17, 60, 150)))]

    def _id(self) -> int:
        return self._rng.randrange(3, self._facts.vocab_size)

    def _seed(self) -> int:
        return self._rng.randrange(2**53)
