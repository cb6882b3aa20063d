"""Figures as JSON can hold them."""

from __future__ import annotations

import math
from typing import Any


def rounded(value: Any, digits: int) -> Any:
    """``value`` with every float in it rounded to so many digits; JSON has no NaN and no infinity: they are None."""
    if isinstance(value, dict):
        return {name: rounded(inner, digits) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner, digits) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
