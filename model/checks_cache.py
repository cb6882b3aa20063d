"""Remembers what was measured at load (gate, fused against generic, exactness), so that the next start is fast.

Results are kept by everything that they depend on: the weights, the dtype, what model.environment tells of the machine
and the libraries, and the kernels. A damaged or foreign entry is measured anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.exactness import ExactnessCheck, ExactnessReport
from model.weights import hash_weights

_log = logging.getLogger(__name__)


class ChecksCache:
    """Files in ``folder``; any number of processes may share it. ``folder`` None: remembers nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def weights_hash(self, files: Sequence[Path]) -> str:
        """:func:`hash_weights`, remembered while names, sizes and times of the files stay the same."""
        facts = []
        for file in files:
            stat = file.stat()
            facts.append([str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino])
        key = digest(["weights", facts])
        found = self.get(key)
        if isinstance(found, str):
            return found
        computed = hash_weights(tuple(files))
        self.put(key, computed)
        return computed

    def report(self, key: str) -> ExactnessReport | None:
        """What :meth:`put_report` kept, marked as cached."""
        found = self.get(key)
        if not isinstance(found, dict):
            return None
        try:
            return ExactnessReport(
                level="L0" if found["level"] == "L0" else "L2",
                checks=tuple(ExactnessCheck(**check) for check in found["checks"]),
                detail=str(found["detail"]),
                tile_classes=tuple(int(size) for size in found["tile_classes"]),
                padding=str(found["padding"]),
                cached=True,
            )
        except (KeyError, TypeError, ValueError):
            return None

    def put_report(self, key: str, report: ExactnessReport) -> None:
        self.put(key, dataclasses.asdict(report))

    def get(self, key: str) -> Any:
        """The remembered JSON value, or None."""
        if self._folder is None:
            return None
        try:
            entry = json.loads((self._folder / f"{key}.json").read_text())
        except (OSError, ValueError):
            return None
        return entry.get("value") if isinstance(entry, dict) else None

    def put(self, key: str, value: Any) -> None:
        """Remember ``value``. A folder that cannot be written costs the next start time, nothing else."""
        if self._folder is None:
            return
        temporary = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".tmp", delete=False) as file:
                temporary = Path(file.name)
                json.dump({"value": value}, file)
            temporary.replace(self._folder / f"{key}.json")
        except OSError as error:
            _log.warning("results of the load-time checks cannot be kept in %s: %s", self._folder, error)
            if temporary is not None:
                temporary.unlink(missing_ok=True)


def digest(parts: object) -> str:
    """Short hex digest of JSON-like ``parts``."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
