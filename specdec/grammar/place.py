"""Where one sequence is in its grammar."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from llguidance import LLMatcher

from specdec.errors import SamplingError
from specdec.grammar.compiler import GrammarCache, has_too_many_items, reason
from specdec.grammar.text import unforced
from specdec.pipeline import Mask

MAX_CHECKED_DRAFTS = 16  # tokens in a step: each may cost what a token of the output may
_NEAR_END = 32
_MAX_CATCH_UP = 16  # tokens that a second matcher consumes rather than being copied


class GrammarTooComplex(SamplingError):
    """llguidance gave up on a grammar at some position of an output."""


class GrammarPlace:
    """The grammar's state behind some output tokens, which ``move_to`` names.

    That the state depends on these tokens alone is a promise: whatever was tried and taken back leaves no trace. A
    matcher that runs out of lexer states is compiled anew and asked once more, so that what drafts have cost it, or
    other sequences of the same grammar, is not held against this one.
    """

    def __init__(self, cache: GrammarCache, grammar: str) -> None:
        self._cache = cache
        self._grammar = grammar
        self._matcher: LLMatcher = cache.matcher(grammar)
        self._tokens: list[int] = []  # consumed
        self._forced: list[int] = []  # what the grammar forces from output index _forced_at on
        self._forced_at = 0
        self._forces = True  # False once it took too much to find out
        self._checks_drafts = True  # so
        self._probe: LLMatcher | None = None
        self._probed: list[int] = []  # consumed by it

    def move_to(self, tokens: list[int]) -> None:
        """The state behind ``tokens``, all of which the grammar allowed in turn. Raises SamplingError if it did not."""
        common = _common_prefix(self._tokens, tokens)
        surplus = len(self._tokens) - common
        if surplus and not self._matcher.rollback(surplus):
            self._renew()
            common = 0
        del self._tokens[common:]
        self._consume(tokens[common:])

    def mask(self) -> Mask:
        """``[V]``: what may follow; an end-of-text token exactly where the grammar accepts. Raises SamplingError."""
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._check_items()
            self._again()
            bits = self._matcher.compute_bitmask()
            self._check()
        mask = self._unpack(bits)
        return self._unforced_mask() if self._allows_nothing_real(mask) else mask

    def _unpack(self, bits: bytes) -> Mask:
        size = self._cache.compiler.vocab_size
        mask: Mask = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=size, bitorder="little").view(np.bool_)
        return mask

    def _allows_nothing_real(self, mask: Mask) -> bool:
        """Whether the only token allowed is refused by the grammar itself.

        Where text is forced that spells a special token, llguidance's tokenizer makes it that token.
        """
        if np.count_nonzero(mask) != 1:
            return False
        only = int(mask.argmax())
        if only in self._cache.compiler.eos_token_ids:
            return not self._matcher.is_accepting() and not self._matcher.is_stopped()
        return self._matcher.validate_tokens([only]) == 0

    def _unforced_mask(self) -> Mask:
        matcher = self._cache.matcher(unforced(self._grammar))
        matcher.try_consume_tokens(self._tokens)
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarTooComplex(f"the grammar is too complex: {reason(matcher.get_error())}")
        return self._unpack(bits)

    def num_allowed(self, tokens: Seq[int]) -> int:
        """How many of ``tokens`` the grammar allows here, one after the other; an end-of-text token may be the last.

        Each is consumed by itself: llguidance holds no limit while it validates several.
        That is done to a second matcher, as one that runs into a limit is lost; no draft is allowed here any more then.
        """
        if not self._checks_drafts:
            return 0
        probe, allowed = self._moved_probe(), 0
        for token in tokens:
            if token in self._cache.compiler.eos_token_ids:
                allowed += probe.is_accepting() or probe.is_stopped()
                break
            if probe.try_consume_tokens([token]) != 1:
                break
            self._probed.append(token)
            allowed += 1
        if probe.is_error():
            self._probe, self._checks_drafts = None, False
            return 0
        return allowed

    def _moved_probe(self) -> LLMatcher:
        """The second matcher, here. To copy one costs time by the length of its output, so it is kept."""
        if self._probe is not None:
            common = _common_prefix(self._probed, self._tokens)
            surplus, missing = len(self._probed) - common, self._tokens[common:]
            if len(missing) <= _MAX_CATCH_UP and (not surplus or self._probe.rollback(surplus)):
                del self._probed[common:]
                consumed = self._probe.try_consume_tokens(missing) if missing else 0
                self._probed += missing[:consumed]
                if consumed == len(missing):
                    return self._probe
        self._probe, self._probed = self._matcher.deep_copy(), list(self._tokens)
        return self._probe

    def forced(self, limit: int) -> list[int]:
        """At most ``limit`` tokens for the text that must follow, as the tokenizer would write it: a guess at the ids.

        Maybe none; the text that must follow can be written by other tokens too.
        """
        if not self._forces:
            return []
        position = len(self._tokens)
        done = position - self._forced_at
        known = self._forced[done:] if 0 <= done < len(self._forced) else []
        if not known or self._forced[:done] != self._tokens[self._forced_at :]:
            self._forced, self._forced_at = self._matcher.compute_ff_tokens(), position
            if self._matcher.is_error():
                self._forced, self._forces = [], False
                self._again()
            del self._forced[self.num_allowed(self._forced[:MAX_CHECKED_DRAFTS]) :]
            known = self._forced
        return known[:limit]

    def _consume(self, tokens: list[int]) -> None:
        if not tokens:
            return
        if self._matcher.try_consume_tokens(tokens) == len(tokens) and not self._matcher.is_error():
            self._tokens += tokens
            return
        self._check_items()
        before = self._tokens
        self._renew()
        self._tokens = before + tokens
        consumed = self._matcher.try_consume_tokens(self._tokens)
        self._check()
        if consumed < len(self._tokens):
            raise SamplingError(f"the grammar does not allow the output's token {consumed}")

    def _again(self) -> None:
        """The same place by a new matcher."""
        tokens = self._tokens
        self._renew()
        self._matcher.try_consume_tokens(tokens)
        self._check()
        self._tokens = tokens

    def _renew(self) -> None:
        self._matcher = self._cache.matcher(self._grammar, anew=True)
        self._tokens = []
        self._probe = None

    def _check_items(self) -> None:
        """No other matcher would get further than one that ran into the limits on items; finding out takes long."""
        if self._matcher.is_error() and has_too_many_items(self._matcher.get_error()):
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            error = reason(self._matcher.get_error())
            raise GrammarTooComplex(f"the grammar is too complex at output position {len(self._tokens)}: {error}")


def _common_prefix(ours: list[int], theirs: list[int]) -> int:
    shorter = min(len(ours), len(theirs))
    if theirs[:shorter] == ours[:shorter]:  # at the speed of C
        return shorter
    at = max(0, shorter - _NEAR_END)  # drafts that were not accepted
    if theirs[:at] != ours[:at]:
        at = 0
    return next(i for i in range(at, shorter) if ours[i] != theirs[i])
