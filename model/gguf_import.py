"""GGUF to safetensors: dequantise once, keep the tokenizer, drop nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from model.model_cache import Report, heartbeat
from model.source_error import ModelSourceError

CONVERTER_VERSION = 1  # raise it when the same GGUF would give another folder: it is part of the cache key
_MAGIC = b"GGUF"
# GGUF files name their pre-tokenizer. These split digits one by one before the byte-level pattern, which the
# conversion in transformers leaves out for them.
_DIGIT_SPLITTING_PRE_TOKENIZERS = frozenset({"smollm", "starcoder", "refact", "codeshell"})


def check_gguf(path: Path) -> None:
    """Raise ModelSourceError unless ``path`` begins as a GGUF file does."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelSourceError(f"{path}: cannot be read ({error.strerror or error})") from error
    if magic != _MAGIC:
        raise ModelSourceError(f"{path}: not a GGUF file (it begins with {magic!r})")


def convert_gguf(path: Path, folder: Path, report: Report) -> dict[str, Any]:
    """Write the model and tokenizer of the GGUF file ``path`` to ``folder`` as bf16 safetensors.

    Returns facts for a manifest. Raises ModelSourceError, also for architectures that transformers cannot read.
    """
    check_gguf(path)
    # Slow imports, and nobody who serves a folder needs them.
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from model.quiet import quiet_transformers, reason_of

    report(f"converting {path.name} to bf16 safetensors (once)")
    options: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.bfloat16}
    gguf_config = getattr(transformers, "GgufConfig", None)
    if gguf_config is not None:  # older releases know only dequantising
        options["quantization_config"] = gguf_config(dequantize=True)
    try:
        with quiet_transformers(), heartbeat(report, f"converting {path.name}"):
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            model = AutoModelForCausalLM.from_pretrained(path.parent, **options)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            pre_tokenizer = _pre_tokenizer_name(path)
    except OSError as error:
        if error.errno is not None:  # the disk's word, not the converter's
            raise
        raise ModelSourceError(f"{path}: cannot be converted: {reason_of(error)}") from error
    except Exception as error:  # the converter raises whatever it met inside the file
        raise ModelSourceError(f"{path}: cannot be converted: {reason_of(error)}") from error
    if pre_tokenizer in _DIGIT_SPLITTING_PRE_TOKENIZERS:
        _split_digits(folder / "tokenizer.json")
    report(f"converted {path.name}")
    return {
        "converter": CONVERTER_VERSION,
        "dtype": "bfloat16",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _pre_tokenizer_name(path: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(os.fspath(path)).get_field("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def _split_digits(tokenizer_json: Path) -> None:
    content = json.loads(tokenizer_json.read_text("utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}
    tokenizer_json.write_text(json.dumps(content, ensure_ascii=False), "utf-8")
