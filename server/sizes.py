"""Sizes as people write them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(value: str | int) -> int:
    """Bytes of ``"512MiB"``, ``"2G"`` (powers of 1024 with or without the i) or a plain number."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size")
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not a size; write bytes or a number with KiB, MiB, GiB or TiB")
    return int(float(match[1]) * 1024 ** _POWERS[match[2].lower()])
