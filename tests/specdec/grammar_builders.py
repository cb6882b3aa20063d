"""A tokenizer of 40 tokens for the toy model, and grammars that it can write."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specdec.grammar.compiler import GrammarCache, GrammarCompiler, TokenizerText
from specdec.grammar.text import choice, json_schema, lark, regex
from tests.specdec.builders import VOCAB

EOS = 0
_CHARS = '{}[]":,abck012<>truex'
_MERGES = [
    ("{", '"'), ('"', ":"), ('"', ","), ('"', "}"), ("a", "b"), ("ab", "c"), ("t", "r"), ("tr", "u"), ("tru", "e"),
    ("0", "1"), ("01", "2"), ("<", "k"), ("<k", ">"), ('":', "["), (",", "1"), ("]", "}"), ("b", "c"), ("abc", '":['),
]  # fmt: skip

OBJECT = {
    "type": "object",
    "properties": {"abc": {"type": "array", "items": {"enum": [0, 1, 12, True]}, "minItems": 1, "maxItems": 4}},
    "required": ["abc"],
    "additionalProperties": False,
}
CALL = f"""
start: TEXT | call
call: head body
head[lazy]: TEXT "<k>"
TEXT: /(.|\\n)*/
body: %json {{"type": "object", "properties": {{"abc": {{"enum": [0, 12]}}}}, "required": ["abc"], "additionalProperties": false}}
"""  # noqa: F541, E501
GRAMMARS = {
    "schema": json_schema(OBJECT),
    "regex": regex("(ab|abc|0[12]*){2,8}k"),
    "choice": choice(["abcabc", "abk", "true", "012"]),
    "lark": lark('start: "[" item ("," item)* "]"\nitem: "true" | "0" | start'),
    "call": lark(CALL),
}


def ambiguous(n: int, term: str = "/[abck]/") -> str:
    """A small grammar that allows much in many ways: the parser follows more of them with every token."""
    rules = [f"a{i}: a a{(i + 1) % n} | a{(i + 7) % n} a | {term} |" for i in range(n)]
    return lark("\n".join(["start: a", "a: " + "|".join(f"a{i}" for i in range(n)), *rules]))


@cache
def toy_tokenizer() -> Tokenizer:
    pieces = ["<e>", *_CHARS, *(a + b for a, b in _MERGES)]
    assert len(pieces) == len(set(pieces)) == VOCAB, len(pieces)
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<e>"])
    return tokenizer


def toy_compiler(eos: tuple[int, ...] = (EOS,)) -> GrammarCompiler:
    return GrammarCompiler(TokenizerText(toy_tokenizer().to_str(), VOCAB, eos))


def toy_cache(max_bytes: int = 2**30) -> GrammarCache:
    return GrammarCache(toy_compiler(), max_bytes)


def ids(text: str) -> list[int]:
    return list(toy_tokenizer().encode(text, add_special_tokens=False).ids)


def written(token_ids: list[int]) -> str:
    """Without an end-of-text token at the end."""
    kept = token_ids[:-1] if token_ids and token_ids[-1] == EOS else token_ids
    return str(toy_tokenizer().decode(kept, skip_special_tokens=False))
