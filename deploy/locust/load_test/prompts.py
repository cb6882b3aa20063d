"""Classes of prompts, and which one a request takes."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN_PROMPTS = Path(__file__).parent / "prompts.json"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Turns of a chat, user and assistant in turn, the last one the user's. A plain text is one turn."""

    kind: str
    turns: tuple[str, ...]

    @property
    def text(self) -> str:
        """As the prompt of a completion."""
        if len(self.turns) == 1:
            return self.turns[0]
        roles = ("User", "Assistant")
        return "".join(f"{roles[i % 2]}: {turn}\n" for i, turn in enumerate(self.turns)) + "Assistant:"

    @property
    def messages(self) -> list[dict[str, str]]:
        """As the messages of a chat."""
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(self.turns)]


class PromptMix:
    """Draws a class by weight, then a prompt of it, each as likely as any other."""

    def __init__(self, prompts: Mapping[str, Sequence[Prompt]], weights: Mapping[str, float]) -> None:
        self.prompts = {kind: tuple(prompts[kind]) for kind in weights}
        self._kinds = tuple(weights)
        self._weights = tuple(weights.values())

    def draw(self, rng: random.Random) -> Prompt:
        (kind,) = rng.choices(self._kinds, self._weights)
        return rng.choice(self.prompts[kind])


def load_prompts(path: Path = OWN_PROMPTS) -> dict[str, tuple[Prompt, ...]]:
    """A JSON object of classes: each a list of texts, or of lists of turns. Raises ValueError for anything else."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"--prompts: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--prompts: {path} is not JSON in UTF-8: {error}") from error
    if not isinstance(found, dict) or not found:
        raise ValueError(f"--prompts: {path} must hold an object of classes")
    prompts = {}
    for kind, entries in found.items():
        if not isinstance(entries, list) or not entries:
            raise ValueError(f"--prompts: class {kind!r} of {path} must be a list of prompts, and not an empty one")
        prompts[kind] = tuple(_prompt(kind, entry, path) for entry in entries)
    return prompts


def _prompt(kind: str, entry: object, path: Path) -> Prompt:
    turns: list[Any] = entry if isinstance(entry, list) else [entry]
    if not all(isinstance(turn, str) and turn for turn in turns) or len(turns) % 2 == 0:
        raise ValueError(
            f"--prompts: class {kind!r} of {path} has an entry that is neither a text nor an odd number of turns"
        )
    return Prompt(kind, tuple(turns))


def parse_classes(text: str, known: Sequence[str]) -> dict[str, float]:
    """``chat=3,code`` as weights; all classes alike if it is empty. Raises ValueError with what is wrong."""
    if not text.strip():
        return dict.fromkeys(known, 1.0)
    weights = {}
    for part in text.split(","):
        kind, _, weight = (word.strip() for word in part.partition("="))
        if kind not in known:
            raise ValueError(f"--classes: there is no class {kind!r}; there are {', '.join(known)}")
        try:
            weights[kind] = float(weight or 1)
        except ValueError:
            weights[kind] = -1.0
        if not 0 < weights[kind] < float("inf"):
            raise ValueError(f"--classes: the weight of {kind} must be a positive number; it is {weight!r}")
    return weights
