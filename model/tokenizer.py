"""The model's own tokenizer, as far as a server needs it: text to ids and back, pieces as bytes, chats as texts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoTokenizer

from model.errors import ModelError
from model.panics import panics_as_errors
from model.token_length import BYTE_LETTERS, TokenLengthBound

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")

# What else decides which ids a text or a chat becomes.
_TEXT_FILES = ("tokenizer*", "*.jinja", "*/*.jinja", "chat_template*", "special_tokens*", "added_tokens*", "merges*")


def text_hash(folder: Path) -> str:
    """Hash of the files in ``folder`` and of the library's version, by which text becomes ids and back."""
    found = {file for pattern in (*_TOKENIZER_FILES, *_TEXT_FILES) for file in folder.glob(pattern) if file.is_file()}
    sources = hashlib.sha256(tokenizers.__version__.encode())
    for file in sorted(found):
        sources.update(b"\0" + str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return sources.hexdigest()[:32]


class Tokenizer:
    """Wraps a Hugging Face tokenizer. Safe to use from several threads at once; never changes after construction.

    Incremental text: decode a window of ids that starts before the new ones and take what the longer window adds
    (a piece's leading space depends on its predecessor, and a character may span several ids: it shows as U+FFFD
    until its last byte is there).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._hf = tokenizer
        self._rust: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._length_bound = None if self._rust is None else TokenLengthBound.of(json.loads(self._rust.to_str()))
        self._lock = threading.Lock()  # for the parts written in Python
        if self._rust is not None:  # the Rust tokenizer obeys these on every call
            self._rust.no_truncation()
            self._rust.no_padding()

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """None if the folder holds no tokenizer; ModelError if it holds one that cannot be loaded."""
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return None
        try:
            return cls(AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True))
        except Exception as error:  # whatever a tokenizer's own code raises about its files
            raise ModelError(f"the tokenizer in {folder} cannot be loaded: {_first_line(error)}") from error

    def prepare(self) -> None:
        """Make now what is otherwise made when it is first asked for.

        The second copy of a Rust tokenizer takes a tenth of a second, in which no other thread runs.
        """
        for encode in (self.encode_ordinary, self.encode_many):
            with contextlib.suppress(Exception):  # not every tokenizer has ids for every text
                encode(("a", "b"))  # two: a batch starts the library's threads
        for name, member in vars(Tokenizer).items():
            if isinstance(member, cached_property) and name != "pieces":  # for comparing two tokenizers
                getattr(self, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``. Special tokens written in the text become their ids."""
        return self.encode_many((text,), add_special_tokens)[0]

    @panics_as_errors
    def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """``encode`` of each text. With a Rust backend, other threads run meanwhile."""
        if self._rust is not None:
            # The call for a single text would hold the GIL, for seconds if the text is long.
            found = self._rust.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [list(encoding.ids) for encoding in found]
        ids = []
        for text in texts:
            with self._lock:
                ids.append(list(self._hf.encode(text, add_special_tokens=add_special_tokens)))
        return ids

    def encode_ordinary(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text as what it says, never as what it stands for: no added token is recognised.

        A vocabulary may spell an added token in its own pieces; such a text is encoded character by character.
        """
        found = []
        for text, ids in zip(texts, self._encode_without_added(texts), strict=True):
            if len(text) > 1 and not self.control_ids.isdisjoint(ids):
                ids = [token_id for piece in self._encode_without_added(list(text)) for token_id in piece]
            found.append(ids)
        return found

    @panics_as_errors
    def _encode_without_added(self, texts: Sequence[str]) -> list[list[int]]:
        if self._plain is not None:
            return [list(each.ids) for each in self._plain.encode_batch_fast(list(texts), add_special_tokens=False)]
        with self._lock:
            return [list(self._hf.encode(text, add_special_tokens=False, split_special_tokens=True)) for text in texts]

    def chat_text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> str:
        """``messages`` in the model's chat template, open for the assistant's answer.

        The text holds its special tokens: encode it without adding any. Raises ModelError, one line, if there is no
        template or it refuses the messages.
        """
        if not getattr(self._hf, "chat_template", None):
            raise ModelError("the model's tokenizer has no chat template")
        try:
            with self._lock:
                text = self._hf.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=None if tools is None else list(tools),
                    tokenize=False,
                    add_generation_prompt=True,
                )
        except Exception as error:  # whatever a template raises about messages that it does not foresee
            raise ModelError(f"the chat template refuses the messages: {_first_line(error)}") from error
        return str(text)

    @panics_as_errors
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``, with U+FFFD for bytes that are no UTF-8. Ids without a piece give no text."""
        if self._rust is not None:
            return str(self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        with self._lock:
            known = [i for i in token_ids if i < self.vocab_size]
            return str(
                self._hf.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
            )

    @panics_as_errors
    def decode_many(self, lists: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """``decode`` of each list. With a Rust backend, other threads run meanwhile."""
        if self._rust is not None:
            # The call for a single list would hold the GIL.
            found = self._rust.decode_batch([list(ids) for ids in lists], skip_special_tokens=skip_special_tokens)
            return [str(text) for text in found]
        return [self.decode(ids, skip_special_tokens) for ids in lists]

    @panics_as_errors
    def token_piece(self, token_id: int) -> str | None:
        """The vocabulary's own spelling, e.g. ``"Ġworld"``; None for an id without a piece."""
        if self._rust is not None:
            piece = self._rust.id_to_token(token_id)
        else:
            piece = self._hf.convert_ids_to_tokens(token_id) if token_id < self.vocab_size else None
        return None if piece is None else str(piece)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text, alone maybe not UTF-8. Empty for an id without a piece."""
        piece = self.token_piece(token_id)
        if piece is None:
            return b""
        if token_id in self._added_ids:
            return piece.encode()
        if "ByteLevel" in self._decoders and all(c in BYTE_LETTERS for c in piece):
            return bytes(BYTE_LETTERS[c] for c in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    def fewest_tokens(self, text: str) -> int:
        """A number that ``encode`` of this text does not go below, found without tokenizing; 0 if none is known."""
        return 0 if self._length_bound is None else self._length_bound.fewest_tokens(text)

    @property
    def vocab_size(self) -> int:
        """Ids with a piece, added tokens included; a model's logits row may be wider."""
        return len(self._hf)

    @cached_property
    def pieces(self) -> dict[int, str]:
        """All ids that have a piece, added tokens included, and their pieces."""
        return {int(i): str(piece) for piece, i in self._hf.get_vocab().items()}

    @property
    def bos_token_id(self) -> int | None:
        found = self._hf.bos_token_id
        return None if found is None else int(found)

    @property
    def eos_token_id(self) -> int | None:
        found = self._hf.eos_token_id
        return None if found is None else int(found)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """What ``decode`` leaves out with ``skip_special_tokens``."""
        return frozenset(int(i) for i in self._hf.all_special_ids) | frozenset(
            i for i, token in self._added.items() if token.special
        )

    @property
    def serialized(self) -> str | None:
        """The tokenizer as the text of a tokenizer.json; None for a tokenizer written in Python."""
        return None if self._rust is None else str(self._rust.to_str())

    @property
    def chat_templates(self) -> dict[str, str]:
        """The model's chat templates (Jinja) by name; the usual one is ``default``. Empty without any."""
        found = getattr(self._hf, "chat_template", None) or {}
        return {"default": found} if isinstance(found, str) else {str(name): str(text) for name, text in found.items()}

    @cached_property
    def special_token_names(self) -> dict[str, Any]:
        """What a chat template knows its special tokens by, e.g. ``bos_token``: a text, or a list of texts."""
        return dict(self._hf.special_tokens_map)

    @property
    def added_tokens(self) -> dict[int, str]:
        """The added tokens, special or not, and how they are written."""
        return {i: str(token.content) for i, token in self._added.items()}

    @cached_property
    def control_tokens(self) -> dict[str, bool]:
        """The spellings that ``encode`` takes for one added token; True for special ones.

        Not those of white space or of a single character, which are added for their text.
        """
        return {str(self._added[i].content): bool(self._added[i].special) for i in sorted(self.control_ids)}

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids of ``control_tokens``."""
        return frozenset(i for i, token in self._added.items() if len(token.content.strip(" \t\r\n\u2581")) > 1)

    @cached_property
    def _plain(self) -> Any:
        """A second copy of the Rust tokenizer that knows no added tokens; None without a Rust tokenizer."""
        if self._rust is None:
            return None
        with self._lock:
            return tokenizers.Tokenizer.from_str(json.dumps({**json.loads(self._rust.to_str()), "added_tokens": []}))

    @property
    def backend(self) -> Any:
        """The ``tokenizers.Tokenizer``, or None for a tokenizer written in Python. Read only."""
        return self._rust

    @cached_property
    def _added(self) -> dict[int, Any]:
        return {int(i): token for i, token in self._hf.added_tokens_decoder.items()}

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._added)

    @cached_property
    def _decoders(self) -> frozenset[str]:
        if self._rust is None:
            return frozenset()
        decoder = json.loads(self._rust.to_str()).get("decoder") or {}
        return frozenset(str(part["type"]) for part in (decoder, *decoder.get("decoders", ())) if "type" in part)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
