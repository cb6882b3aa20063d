"""Keeps what clients write from becoming control tokens of the model.

A client's text may spell a token such as ``<|im_end|>``. The tokenizer would take it for the token itself, and the text
could end its own message and begin another. So before a template sees a text, each such spelling in it is swapped for
one private-use character, which no template looks into, cuts or completes. Where the characters come out of the
template is what must be encoded as ordinary text; what stands between them is the template's own, or harmless.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any

_FIRST = 0x100000  # of the last private-use plane
_LAST = 0x10FFFD
_PLACEHOLDER = f"[{chr(_FIRST)}-{chr(_LAST)}]"
_PLACEHOLDERS = re.compile(f"({_PLACEHOLDER})")
# A spelling may also be completed by what follows a text, or precedes it. Shorter pieces are too common to be swapped.
_MIN_EDGE = 2


class Guard:
    """Swaps spellings for placeholders, and finds them again in what a template made of the texts.

    ``spellings`` are the control tokens' texts. Not thread-safe; for one chat.
    """

    def __init__(self, spellings: Collection[str]) -> None:
        self._finder = _finder(tuple(spellings))
        self._placeholders: dict[str, str] = {}
        self._originals: dict[str, str] = {}

    def swap(self, value: Any, keep: Collection[str] = ()) -> Any:
        """``value`` (of JSON) with every spelling in its strings and names swapped, but for those in ``keep``.

        Raises ValueError if there are more different ones than placeholders.
        """
        if isinstance(value, str):
            return self._swap_text(value, keep)
        if isinstance(value, list):
            return [self.swap(item, keep) for item in value]
        if isinstance(value, dict):
            return {self._swap_text(name, keep): self.swap(item, keep) for name, item in value.items()}
        return value

    def split(self, text: str) -> list[str]:
        """Alternating: text of the template, what was swapped, text of the template, and so on; ends with the former.

        Any of them may be empty but what was swapped; runs of that are one.
        """
        runs: list[list[str]] = [[]]
        for i, piece in enumerate(_PLACEHOLDERS.split(text)):
            original = self._originals.get(piece) if i % 2 else None
            if original is None:
                if piece:
                    runs[-1].append(piece)
            elif len(runs) > 1 and not runs[-1]:
                runs[-2].append(original)
            else:
                runs += [[original], []]
        return ["".join(run) for run in runs]

    def count(self, pieces: Sequence[str]) -> int:
        """How many control tokens stand in pieces of the template."""
        return sum(len(self._finder.spellings.findall(piece)) for piece in pieces)

    def restore(self, text: str) -> str:
        """The text with what was swapped back in it: for messages to people."""
        return "".join(self.split(text))

    def _swap_text(self, text: str, keep: Collection[str]) -> str:
        begin, end = self._finder.edges(text)
        if begin or end < len(text):
            return (
                self._placeholder(text[:begin])
                + self._swap_inside(text[begin:end], keep)
                + (self._placeholder(text[end:]))
            )
        return self._swap_inside(text, keep)

    def _swap_inside(self, text: str, keep: Collection[str]) -> str:
        return self._finder.pattern.sub(
            lambda match: match[0] if match[0] in keep else self._placeholder(match[0]), text
        )

    def _placeholder(self, original: str) -> str:
        if not original:
            return ""
        found = self._placeholders.get(original)
        if found is None:
            if _FIRST + len(self._placeholders) > _LAST:
                raise ValueError("there are too many different spellings of control tokens in it")
            found = chr(_FIRST + len(self._placeholders))
            self._placeholders[original] = found
            self._originals[found] = original
        return found


class _Finder:
    """Finds spellings in a text, the longest first, and halves of them at its edges."""

    def __init__(self, spellings: tuple[str, ...]) -> None:
        trie = _trie_pattern(spellings)
        self.spellings = re.compile(trie or "(?!)", re.DOTALL)
        # A placeholder that a client wrote is itself swapped.
        self.pattern = re.compile(f"{trie}|{_PLACEHOLDER}" if trie else _PLACEHOLDER, re.DOTALL)
        self._beginnings = frozenset(text[:i] for text in spellings for i in range(_MIN_EDGE, len(text)))
        self._endings = frozenset(text[i:] for text in spellings for i in range(1, len(text) - _MIN_EDGE + 1))
        self._longest = max(map(len, spellings), default=0)

    def edges(self, text: str) -> tuple[int, int]:
        """Where the text begins, and ends, without the longest piece that could be a spelling's end, or beginning."""
        sizes = range(min(self._longest, len(text)), _MIN_EDGE - 1, -1)
        begin = next((size for size in sizes if text[:size] in self._endings), 0)
        end = next((len(text) - size for size in sizes if text[len(text) - size :] in self._beginnings), len(text))
        return (begin, end) if begin <= end else (len(text), len(text))


@lru_cache(maxsize=4)
def _finder(spellings: tuple[str, ...]) -> _Finder:
    return _Finder(spellings)


def _trie_pattern(spellings: Iterable[str]) -> str:
    """A pattern of all of them, the longest first, that looks at no character of a text more often than one is long."""
    trie: dict[str, Any] = {}
    for spelling in spellings:
        node = trie
        for character in spelling:
            node = node.setdefault(character, {})
        node[""] = {}
    return _alternatives(trie)


def _alternatives(node: dict[str, Any]) -> str:
    branches = []
    for first, rest in node.items():
        text = first
        while len(rest) == 1 and "" not in rest:  # no fork
            ((character, rest),) = rest.items()
            text += character
        if first:
            branches.append(re.escape(text) + ("" if rest.keys() <= {""} else _alternatives(rest)))
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return pattern + "?" if "" in node else pattern
