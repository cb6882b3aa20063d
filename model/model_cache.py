"""The model cache: converted models and downloads under one home folder, each complete or absent.

::

    <home>/models/<key>/                 a finished entry, with truedraft.json as its manifest
    <home>/models/.<key>.<random>.part/  an entry in the making; renamed into place when done
    <home>/models/.<key>.lock            held by the process that makes the entry
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from model.source_error import ModelSourceError

Report = Callable[[str], None]  # takes one line of progress for people

MANIFEST = "truedraft.json"
MANIFEST_FORMAT = 1
_HASH_EVERY_START_BELOW = 16 << 20  # bytes; larger files are checked by size at a start


def default_home() -> Path:
    """``TRUEDRAFT_HOME``, else ``truedraft`` in the user's cache folder."""
    home = os.environ.get("TRUEDRAFT_HOME")
    if home:
        return Path(home).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "truedraft"


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ModelCache:
    """Owns ``home``; any number of processes may share it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._models = home / "models"

    def find(self, key: str) -> Path | None:
        """The finished, undamaged entry ``key``, or None. Needs no network and takes no lock."""
        folder = self._folder(key)
        return folder if self._is_intact(folder) else None

    def get_or_make(self, key: str, make: Callable[[Path], dict[str, Any]], report: Report) -> Path:
        """The folder of entry ``key``; ``make(folder)`` fills a new one and returns the manifest's words on its source.

        Only one process at a time makes an entry, others wait for it. Whatever ``make`` raises leaves no entry
        behind. Raises ModelSourceError if the home cannot be written.
        """
        found = self.find(key)
        if found is not None:
            return found
        try:
            self._models.mkdir(parents=True, exist_ok=True)
            with self._locked(key, report):
                found = self.find(key)  # another process may have made it while we waited
                return found if found is not None else self._make(key, make)
        except OSError as error:
            raise ModelSourceError(f"cannot write the model cache {self.home} (TRUEDRAFT_HOME): {error}") from error

    def _folder(self, key: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", key):
            raise ValueError(f"a cache key must be a plain file name, got {key!r}")
        return self._models / key

    @contextmanager
    def _locked(self, key: str, report: Report) -> Iterator[None]:
        lock = FileLock(self._models / f".{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report(f"waiting for another process that prepares {key}")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _make(self, key: str, make: Callable[[Path], dict[str, Any]]) -> Path:
        for leftover in self._models.glob(f".{key}.*.part"):  # of a process that died: we hold its lock
            shutil.rmtree(leftover, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix=f".{key}.", suffix=".part", dir=self._models))
        try:
            source = make(part)
            self._seal(part, source)
            folder = self._folder(key)
            if folder.exists():  # damaged, or find() had returned it
                shutil.rmtree(folder)
            part.rename(folder)
            return folder
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _seal(self, part: Path, source: dict[str, Any]) -> None:
        """Write the manifest and bring everything to the disk, so that a rename cannot outlive its content."""
        files = {}
        for path in sorted(part.rglob("*")):
            if path.is_file():
                path.chmod(0o644)
                files[path.relative_to(part).as_posix()] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
                _sync(path)
        manifest = {"format": MANIFEST_FORMAT, "source": source, "files": files}
        (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        _sync(part / MANIFEST)
        part.chmod(0o755)

    def _is_intact(self, folder: Path) -> bool:
        try:
            manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
            if manifest["format"] != MANIFEST_FORMAT:
                return False
            for name, facts in manifest["files"].items():
                size = (folder / name).stat().st_size
                if size != facts["size"]:
                    return False
                if size < _HASH_EVERY_START_BELOW and file_sha256(folder / name) != facts["sha256"]:
                    return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return True


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def heartbeat(report: Report, what: str, every_seconds: float = 5.0) -> Iterator[None]:
    """While the body runs, say now and then that it still does."""
    done = threading.Event()
    started = time.monotonic()

    def beat() -> None:
        while not done.wait(every_seconds):
            report(f"{what} ({time.monotonic() - started:.0f} s so far)")

    thread = threading.Thread(target=beat, name="model-source-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
