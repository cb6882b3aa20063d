"""Plain answers: every request alone, without speculation, from a cold cache. What everything else is compared with.

Noise is keyed by the output index, so the answer to a smaller max_tokens is a prefix of the answer to a larger one:
each request is decoded once, to the greatest length that any case asks for. The suite's first cases decode shorter
lengths plainly and hold that this is so. What a case asks for is cut to its own length, so no case depends on what
other cases needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.offline import Completion, OfflineConfig, OfflineEngine, blocks_for, ledger_wanted
from bench.verify.pool import Cell, RequestPool
from model.loader import LoadedModel
from specdec.params import SamplingParams

BLOCK_SIZE = 16
PLAIN_BATCHED_TOKENS = 512


class PlainError(Exception):
    """A request could not be decoded plainly; the message is one line and names it."""


def plain_config(model: LoadedModel, *, ledger: bool = False) -> OfflineConfig:
    """Default chunk and block size, no drafts, no prefix cache."""
    return OfflineConfig(
        ledger=ledger or ledger_wanted(),
        block_size=BLOCK_SIZE,
        num_speculative_tokens=0,
        max_num_batched_tokens=PLAIN_BATCHED_TOKENS,
        max_num_seqs=1,
        prefix_cache=False,
        kernels=model.kernels,
    )


def shortened(answer: Completion, max_tokens: int) -> Completion:
    """What ``answer`` would have been with ``max_tokens``, which must not exceed its own."""
    if len(answer.token_ids) <= max_tokens:
        return answer
    return Completion(answer.token_ids[:max_tokens], answer.logprobs[:max_tokens], "length")


class PlainAnswers:
    """The answers so far, by request."""

    def __init__(self, model: LoadedModel, pool: RequestPool, *, ledger: bool = False) -> None:
        self._model = model
        self.config = plain_config(model, ledger=ledger)
        self._pool = pool
        self._answers: dict[Cell, tuple[int, Completion]] = {}
        self._errors: dict[Cell, tuple[int, str]] = {}  # the shortest length that failed, and why

    @property
    def positions(self) -> int:
        """Tokens decoded."""
        return sum(len(answer.token_ids) for _, answer in self._answers.values())

    def compute(self, needs: Mapping[Cell, int], done: Callable[[Cell, int], None] = lambda cell, tokens: None) -> None:
        """Decode what is lacking; ``needs`` is the output length by request. ``done`` is told of each.

        First turns come before later ones, which hold their answers. What the engine raises is kept: ``answer`` and
        ``request`` raise it for whoever needs that request.
        """
        for cell, length in sorted(needs.items(), key=lambda item: item[0].after > 0):
            if length <= self._answers.get(cell, (0,))[0] or (cell in self._errors and length >= self._errors[cell][0]):
                continue
            try:
                self._answers[cell] = length, self._decode(*self.request(cell, length))
            except PlainError as error:  # of the first turn
                self._errors[cell] = length, str(error)
            except Exception as error:  # whatever the engine raises is a finding about it
                found = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
                self._errors[cell] = length, f"plain decoding of {cell} failed: {found}"
            done(cell, length)

    def request(self, cell: Cell, max_tokens: int) -> tuple[tuple[int, ...], SamplingParams]:
        """Prompt and parameters. Raises PlainError or KeyError if a later turn's first turn has no answer."""
        if not cell.after:
            return self._pool.request(cell, max_tokens)
        return self._pool.later_turn(cell, self.answer(cell.first_turn, cell.after).token_ids, max_tokens)

    def answer(self, cell: Cell, max_tokens: int) -> Completion:
        """Raises KeyError if it was not computed to that length, PlainError if that failed."""
        length, answer = self._answers.get(cell, (0, None))
        if length < max_tokens and cell in self._errors:
            raise PlainError(self._errors[cell][1])
        if answer is None or length < max_tokens:
            raise KeyError(f"{cell} was computed to {length} tokens, not to {max_tokens}")
        return shortened(answer, max_tokens)

    def _decode(self, prompt: tuple[int, ...], params: SamplingParams) -> Completion:
        blocks = blocks_for([(prompt, params)], BLOCK_SIZE, 0)
        engine = OfflineEngine(self._model.executor, self.config, num_blocks=blocks)
        (answer,) = engine.generate([(prompt, params)])
        engine.check_clean()
        return answer
