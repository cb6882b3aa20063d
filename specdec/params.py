"""Sampling parameters of one sequence: frozen, resolved, already validated by the server's schema."""

from __future__ import annotations

from dataclasses import dataclass

GREEDY_TEMPERATURE = 0.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything that decides which token comes next, apart from the logits and the history.

    ``stop_token_ids`` holds every id that ends the sequence (end-of-text ids unless the request
    ignores them, and the request's own). ``min_tokens`` forbids exactly these.
    """

    seed: int  # the sequence's own (seed_j = mix_seed(seed, j)), 64 bits unsigned
    max_tokens: int = 16  # output tokens, >= 0; 0 only scores the prompt
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # over output
    presence_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token-id sequences that must not appear
    grammar: str | None = None  # what the whole output must be, see specdec.grammar.text
    logprobs: int | None = None  # None: no logprobs; n: the sampled token and the n best
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None  # None: the server's; 0: off for this sequence
    drafter: str | None = None  # None: the server's
    trace_drafts: bool = False  # each step's output says what was drafted

    @property
    def greedy(self) -> bool:
        return self.temperature == GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def plain(self) -> bool:
        """True if the processed logits do not depend on the history: no penalties, masks or bias."""
        return (
            not self.has_penalties
            and not self.logit_bias
            and self.allowed_token_ids is None
            and not self.bad_words
            and self.grammar is None
            and self.min_tokens == 0
        )
