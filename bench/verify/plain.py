"""Plain answers: every request alone, without speculation, from a cold cache. What everything else is compared with.

Noise is keyed by the output index, so the answer to a smaller max_tokens is a prefix of the answer to a larger one:
each request is decoded once, to the greatest length that any case asks for. The suite's first cases decode shorter
lengths plainly and hold that this is so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.offline import Completion, OfflineConfig, OfflineEngine, blocks_for, ledger_wanted
from bench.verify.pool import Cell, RequestPool
from model.loader import LoadedModel

BLOCK_SIZE = 16
PLAIN_BATCHED_TOKENS = 512


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

    def compute(self, needs: Mapping[Cell, int], done: Callable[[Cell, int], None] = lambda cell, tokens: None) -> None:
        """Decode what is lacking; ``needs`` is the output length by request. ``done`` is told of each.

        Raises RuntimeError if one fails.
        """
        lacking = {cell: length for cell, length in needs.items() if length > self._answers.get(cell, (0,))[0]}
        if not lacking:
            return
        requests = {cell: self._pool.request(cell, length) for cell, length in lacking.items()}
        blocks = max(blocks_for([request], BLOCK_SIZE, 0) for request in requests.values())
        engine = OfflineEngine(self._model.executor, self.config, num_blocks=blocks)
        for cell, request in requests.items():
            (answer,) = engine.generate([request])
            self._answers[cell] = lacking[cell], answer
            done(cell, lacking[cell])
        engine.check_clean()

    def answer(self, cell: Cell, max_tokens: int) -> Completion:
        """Raises KeyError if it was not computed to that length."""
        length, answer = self._answers[cell]
        if length < max_tokens:
            raise KeyError(f"{cell} was computed to {length} tokens, not to {max_tokens}")
        return shortened(answer, max_tokens)

    def token_ids(self) -> dict[Cell, tuple[int, ...]]:
        """The longest known answers."""
        return {cell: answer.token_ids for cell, (_, answer) in self._answers.items()}
