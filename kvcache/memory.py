"""How much memory a KV cache may take: what the device, the machine and the container leave."""

from __future__ import annotations

from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
UNKNOWN = 4 * 1024**3  # a machine that does not tell


def available_bytes(device: str | torch.device = "cpu") -> int:
    """Memory of ``device`` that is free now; on a CPU also within the container's limit."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    bounds = [bound for bound in (_machine(), _container()) if bound is not None]
    return max(0, min(bounds, default=UNKNOWN))


def _machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _container() -> int | None:
    """Control groups, version 2 or 1; None without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            bound, taken = (_CGROUP / limit).read_text().strip(), int((_CGROUP / used).read_text())
        except (OSError, ValueError):
            continue
        # Version 1 writes a huge number for "no limit".
        return int(bound) - taken if bound.isdigit() and int(bound) < 2**60 else None
    return None
