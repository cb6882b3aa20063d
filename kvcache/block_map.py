"""The letters of a block map: what each block of a KV cache is at one moment, a character a block.

::

    .  free: no reference, no content      u  used: one table refers to it       p  used, and not yet full
    c  cached: content, no reference       s  used by several tables
"""

from __future__ import annotations

FREE, USED, SHARED, PARTLY, CACHED = (ord(letter) for letter in ".uspc")

OF_REFERENCES = bytes((FREE, USED, *(SHARED for _ in range(254))))  # by the number of references, up to 255
