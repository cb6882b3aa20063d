"""Records of audits that differed, as files for ``truedraft replay``: few, small, private, never half written."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger("truedraft.audit")

_OWN_NAME = re.compile(r"audit-\d{20}-\d+-\d{6,}\.json")
_MOST_PENDING = 16  # a disk that does not answer must not collect them in memory
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class AuditStore:
    """Keeps the newest records in ``folder``, at most ``max_files`` of at most ``max_bytes`` together.

    Files have mode 0600 and appear whole, by a rename; only regular files named like its own are counted or ever
    removed. Servers may share a folder: each then leaves room for its own record, so that together they may exceed
    the bounds by one record each, until the next. Writes in a thread of its own, in order. Raises OSError if the
    folder cannot be made or written to; warns of one in which others may write.
    """

    def __init__(self, folder: Path, *, max_files: int, max_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # tells at the start what would only show at the first mismatch
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & _OTHERS_WRITE:
            logger.warning("others may write in the audit store %s: its mode is %04o, better 0700", folder, mode)
        self.folder = folder
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._count = 0
        self._pending = 0
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit-store")

    def save(self, record: bytes, done: Callable[[str | None], None]) -> None:
        """``done`` hears the name of the file once it is there, or None if it was not written.

        It is called in the store's thread, or at once if the record is too large or too many wait to be written.
        """
        with self._lock:
            refused = len(record) > self._max_bytes or self._pending >= _MOST_PENDING
            if not refused:
                self._pending += 1
                self._count += 1
                name = f"audit-{time.time_ns():020d}-{os.getpid()}-{self._count:06d}.json"
        if refused:
            done(None)
        else:
            self._thread.submit(self._work, name, record, done)

    def close(self) -> None:
        """Wait until everything is written."""
        self._thread.shutdown(wait=True)

    def _work(self, name: str, record: bytes, done: Callable[[str | None], None]) -> None:
        written = False
        try:
            self._write(name, record)
            written = True
        except OSError as error:
            logger.warning("an audit record was not written to %s: %s", self.folder, error.strerror or error)
        except Exception:
            logger.exception("an audit record was not written to %s", self.folder)
        with self._lock:
            self._pending -= 1
        try:
            done(name if written else None)
        except Exception:  # nobody waits for this thread's results
            logger.exception("the end of an audit record was not told")

    def _write(self, name: str, record: bytes) -> None:
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

    def _make_room(self, num_bytes: int) -> None:
        """Raises OSError if there is none, for what cannot be removed."""
        files = self._records()
        count, total = len(files), sum(size for _, size in files)
        for name, size in files:
            if self._fits(count, total + num_bytes):
                return
            try:
                os.unlink(self.folder / name)
            except FileNotFoundError:
                pass  # another server was faster
            except OSError:
                continue
            count -= 1
            total -= size
        if not self._fits(count, total + num_bytes):
            raise OSError(errno.ENOSPC, "older records cannot be removed")

    def _fits(self, num_files: int, num_bytes: int) -> bool:
        return num_files < self._max_files and num_bytes <= self._max_bytes

    def _records(self) -> list[tuple[str, int]]:
        """Names and sizes, oldest first. What is gone before it can be looked at is left out."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if not _OWN_NAME.fullmatch(entry.name):
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append((entry.name, status.st_size))
        return sorted(found)
