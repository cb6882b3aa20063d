"""A sequence: the decoding view of one choice of a request."""

from __future__ import annotations

from kvcache.table import BlockTable
from specdec.params import SamplingParams


class Sequence:
    """``tokens`` and ``num_computed`` are the whole state; everything else is derived from them.

    ::

        tokens          t0 t1 t2 t3 t4 t5 t6
                        |--prompt--|--output--|
        num_computed    ----------------^          KV exists for tokens[:num_computed]

    A decoding sequence has ``num_computed == len(tokens) - 1`` between steps: the last token has no
    KV yet. Prefill, a prefix-cache hit and resuming after preemption only start further left.
    ``prediction_token_ids`` is what the client expects the output to be like, a hint for drafters without effect on it.
    """

    __slots__ = ("num_computed", "num_prompt_tokens", "params", "prediction_token_ids", "seq_id", "table", "tokens")

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        table: BlockTable,
        *,
        prediction_token_ids: tuple[int, ...] = (),
    ) -> None:
        if not prompt_token_ids:
            raise ValueError(f"sequence {seq_id} has an empty prompt")
        self.seq_id = seq_id
        self.tokens: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.table = table
        self.prediction_token_ids = prediction_token_ids
        self.num_computed = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without KV: 1 for a decoding sequence, more while it catches up."""
        return len(self.tokens) - self.num_computed

    @property
    def decoding(self) -> bool:
        """The next full step samples and may speculate."""
        return self.num_uncomputed == 1 and self.num_computed > 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants between steps hold."""
        assert 0 <= self.num_computed < len(self.tokens), (self.seq_id, self.num_computed, len(self.tokens))
        assert self.num_prompt_tokens <= len(self.tokens), self.seq_id
        assert self.table.num_slots >= self.num_computed, (self.seq_id, self.table.num_slots, self.num_computed)
