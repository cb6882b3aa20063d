"""Records of audits that differed, as files for ``truedraft replay``: few, small, private, never half written."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger("truedraft.audit")

_PATTERN = "audit-*.json"
_MOST_PENDING = 16  # a disk that does not answer must not collect them in memory


class AuditStore:
    """Keeps the newest records in ``folder``, at most ``max_files`` of at most ``max_bytes`` together.

    Files have mode 0600 and appear whole, by a rename; only files named like its own are ever removed. Writes in a
    thread of its own, in order. Raises OSError if the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, *, max_files: int, max_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # tells at the start what would only show at the first mismatch
        self.folder = folder
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._count = 0
        self._pending = 0
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit-store")

    def save(self, record: bytes) -> str | None:
        """Returns the name that the file will have; None if it is too large, or too many wait to be written."""
        with self._lock:
            if len(record) > self._max_bytes or self._pending >= _MOST_PENDING:
                return None
            self._pending += 1
            self._count += 1
            name = f"audit-{time.time_ns():020d}-{os.getpid()}-{self._count:06d}.json"
        self._thread.submit(self._write, name, record)
        return name

    def close(self) -> None:
        """Wait until everything is written."""
        self._thread.shutdown(wait=True)

    def _write(self, name: str, record: bytes) -> None:
        try:
            self._make_room(len(record))
            descriptor, scratch = tempfile.mkstemp(prefix=".audit-", dir=self.folder)  # mode 0600
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(record)
                os.replace(scratch, self.folder / name)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(scratch)
                raise
        except OSError as error:
            logger.warning("the audit record %s was not written: %s", name, error.strerror or error)
        finally:
            with self._lock:
                self._pending -= 1

    def _make_room(self, num_bytes: int) -> None:
        files = sorted(self.folder.glob(_PATTERN))  # oldest first, by name
        sizes = [file.stat().st_size for file in files]
        while files and (len(files) >= self._max_files or sum(sizes) + num_bytes > self._max_bytes):
            files.pop(0).unlink(missing_ok=True)
            sizes.pop(0)
