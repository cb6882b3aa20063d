"""Runs a command as in a container with a read-only root: ``unshare --mount python read_only.py PLACE ... -- COMMAND``.

Nothing can be written but in the places, which are empty, and in what the kernel shows as files. The command has no
capability, and neither has what it starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OF_THE_KERNEL = {
    "proc",
    "sysfs",
    "devtmpfs",
    "devpts",
    "mqueue",
    "cgroup",
    "cgroup2",
    "securityfs",
    "debugfs",
    "tracefs",
}


def main(words: list[str]) -> None:
    """Does not return."""
    end = words.index("--")
    places, command = words[:end], words[end + 1 :]
    for line in Path("/proc/self/mounts").read_text("utf-8").splitlines():
        _, target, kind, *_ = line.split()
        target = target.encode("ascii").decode("unicode_escape")
        if kind not in OF_THE_KERNEL and target != "/dev" and not target.startswith(("/dev/", "/proc/", "/sys/")):
            subprocess.run(["mount", "-o", "remount,bind,ro", target], check=True)
    for place in places:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    nothing = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
    os.execvp(nothing[0], [*nothing, *command])


if __name__ == "__main__":
    main(sys.argv[1:])
