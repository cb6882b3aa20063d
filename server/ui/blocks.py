"""The block map: one for all who watch, taken only while somebody does, between two steps, a few times a second."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable

from scheduler.errors import AdmissionError
from scheduler.interface import EngineInterface
from scheduler.remote.engine import CallFailed
from server.ui.feed import Feed
from server.ui.forms import encode

logger = logging.getLogger("truedraft.ui")

EVERY_SECONDS = 0.25
OLD_SECONDS = 1.0  # a map from before that is not shown to a new reader if anything has happened since
FAILED_SECONDS = 5.0  # until it is tried again
PLAIN_BLOCKS = 1024  # with more, runs are written as their length and their letter

_RUN = re.compile(r"(.)\1*")


class BlockWatch:
    """For the event loop's thread. ``number`` counts the maps that differed from the one before."""

    def __init__(self, engine: EngineInterface, feed: Feed, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._feed = feed
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._next = clock()  # when the next may be taken
        self._taken = clock()
        self._seen = -1  # records before the last one that was taken
        self._map = ""
        self.number = 0
        self.json = b""  # the event's data

    @property
    def fresh(self) -> bool:
        """There is a map, and it is of now or nearly so."""
        if not self.number:
            return False
        return self._seen == self._feed.num_records or self._clock() - self._taken < OLD_SECONDS

    def look(self) -> None:
        """Have a map taken soon, if anything can have changed and the last one is old enough."""
        if self._task is None and self._seen != self._feed.num_records and self._clock() >= self._next:
            self._task = asyncio.get_running_loop().create_task(self._take(), name="block map")

    async def _take(self) -> None:
        records, seq, wait = self._feed.num_records, self._feed.seq, EVERY_SECONDS
        try:
            found = await self._engine.block_map()
            self._seen, self._taken = records, self._clock()
            if found != self._map:
                self._map = found
                self.number += 1
                self.json = blocks_json(seq, found)
        except (AdmissionError, CallFailed, RuntimeError) as error:
            logger.debug("there is no block map: %s", error)
            wait = FAILED_SECONDS
        finally:
            self._next = self._clock() + wait
            self._task = None


def blocks_json(seq: int, found: str) -> bytes:
    """The data of the event ``blocks`` about a map with one character a block."""
    rle = len(found) > PLAIN_BLOCKS
    return encode({"seq": seq, "num_blocks": len(found), "rle": rle, "map": run_lengths(found) if rle else found})


def run_lengths(found: str) -> str:
    """``"uuu.."`` as ``"3u2."``."""
    return _RUN.sub(lambda run: f"{len(run[0])}{run[1]}", found)
