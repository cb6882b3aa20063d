"""The tokenizer wrapper: ids, text, pieces and bytes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from model.tokenizer import Tokenizer

SPECIAL = ["<|end|>", "<|start|>"]


def byte_level() -> Tokenizer:
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "Ġth"])}
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
