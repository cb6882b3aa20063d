"""Grammars compiled by llguidance for one tokenizer. Imports no torch: the process that checks grammars uses it too."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from importlib.metadata import version

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from model.panics import is_panic, panics_as_errors

LIBRARY = f"llguidance {version('llguidance')}"  # another version may allow other tokens
MAX_GRAMMAR_BYTES = 128 * 1024
# About 1 kB each, shared by the matchers of a grammar: a schema of an everyday kind needs some hundreds.
MAX_LEXER_STATES = 20_000
# Items of the parser behind one token, and for one mask. A row of n items costs n * n, so these bound the time of one
# call. An object needs 4 in a row for each optional property, an ambiguous grammar any number.
MAX_ROW_ITEMS = 800
MAX_STEP_ITEMS = 3_000
# What the lexer may spend on large regexes: they are refused within about 0.1 s, rather than 1 s by default.
MAX_INITIAL_FUEL = 200_000
# What a compiled grammar should keep, in bytes: for itself, and for each byte of its text (measured, rounded up).
_FIXED_BYTES, _BYTES_PER_BYTE = 256 * 1024, 64


class GrammarError(ValueError):
    """A grammar that cannot be used; the message is one line, for the client."""


class NoGrammars(Exception):
    """This tokenizer cannot be had for grammars; the message is one line."""


@dataclass(frozen=True, slots=True)
class TokenizerText:
    """All that a compiler is built from; picklable."""

    tokenizer: str  # tokenizer.json
    vocab_size: int  # width of a logits row
    eos_token_ids: tuple[int, ...]


class GrammarCompiler:
    """Compiles for one tokenizer; safe from several threads. Raises NoGrammars if llguidance cannot take it."""

    def __init__(self, text: TokenizerText, *, max_lexer_states: int = MAX_LEXER_STATES) -> None:
        if not text.eos_token_ids:
            raise NoGrammars("the model has no end-of-text token")
        try:
            self._tokenizer = _tokenizer(text)
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            raise NoGrammars(f"its tokenizer cannot be used for grammars: {first_line(str(error))}") from error
        self.vocab_size = text.vocab_size
        self.eos_token_ids = frozenset(text.eos_token_ids)
        self._limits = LLParserLimits(
            max_lexer_states=max_lexer_states,
            initial_lexer_fuel=MAX_INITIAL_FUEL,
            max_items_in_row=MAX_ROW_ITEMS,
            step_max_items=MAX_STEP_ITEMS,
            verbose_errors=False,
        )

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the start, its first mask computed. Raises GrammarError if no output can satisfy it."""
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"is larger than {MAX_GRAMMAR_BYTES} bytes")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(f"cannot be compiled: {reason(matcher.get_error())}")
        matcher.compute_bitmask()
        if matcher.is_error():
            error = reason(matcher.get_error())
            raise GrammarError("allows no output" if error.startswith("NoExtension") else f"is too complex: {error}")
        return matcher


def _tokenizer(text: TokenizerText) -> LLTokenizer:
    """As wide as a logits row, or as its own ids if they are more."""
    eos = list(text.eos_token_ids)
    try:
        return LLTokenizer(text.tokenizer, n_vocab=text.vocab_size, eos_token=eos)
    except ValueError:  # rare, and to build one takes time
        return LLTokenizer(text.tokenizer, n_vocab=LLTokenizer(text.tokenizer).vocab_size, eos_token=eos)


def walk(matcher: LLMatcher, steps: int) -> None:
    """Go a few tokens into the grammar, always by the first that is allowed. Raises GrammarError if it gives up."""
    for _ in range(steps):
        matcher.compute_ff_tokens()
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if not bits or matcher.is_stopped():
            break
        first = (bits & -bits).bit_length() - 1
        if not matcher.try_consume_tokens([first]):
            break
    if matcher.is_error():
        raise GrammarError(f"is too complex: {reason(matcher.get_error())}")


class GrammarCache:
    """Compiled grammars by their text, the least recently used leave first. Safe from several threads.

    The newest one stays, however large it is. ``max_bytes`` bounds the sum of estimates.
    """

    def __init__(self, compiler: GrammarCompiler, max_bytes: int) -> None:
        self.compiler = compiler
        self.max_bytes = max_bytes
        self._held: OrderedDict[str, LLMatcher] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, grammar: str) -> bool:
        return grammar in self._held

    @panics_as_errors
    def matcher(self, grammar: str, *, anew: bool = False) -> LLMatcher:
        """A new matcher at the start. Raises GrammarError.

        Matchers of one compiled grammar share the lexer's states, and so its bound on them: who runs into it, maybe for
        what others did, takes one that is compiled ``anew``, as all that come later do.
        """
        with self._lock:
            compiled = None if anew else self._held.get(grammar)
            if compiled is not None:
                self._held.move_to_end(grammar)
                return compiled.deep_copy()
        compiled = self.compiler.compile(grammar)
        with self._lock:
            if grammar not in self._held:
                self._bytes += estimated_bytes(grammar)
            self._held[grammar] = compiled
            self._held.move_to_end(grammar)
            while self._bytes > self.max_bytes and len(self._held) > 1:
                oldest, _ = self._held.popitem(last=False)
                self._bytes -= estimated_bytes(oldest)
            return compiled.deep_copy()


def estimated_bytes(grammar: str) -> int:
    """What a compiled grammar should keep."""
    return _FIXED_BYTES + _BYTES_PER_BYTE * len(grammar.encode())


def has_too_many_items(error: str) -> bool:
    """Whether llguidance ran into MAX_ROW_ITEMS or MAX_STEP_ITEMS, as it always does behind the same tokens."""
    return "Current row has" in error or "Too many items" in error


def reason(error: str) -> str:
    """Why llguidance gave up, in a line for the client."""
    line = first_line(error)
    row = re.search(r"Current row has (\d+) items", error)
    if row:
        return f"{row[1]} ways to go on have to be followed at once, at most {MAX_ROW_ITEMS} can be; is it ambiguous?"
    if has_too_many_items(error):
        return f"more than {MAX_STEP_ITEMS} ways to go on have to be followed for one token; is it ambiguous?"
    said = re.search(r"^error: (.+)$", error, re.MULTILINE)  # the regex compiler's, below a drawing
    return f"{line.removesuffix('regex parse error:').rstrip(' :')}: {said[1]}"[:300] if said else line


def first_line(text: str) -> str:
    """The first line that says something, bounded."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in lines if line), "no reason given")[:300]
