"""HTML elements that escape by default, and token texts with everything invisible made visible.

A report holds texts that a tokenizer or a model made up. Whatever is not an :class:`Html` is escaped, so that a
forgotten call cannot let such a text become markup.
"""

from __future__ import annotations

import html
import unicodedata

Attribute = str | int | bool | None


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = Html | str | int | None

_VOID = frozenset({"br", "meta"})
# What a person should see for the characters that are common in token texts.
_MARKS = {" ": "\u2423", "\n": "\u23ce", "\t": "\u21e5", "\r": "\u27e8CR\u27e9"}
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})


def element(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """``<name ...>children</name>``; ``class_`` becomes ``class``, ``data_x`` ``data-x``, None and False leave out."""
    shown = "".join(_attribute(key, value) for key, value in attributes.items() if value not in (None, False))
    if name in _VOID:
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """The children one after the other; None adds nothing."""
    return Html("".join(_escaped(child) for child in children if child is not None))


def caption(text: str) -> Html:
    """A table's caption that stays in sight while a wide table is scrolled."""
    return element("caption", element("span", text))


def visible(text: str) -> Html:
    """``text`` on one line, every space, control, format or otherwise invisible character as a mark of its own.

    Direction overrides and lone surrogates become their code points: shown as they are, the first would reorder the
    page and the second could not be encoded.
    """
    if not text:
        return element("i", "(no text)", class_="mark")
    parts: list[Child] = []
    plain = ""
    for i, character in enumerate(text):
        category = unicodedata.category(character)
        if category in _INVISIBLE:
            parts += [plain, element("span", _mark(character), class_="mark")]
            plain = ""
        elif category.startswith("M") and i == 0:
            plain += "\u25cc" + character  # a combining mark needs something to stand on
        else:
            plain += character
    return element("bdi", *parts, plain)


def _mark(character: str) -> str:
    if character in _MARKS:
        return _MARKS[character]
    return f"\u27e8U+{ord(character):04X}\u27e9"  # the control pictures of U+2400 are in few fonts


def _escaped(child: Html | str | int) -> str:
    if isinstance(child, Html):
        return child
    return html.escape(_encodable(str(child)))


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(_encodable(str(value)))}"'


def _encodable(text: str) -> str:
    """Without what UTF-8 or HTML cannot hold, or what a reader cannot see and what would reorder the page.

    Control characters other than white space, formats such as U+202E and lone surrogates become their code points.
    """
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(
        f"\u27e8U+{ord(c):04X}\u27e9" if c not in "\t\n\r" and unicodedata.category(c) in hidden else c for c in text
    )
