"""What the bits of a forward depend on beside the model: code, versions, processor, threads, environment variables."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers

from model.checks_cache import digest

# Variables that libraries read, by families, so that one that we never heard of counts: oneDNN (under both of its
# names: MAX_CPU_ISA, CPU_ISA_HINTS, DEFAULT_FPMATH_MODE), MKL (CBWR, ENABLE_INSTRUCTIONS, DEBUG_CPU_TYPE, DYNAMIC),
# torch's dispatch, FBGEMM, numpy's dispatch and its BLAS, the C library's choice of its mathematical functions.
_FAMILIES = (
    "DNNL_",
    "ONEDNN_",
    "MKL_",
    "ATEN_",
    "FBGEMM_",
    "NPY_",
    "OPENBLAS_",
    "GOTO_",
    "BLIS_",
    "TORCH_MKLDNN_",
    "TORCH_LINEAR_",
)
_NAMES = (
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "OMP_DYNAMIC",
    "OMP_THREAD_LIMIT",
    "OMP_NESTED",
    "OMP_MAX_ACTIVE_LEVELS",
    "OMP_SCHEDULE",
    "PYTORCH_TENSOREXPR_FALLBACK",
)
_CUDA_FAMILIES = ("CUBLAS_", "CUBLASLT_", "CUDNN_", "TORCH_CUDNN_", "TORCH_ALLOW_TF32", "TORCH_BLAS_", "TORCH_LINALG_")
_CUDA_NAMES = ("NVIDIA_TF32_OVERRIDE", "CUDA_FORCE_PTX_JIT", "CUDA_DISABLE_PTX_JIT")
# Of those families, what only talks, keeps or waits; thread counts are asked of torch, whoever has set them.
_HARMLESS_ENDINGS = ("_VERBOSE", "_VERBOSE_TIMESTAMP", "_NUM_THREADS", "_CAPACITY", "_TIMEOUT", "_LOG_LEVEL")
_HARMLESS_PARTS = ("_JIT_DUMP", "_JIT_PROFILE", "_JITDUMPDIR", "_LOGINFO", "_LOGDEST", "_STATS_FREQ")
_COUNTS_ALL_THE_SAME = ("MKL_DOMAIN_NUM_THREADS",)  # torch does not know of it


def environment(device: str) -> dict[str, object]:
    """JSON-like facts; equal facts mean equal bits of the same model's forward, sampling included."""
    facts: dict[str, object] = {
        "code": _code_hash(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "libc": list(platform.libc_ver()),
        "machine": platform.machine(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "precision": [
            torch.get_float32_matmul_precision(),
            bool(torch.backends.mkldnn.enabled),
            torch.are_deterministic_algorithms_enabled(),
        ],
        "device": device,
        "settings": library_settings(os.environ, device),
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def library_settings(variables: Mapping[str, str], device: str) -> dict[str, str]:
    """The environment variables by which somebody tells the libraries how to compute; an empty one tells nothing."""
    cuda = device.startswith("cuda")
    families: tuple[str, ...] = (*_FAMILIES, *(_CUDA_FAMILIES if cuda else ()))
    names = (*_NAMES, *(_CUDA_NAMES if cuda else ()))
    return {
        name: value
        for name, value in sorted(variables.items())
        if value
        and (name in names or name.startswith(families))
        and (name in _COUNTS_ALL_THE_SAME or not _is_harmless(name))
    }


def _is_harmless(name: str) -> bool:
    return name.endswith(_HARMLESS_ENDINGS) or any(part in name for part in _HARMLESS_PARTS)


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
