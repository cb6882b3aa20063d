"""The events of a stream, read as strictly as the contract has them."""

from __future__ import annotations

import json
from typing import Any


class StreamFault(ValueError):
    """A stream that breaks the contract; the message is one line."""


def read_events(raw: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream. Raises StreamFault unless it ends in ``[DONE]`` and has LF only."""
    if b"\r" in raw or not raw.endswith(b"\n\n"):
        raise StreamFault("the stream does not end in a blank line, or has a CR")
    blocks = raw[:-2].split(b"\n\n")
    if any(not block.startswith(b"data: ") or b"\n" in block for block in blocks):
        raise StreamFault("the stream has an event that is not one data line")
    if blocks[-1] != b"data: [DONE]" or len(blocks) == 1:
        raise StreamFault("the stream does not end in [DONE], or holds nothing else")
    return [json.loads(block[6:]) for block in blocks[:-1]]
