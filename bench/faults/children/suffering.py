"""What happens in a child process on command."""

from __future__ import annotations

import os
import time

from bench.faults.faults import SECRET, InjectedFault


def suffer(action: str) -> None:
    """``raise``, ``exit``, or hang until the process is killed."""
    if action == "raise":
        raise InjectedFault(SECRET)
    if action == "exit":
        os._exit(99)
    time.sleep(3600)
