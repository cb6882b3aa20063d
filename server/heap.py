"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc


def settle() -> None:
    """What is there now lives as long as the process: no collection looks at it again.

    To be called once, when all is built. The libraries make some hundred thousand objects; a pass over them takes a
    quarter of a second, in which no stream gets a token and no request is read.
    """
    gc.collect()
    gc.freeze()
