"""Loading the compiled kernels into this process, or saying why they are not used."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import subprocess
from pathlib import Path
from typing import Literal

import torch

from model.kernels.build import (
    INSTRUCTION_SET,
    OBJECT,
    KernelBuildError,
    Report,
    build_kernels,
    missing_instructions,
)
from model.kernels.ops import Kernels
from model.model_cache import default_home

_log = logging.getLogger(__name__)

KernelsChoice = Literal["auto", "torch"]  # torch: the path of a machine without a compiler

_SWITCH = "TRUEDRAFT_KERNELS"
_OFF = ("torch", "off", "0", "no", "false")


def chosen_kernels(choice: KernelsChoice | None = None) -> KernelsChoice:
    """``choice``; without one, what the environment variable TRUEDRAFT_KERNELS says (torch or off; default: auto)."""
    if choice is not None:
        return choice
    return "torch" if os.environ.get(_SWITCH, "").lower() in _OFF else "auto"


def find_kernels(
    choice: KernelsChoice | None = None, *, home: Path | None = None, progress: Report | None = None
) -> tuple[Kernels | None, str]:
    """The kernels and their instruction set, or None and the reason. Builds them if the cache lacks them.

    ``choice`` "torch" leaves them alone; None leaves it to the environment (:func:`chosen_kernels`). Never
    raises for a machine that cannot build or run them; a failed attempt is not repeated in this process.
    """
    if chosen_kernels(choice) == "torch":
        return None, "switched off (kernels = torch)" if choice else f"switched off ({_SWITCH}={os.environ[_SWITCH]})"
    missing = missing_instructions()
    if missing:
        return None, f"this processor lacks {', '.join(missing)}"
    return _load(home or default_home(), _Said(progress or _log.info))


def get_kernels(progress: Report | None = None, *, choice: KernelsChoice | None = None) -> Kernels | None:
    """:func:`find_kernels` without the reason."""
    return find_kernels(choice, progress=progress)[0]


def kernels_identity() -> str:
    """Hash of the object that this process has loaded, which tells sources, flags and compiler; "" if there is none."""
    return next((_file_hash(path) for path in torch.ops.loaded_libraries if Path(path).name == OBJECT), "")


@functools.cache
def _file_hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


class _Said:
    """Progress lines; equal to any other, so that it is no part of the cache key below."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Said)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=8)
def _load(home: Path, said: _Said) -> tuple[Kernels | None, str]:
    # torch's operator registry is the process's, and takes a name once: whatever is there already is used.
    if not hasattr(torch.ops.truedraft, "decoder_stack"):
        try:
            torch.ops.load_library(str(build_kernels(home=home, progress=said.report)))
        except (KernelBuildError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            said.report(f"the CPU kernels are not used: {reason}")
            return None, reason
    return Kernels(), INSTRUCTION_SET
