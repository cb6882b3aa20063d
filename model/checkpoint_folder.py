"""Is a folder a checkpoint that we are willing to load? Safetensors, a config, a tokenizer, and no code."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from model.source_error import ModelSourceError

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
# Where Hugging Face checkpoints name Python code of their own ("auto_map").
_CODE_NAMING_FILES = ("config.json", "tokenizer_config.json", "generation_config.json")
_MAX_JSON_BYTES = 64 << 20


def check_checkpoint_folder(folder: Path) -> None:
    """Raise ModelSourceError unless ``folder`` holds a complete checkpoint in safetensors with a tokenizer.

    Reads the JSON files and the headers of the weights, never the weights themselves. Pickle weights are refused
    because loading them runs code; so is a checkpoint whose config wants code of its own.
    """
    config = _read_object(folder, "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelSourceError(f"{folder}: config.json names no model_type")
    for name in _CODE_NAMING_FILES:
        if (folder / name).is_file() and _wants_code(_read_object(folder, name)):
            raise ModelSourceError(
                f"{folder}: {name} asks for Python code of its own (auto_map); remote code is never run, so this model "
                "cannot be served"
            )
    for path in _weight_files(folder):
        _check_safetensors_header(path)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelSourceError(f"{folder}: no tokenizer (none of {', '.join(_TOKENIZER_FILES)})")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if (folder / WEIGHTS_INDEX).is_file():
        shards = _read_object(folder, WEIGHTS_INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelSourceError(f"{folder}: {WEIGHTS_INDEX} has no weight_map")
        names = sorted({str(name) for name in shards.values()})
        for name in names:
            if name != Path(name).name or not name.endswith(".safetensors"):
                raise ModelSourceError(
                    f"{folder}: {WEIGHTS_INDEX} names the shard {name!r}, which is no *.safetensors file of this folder"
                )
            if not (folder / name).is_file():
                raise ModelSourceError(f"{folder}: incomplete, the shard {name} is missing")
        return [folder / name for name in names]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise ModelSourceError(
            f"{folder}: only pickle weights ({pickles[0]}); loading them can run code, so only safetensors and GGUF "
            "are accepted"
        )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        raise ModelSourceError(f"{folder}: a GGUF model is given by its file, e.g. --model {folder / ggufs[0]}")
    raise ModelSourceError(f"{folder}: no weights ({WEIGHTS_FILE} or {WEIGHTS_INDEX})")


def _check_safetensors_header(path: Path) -> None:
    """A cut-off download must not look like a model: the header's offsets have to fit the file."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _MAX_JSON_BYTES):
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error) as error:
        raise ModelSourceError(f"{path}: not a safetensors file ({error})") from error
    if size != 8 + length + end:
        raise ModelSourceError(f"{path}: damaged or cut off, {size} bytes instead of {8 + length + end}")


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelSourceError(f"{path}: {path.stat().st_size} bytes are too many for a configuration")
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelSourceError(f"{folder}: no {name}, so this is not a model folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelSourceError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"{path}: holds a {type(value).__name__} instead of an object")
    return value


def _wants_code(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value.get("auto_map")) or any(_wants_code(item) for item in value.values())
    if isinstance(value, list):
        return any(_wants_code(item) for item in value)
    return False
