"""How few tokens a text can have at least, told from its length in bytes and the parts of its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Part = Mapping[str, Any]

# NFC turns at most three bytes into one: the Kelvin sign becomes K, three Hangul letters of 9 bytes one of 3. One more
# for characters to come.
_NFC_SHRINKS = 4


@dataclass(frozen=True, slots=True)
class TokenLengthBound:
    """The least number of tokens of a text, without tokenizing it."""

    longest: int  # bytes of UTF-8 in one token, at most
    lost: bytes  # bytes that a tokenizer drops: its vocabulary lacks them

    def fewest_tokens(self, text: str) -> int:
        return -(-len(text.encode().translate(None, self.lost)) // self.longest)

    @classmethod
    def of(cls, tokenizer: Part) -> TokenLengthBound | None:
        """The bound for a parsed tokenizer.json.

        None unless every part is known to leave all of a text in its pieces: no unknown token (which may swallow any
        length), nothing stripped, lowered or taken apart.
        """
        if any(token["lstrip"] or token["rstrip"] for token in tokenizer["added_tokens"]):
            return None  # these take any amount of white space along
        model: Part = tokenizer["model"]
        shrinkage = _shrinkage(tokenizer["normalizer"])
        steps = list(_parts(tokenizer["pre_tokenizer"], "pretokenizers"))
        if model["type"] != "BPE" or shrinkage is None or not all(_splits_only(step) for step in steps):
            return None
        vocab, lost = model["vocab"], b""
        if any(step["type"] == "ByteLevel" for step in steps):
            if model["unk_token"] is not None:
                return None
            lost = bytes(byte for letter, byte in BYTE_LETTERS.items() if letter not in vocab)
        elif not model["byte_fallback"] or any(f"<0x{byte:02X}>" not in vocab for byte in range(256)):
            return None
        # Spelling a piece in UTF-8 is never shorter than what it stands for.
        pieces = [*vocab, *(token["content"] for token in tokenizer["added_tokens"])]
        return cls(shrinkage * max(len(piece.encode()) for piece in pieces), lost)


def _shrinkage(normalizer: Part | None) -> int | None:
    """How many bytes a normalizer may at most turn into one; None if that is not known."""
    factor = 1
    for step in _parts(normalizer, "normalizers"):
        if step["type"] == "NFC":
            factor *= _NFC_SHRINKS
        elif step["type"] != "Prepend" and not _lengthens(step):
            return None
    return factor


def _parts(part: Part | None, inner: str) -> Iterator[Part]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for one in part[inner]:
            yield from _parts(one, inner)
    else:
        yield part


def _splits_only(step: Part) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Digits", "Metaspace")


def _lengthens(step: Part) -> bool:
    pattern = step["pattern"].get("String") if step["type"] == "Replace" else None
    return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())


def _byte_letters() -> dict[str, int]:
    """Byte-level vocabularies spell printable bytes as themselves, and the others as letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()
