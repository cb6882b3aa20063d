"""What a request says."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .options import Options
from .prompts import Prompt


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request to be sent; ``leave_after``: the client leaves after so many tokens."""

    kind: str
    body: Mapping[str, Any]
    leave_after: int | None


class Bodies:
    """The requests of one user, one after the other; the same for the same ``rng``, but for their salts.

    ``ids`` are the token ids of each prompt's text, where prompts have a fixed length.
    """

    def __init__(
        self, options: Options, model: str, rng: random.Random, ids: Mapping[Prompt, Sequence[int]] | None = None
    ) -> None:
        self._options = options
        self._model = model
        self._rng = rng
        self._ids = ids

    def next(self) -> Wanted:
        options, rng = self._options, self._rng
        prompt = options.mix.draw(rng)
        length = rng.randint(*options.output_tokens)
        seed = rng.getrandbits(31)
        leaves = rng.random() < options.cancel
        after = rng.randint(1, max(1, length - 1))
        body: dict[str, Any] = {
            "model": self._model,
            **self._prompt(prompt),
            "max_tokens": length,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.temperature > 0:
            body["seed"] = seed
        if not options.plain_openai:
            body["stream_options"]["continuous_usage_stats"] = True
            body["return_token_ids"] = True  # then each step is a chunk, also one whose text is not complete
            body["ignore_eos"] = not options.natural_end
            if not options.sharing:
                body["cache_salt"] = secrets.token_hex(8)  # not from the seed: another run shares nothing either
        if options.num_speculative_tokens is not None:
            body["speculation"] = {"num_speculative_tokens": options.num_speculative_tokens}
        return Wanted(prompt.kind, body, after if leaves else None)

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        if self._options.chat:
            return {"messages": prompt.messages}
        if self._ids is None:
            return {"prompt": prompt.text}
        return {"prompt": brought_to(self._ids[prompt], self._options.prompt_tokens)}


def brought_to(ids: Sequence[int], length: int) -> list[int]:
    """``ids`` over and over, cut at ``length``."""
    return (list(ids) * (length // len(ids) + 1))[:length]
