"""Remembers what was measured at load (gate, fused against generic, exactness), so that the next start is fast.

Results are kept by everything that they depend on: the weights, the code in this room, the versions of torch and
transformers, the processor, the thread count, the dtype, the device. A damaged or foreign entry is measured anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

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


def environment(device: str) -> dict[str, str | int]:
    """What the bits of a forward depend on beside the model: code, versions, processor, threads."""
    facts: dict[str, str | int] = {
        "code": _code_hash(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "device": device,
        "settings": os.environ.get("MKL_CBWR", "") + os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
    return facts


@cache
def _code_hash() -> str:
    """Hash of this room's sources: results of other code are not ours."""
    room = Path(__file__).parent
    sources = hashlib.sha256()
    for path in sorted(p for p in room.rglob("*") if p.suffix in {".py", ".cpp", ".h", ".hpp"}):
        sources.update(str(path.relative_to(room)).encode() + b"\0" + path.read_bytes())
    return sources.hexdigest()[:32]


@cache
def _processor() -> str:
    """Model and instruction sets of the processor: libraries choose their kernels by them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    return digest([line for line in lines if line.split(":")[0].strip() in wanted])
