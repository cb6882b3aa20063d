"""What the Dockerfile says about the image: its variables, its user, its health check."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
FINAL = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]  # the stage that runs


def environment() -> dict[str, str]:
    """Variables of a container that nobody has given any."""
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", FINAL, re.MULTILINE)
    return dict(pair.split("=", 1) for pair in block.replace("\\\n", " ").split())


def user() -> tuple[int, int]:
    """User and group id."""
    uid, gid = re.findall(r"^USER (\d+):(\d+)$", FINAL, re.MULTILINE)[0]
    return int(uid), int(gid)


def health_check() -> list[str]:
    """The command that tells whether a container is healthy."""
    command: list[str] = json.loads(re.findall(r"^HEALTHCHECK (?:.*\\\n)*.*CMD (\[.*\])$", FINAL, re.MULTILINE)[0])
    return command
