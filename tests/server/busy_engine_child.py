"""A program for an engine's process that is busy for ever while it is imported, as one that imports much."""

from __future__ import annotations

while True:
    pass
