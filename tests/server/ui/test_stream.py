"""One reader's feed, tick by tick, and the block map that all readers share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from scheduler.errors import EngineUnhealthy, ShuttingDown
from server.ui.blocks import EVERY_SECONDS, FAILED_SECONDS, BlockWatch, blocks_json, run_lengths
from server.ui.feed import Feed
from server.ui.stream import SILENCE_SECONDS, feed_events
from tests.server.ui.records import Clock, ended, got, parsed, record


class Engine:
    """Has a block map, or an error."""

    def __init__(self, found: str | Exception = "u.") -> None:
        self.found = found
        self.num_asked = 0

    async def block_map(self) -> str:
        self.num_asked += 1
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class Reader:
    """Takes the feed apart, one tick at a time."""

    def __init__(self, after: int | None = None, *, feed: Feed | None = None, engine: Engine | None = None) -> None:
        self.clock = Clock()
        self.feed = feed or Feed()
        self.engine = engine or Engine()
        self.blocks = BlockWatch(self.engine, self.feed, self.clock)  # type: ignore[arg-type]
        self.over = False
        self._events = feed_events(self.feed, self.blocks, lambda: self.over, after, tick=0, clock=self.clock)

    async def next(self) -> list[tuple[str, dict[str, Any]]]:
        return parsed(await asyncio.wait_for(anext(self._events), 30))

    async def rest(self) -> list[tuple[str, dict[str, Any]]]:
        return [event async for raw in self._events for event in parsed(raw)]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_the_feed_begins_at_once_and_goes_on_with_what_comes() -> None:
    async def test() -> None:
        reader = Reader()
        reader.feed.observe(record(got(1, 1)))
        assert await reader.next() == [("steps", {"seq": 1, "dropped": 0, "steps": []})]
        assert await reader.next() == [("blocks", {"seq": 1, "num_blocks": 2, "rle": False, "map": "u."})]
        reader.feed.observe(record(got(1, 3)))
        reader.feed.observe(record(got(1, 2), finished=[ended(1)]))
        steps, requests = await reader.next()
        assert (steps[0], steps[1]["seq"], steps[1]["dropped"]) == ("steps", 3, 0)
        assert [step["n"] for step in steps[1]["steps"]] == [2, 3]
        assert requests[0] == "requests"
        assert [request["key"] for request in requests[1]["requests"]] == [1]

    run(test)


def test_a_reader_that_comes_back_misses_nothing_that_is_kept() -> None:
    async def test() -> None:
        feed = Feed()
        for key in range(6):
            feed.observe(record(got(key, 1), finished=[ended(key)]))
        steps, requests = await Reader(4, feed=feed).next()
        assert [step["n"] for step in steps[1]["steps"]] == [5, 6]
        assert [request["key"] for request in requests[1]["requests"]] == [4, 5]

    run(test)


def test_a_slow_reader_is_told_how_much_it_missed() -> None:
    async def test() -> None:
        reader = Reader(feed=Feed(max_steps=4))
        await reader.next()
        for key in range(10):
            reader.feed.observe(record(got(key, 1)))
        events = dict(await reader.next())
        assert events["steps"]["dropped"] == 6
        assert [step["n"] for step in events["steps"]["steps"]] == [7, 8, 9, 10]

    run(test)


def test_a_number_that_is_yet_to_come_means_from_now_on() -> None:
    async def test() -> None:
        feed = Feed()
        feed.observe(record(got(1, 1), finished=[ended(1)]))
        assert await Reader(10**6, feed=feed).next() == [("steps", {"seq": 1, "dropped": 0, "steps": []})]

    run(test)


def test_the_feed_ends_when_it_is_over_with_what_came_last() -> None:
    async def test() -> None:
        reader = Reader()
        await reader.next()
        reader.feed.observe(record(got(1, 1)))
        reader.over = True
        assert [event["seq"] for name, event in await reader.rest() if name == "steps"] == [1]

    run(test)


def test_a_long_silence_is_broken_by_a_comment() -> None:
    async def test() -> None:
        reader = Reader()
        while [name for name, _ in await reader.next()] != ["blocks"]:
            pass
        reader.clock.now += SILENCE_SECONDS
        assert await reader.next() == [], "a comment is no event"

    run(test)


def test_a_map_is_taken_when_something_has_happened_and_not_too_often() -> None:
    async def test() -> None:
        clock, feed, engine = Clock(), Feed(), Engine()
        blocks = BlockWatch(engine, feed, clock)  # type: ignore[arg-type]

        async def look() -> int:
            for _ in range(5):
                blocks.look()
                await asyncio.sleep(0)
            return engine.num_asked

        assert await look() == 1
        clock.now += 100
        assert await look() == 1, "nothing has happened"
        feed.observe(record())
        assert await look() == 2
        feed.observe(record())
        assert await look() == 2, "too soon"
        clock.now += EVERY_SECONDS
        assert await look() == 3

    run(test)


def test_a_map_that_is_the_same_is_not_sent_again() -> None:
    async def test() -> None:
        reader = Reader()
        events = []
        for _ in range(4):
            reader.feed.observe(record())
            reader.clock.now += EVERY_SECONDS
            events += await reader.next()
        reader.over = True
        events += await reader.rest()
        assert [name for name, _ in events].count("blocks") == 1
        assert reader.engine.num_asked >= 3

    run(test)


def test_a_map_from_long_ago_is_not_shown_to_a_new_reader() -> None:
    async def test() -> None:
        first = Reader()
        while "blocks" not in dict(await first.next()):
            pass
        first.clock.now += 100
        first.feed.observe(record())
        first.engine.found = "cc"
        second = feed_events(first.feed, first.blocks, lambda: False, None, tick=0, clock=first.clock)
        found: list[tuple[str, dict[str, Any]]] = []
        while "blocks" not in dict(found):
            found += parsed(await anext(second))
        assert dict(found)["blocks"]["map"] == "cc"

    run(test)


@pytest.mark.parametrize("error", [EngineUnhealthy("gone"), ShuttingDown("ending"), RuntimeError("planted")])
def test_an_engine_without_a_map_does_not_end_the_feed_and_is_not_pestered(error: Exception) -> None:
    async def test() -> None:
        reader = Reader(engine=Engine(error))
        await reader.next()
        for _ in range(5):
            reader.feed.observe(record(got(1, 1)))
            reader.clock.now += EVERY_SECONDS
            assert [name for name, _ in await reader.next()] == ["steps"]
        assert reader.engine.num_asked == 1
        reader.engine.found = "uu"
        reader.clock.now += FAILED_SECONDS
        reader.feed.observe(record(got(1, 1)))
        events = await reader.next()
        while "blocks" not in dict(events):
            reader.feed.observe(record(got(1, 1)))
            events = await reader.next()
        assert dict(events)["blocks"]["map"] == "uu"

    run(test)


@pytest.mark.parametrize("found", ["", ".", "uuu..s", "c" * 5000 + "u"])
def test_run_lengths_are_undone_by_their_meaning(found: str) -> None:
    import re

    assert re.sub(r"(\d+)(.)", lambda run: run[2] * int(run[1]), run_lengths(found)) == found


def test_a_large_map_is_written_in_runs() -> None:
    small, large = json.loads(blocks_json(1, "u" * 1024)), json.loads(blocks_json(1, "u" * 1025))
    assert (small["rle"], len(small["map"])) == (False, 1024)
    assert (large["rle"], large["map"], large["num_blocks"]) == (True, "1025u", 1025)
