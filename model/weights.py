"""Reading weights: safetensors only, never pickle."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from model.errors import ModelError


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, in name order. Raises ModelError if there are none, or one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error}") from error
        files = tuple(folder / name for name in names)
    else:
        files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        hint = f" ({pickled[0]} is a pickle, which is never loaded)" if pickled else ""
        raise ModelError(f"{folder} holds no .safetensors file{hint}")
    for file in files:
        if file.parent.resolve() != folder.resolve() or not file.is_file():
            raise ModelError(f"{folder} does not hold the weight file {file.name} that its index names")
    return files


def read_state(files: tuple[Path, ...]) -> dict[str, Tensor]:
    """All tensors by name, on the CPU, in the file's dtype. Raises ModelError for a file that is no safetensors."""
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    state[name] = opened.get_tensor(name)
        except Exception as error:  # safetensors raises its own type for a broken header, and OSError
            raise ModelError(f"{file} cannot be read as safetensors: {error}") from error
    return state


def hash_weights(files: tuple[Path, ...]) -> str:
    """Hex SHA-256 over the names, shapes, dtypes and bytes of all tensors, whatever files they lie in."""
    entries: list[tuple[str, Path, int, int, str]] = []
    for file in files:
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
        except (OSError, ValueError, MemoryError, OverflowError) as error:
            raise ModelError(f"{file} cannot be read as safetensors: {error}") from error
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                entries.append((name, file, 8 + size + begin, end - begin, f"{entry['dtype']}{entry['shape']}"))
    digest = hashlib.sha256()
    for name, file, offset, length, kind in sorted(entries):
        digest.update(f"{name}\0{kind}\0".encode())
        with file.open("rb") as opened:
            opened.seek(offset)
            while length > 0:
                piece = opened.read(min(length, 1 << 22))
                if not piece:
                    raise ModelError(f"{file} ends in the middle of tensor {name}")
                digest.update(piece)
                length -= len(piece)
    return digest.hexdigest()
