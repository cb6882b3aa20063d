"""The tokenizer wrapper: ids, text, pieces and bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from model.tokenizer import Tokenizer
from tests.pauses import pauses

SPECIAL = ["<|end|>", "<|start|>"]


def byte_level(without: str = "") -> Tokenizer:
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(without))
    vocab = {token: i for i, token in enumerate([*SPECIAL, *letters, "th", "Ġth"])}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("Ġ", "th")]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=SPECIAL[0], bos_token=SPECIAL[1]))


def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="</s>", unk_token="<unk>"))


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_once_prepared_nothing_is_made_at_its_first_use(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    tokenizer.prepare()
    made = set(vars(tokenizer))
    ids = tokenizer.encode("a th")
    tokenizer.encode_ordinary(["a </s><|end|>"])
    tokenizer.decode_many([ids], skip_special_tokens=True)
    assert tokenizer.special_token_ids.isdisjoint(ids)
    assert [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    assert tokenizer.control_ids
    assert tokenizer.control_tokens
    assert tokenizer.special_token_names
    assert tokenizer.added_tokens
    assert set(vars(tokenizer)) == made


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"x": 0, "y": 1}),
        models.WordLevel({"x": 0, "y": 1}, unk_token="[UNK]"),
        models.WordPiece({"x": 0, "y": 1}, unk_token="[UNK]"),
        models.Unigram([("x", -1.0), ("y", -2.0)]),
        models.BPE({"x": 0, "y": 1}, [], unk_token="<unk>"),
        models.BPE({}, []),
    ],
    ids=["words", "words, unknown one missing", "pieces", "unigram", "pairs", "nothing"],
)
def test_a_tokenizer_that_has_no_ids_for_some_texts_can_be_prepared(model: Any) -> None:
    Tokenizer(PreTrainedTokenizerFast(tokenizer_object=RustTokenizer(model))).prepare()


def with_normalizer(normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.backend.normalizer = normalizer
    return again(tokenizer)


def with_pre_tokenizer(pre_tokenizer: Any) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.backend.pre_tokenizer = pre_tokenizer
    return again(tokenizer)


def with_added_token(token: AddedToken) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.backend.add_tokens([token])
    return again(tokenizer)


def again(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, eos_token=SPECIAL[0]))


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
tokenizers = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


@tokenizers
@given(text=st.text(max_size=30).filter(lambda text: "<" not in text))
def test_decoding_gives_the_encoded_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@tokenizers
@given(text=st.text(max_size=30).filter(lambda text: "<" not in text and "▁" not in text))
def test_the_bytes_of_the_tokens_joined_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)) == text.encode()


def test_special_tokens_in_text_become_their_ids_and_decode_leaves_them_out() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("<|start|>th<|end|>")
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids[-1] == tokenizer.eos_token_id == 0
    assert tokenizer.decode(ids) == "th"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>th<|end|>"
    assert tokenizer.special_token_ids == {0, 1}
    assert tokenizer.token_bytes(0) == b"<|end|>"


@tokenizers
def test_an_id_without_a_piece_gives_nothing(tokenizer: Tokenizer) -> None:
    beyond = tokenizer.vocab_size + 5
    assert tokenizer.token_piece(beyond) is None
    assert tokenizer.token_bytes(beyond) == b""
    assert tokenizer.decode([beyond]) == ""


def test_spelling_and_bytes_of_a_token_with_a_space() -> None:
    tokenizer = TOKENIZERS["byte level"]
    (token,) = tokenizer.encode(" th")
    assert (tokenizer.token_piece(token), tokenizer.token_bytes(token)) == ("Ġth", b" th")


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None


def test_threads_do_not_disturb_each_other() -> None:
    tokenizer = TOKENIZERS["byte level"]
    texts = [f"th {i} " * 200 for i in range(8)]
    expected = [tokenizer.encode(text) for text in texts]
    found: list[list[int]] = [[] for _ in texts]

    def work(i: int) -> None:
        for _ in range(5):
            found[i] = tokenizer.encode(texts[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


BOUNDED = {
    **TOKENIZERS,
    "NFC": with_normalizer(normalizers.NFC()),
    "a byte that the vocabulary lacks": byte_level(without="a"),
    "replaced by something longer": with_normalizer(normalizers.Replace(" ", "▁")),
}
SWALLOWING = {
    "lower case": with_normalizer(normalizers.Lowercase()),
    "strip": with_normalizer(normalizers.Strip()),
    "replaced by something shorter": with_normalizer(normalizers.Replace("  ", " ")),
    "replaced by a pattern": with_normalizer(normalizers.Replace(Regex(" +"), "   ")),
    "white space is dropped": with_pre_tokenizer(pre_tokenizers.WhitespaceSplit()),
    "a split is dropped": with_pre_tokenizer(
        pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
    ),
    "an added token strips": with_added_token(AddedToken("<|x|>", lstrip=True)),
    "unknown characters": with_pre_tokenizer(None),
}


@pytest.mark.parametrize("tokenizer", [*BOUNDED.values(), *SWALLOWING.values()], ids=[*BOUNDED, *SWALLOWING])
@given(text=st.text(st.sampled_from("ath \u0301\u212a\u1100\u1161\u11a8好😀<|>xend"), max_size=60) | st.text())
@settings(max_examples=30)
def test_no_text_has_fewer_tokens_than_the_fewest(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


@pytest.mark.parametrize("tokenizer", BOUNDED.values(), ids=BOUNDED.keys())
def test_a_long_text_is_known_to_be_long(tokenizer: Tokenizer) -> None:
    assert tokenizer.fewest_tokens("th. " * 10_000) > 100


@pytest.mark.parametrize("tokenizer", SWALLOWING.values(), ids=SWALLOWING.keys())
def test_there_is_no_bound_where_a_tokenizer_may_swallow_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.fewest_tokens(" " * 10_000) == 0


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
@given(texts=st.lists(st.text(max_size=30), max_size=4), special=st.booleans())
def test_many_texts_are_encoded_as_one_by_one(tokenizer: Tokenizer, texts: list[str], special: bool) -> None:
    rust = tokenizer.backend
    assert tokenizer.encode_many(texts, special) == [rust.encode(t, add_special_tokens=special).ids for t in texts]


@pytest.mark.parametrize("call", ["encode", "encode_many"])
def test_other_threads_run_while_a_long_text_is_encoded(call: str) -> None:
    tokenizer, text = TOKENIZERS["byte level"], "th is the thing " * 100_000
    work: dict[str, Callable[[], object]] = {
        "encode": lambda: tokenizer.encode(text),
        "encode_many": lambda: tokenizer.encode_many([text]),
    }

    async def watch() -> tuple[float, float]:
        return await pauses(asyncio.ensure_future(asyncio.to_thread(work[call])))

    longest, whole = asyncio.run(watch())
    assert longest < whole / 2
