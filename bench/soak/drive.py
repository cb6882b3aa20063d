"""Drives the clients: rounds of load, and what the server says of itself when a round is over."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.preflight.scrape import Scrape
from bench.soak.faults import Fired, SoakFaults
from bench.soak.outcome import Kind, Outcome, judge
from bench.soak.process import ServerProcess
from bench.soak.requests import CHAT, COMPLETIONS, PATIENCE, Facts, Mix, Planned
from bench.soak.survivors import Replayed, Survivors, replay_alone
from bench.soak.wire import Reply, exchange

CLIENTS = 14
BURST = 60
BURST_SECONDS = 4.0  # between two bursts, about
FAULT_SECONDS = 1.0  # between two faults, about
STUCK_SECONDS = 5.0
SETTLE_SECONDS = 30.0  # in which nothing may be left, the time that stuck readers are given included
_LOOK_SECONDS = 0.05
_STATUS_SECONDS = 30.0  # for an answer about the server


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """The server when its clients had gone."""

    began: float  # seconds, on any clock
    ended: float
    settled_after: float | None  # seconds until nothing was left; None: something stayed
    left: str  # what stayed, one line
    memory_bytes: int  # of all its processes
    kept_bytes: int  # of that, what the server says it keeps on purpose and within bounds
    scrape: Scrape
    health: int | None  # status of /health
    requests: int  # so far


@dataclass(slots=True)
class Record:
    """All that happened."""

    outcomes: list[Outcome] = field(default_factory=list)
    rounds: list[RoundEnd] = field(default_factory=list)
    fired: list[Fired] = field(default_factory=list)
    replays: list[Replayed] = field(default_factory=list)
    final: Scrape | None = None  # with nothing to come


class Driver:
    """One server's clients. ``faults``: None for a server that has none. ``wanted``: features of requests that have to
    be answered at least once; they are asked for until they are."""

    @classmethod
    async def of(
        cls, server: ServerProcess, seed: int, faults: SoakFaults | None, wanted: Iterable[str] = ()
    ) -> Driver:
        info = json.loads((await exchange(server.address, "GET", "/v1/server_info", patience=_STATUS_SECONDS)).body)
        return cls(server, info, seed, faults, wanted)

    def __init__(
        self,
        server: ServerProcess,
        server_info: Mapping[str, Any],
        seed: int,
        faults: SoakFaults | None,
        wanted: Iterable[str],
    ) -> None:
        self.record = Record()
        self._wanted = set(wanted)
        self.num_blocks: int = server_info["kv_cache"]["num_blocks"]
        self.engine_process: bool = server_info["settings"].get("engine_process", False)
        facts = Facts.of(server_info)
        self._server = server
        self._facts = facts
        self._mix = Mix(facts, seed)
        self._faults = faults
        self._rng = random.Random(seed + 1)
        self._survivors = Survivors(seed + 2)
        self._go_on = asyncio.Event()

    async def round(self, seconds: float) -> RoundEnd:
        """Load for ``seconds``; then every client ends by itself, and the server is looked at."""
        self._go_on.clear()
        began = time.monotonic()
        until = began + seconds
        stuck: list[asyncio.Task[Kind]] = []
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(self._client(until))
            clients.create_task(self._bursts(until))
            clients.create_task(self._stuck_ones(until, stuck))
            if self._faults is not None:
                clients.create_task(self._strike(until, clients))
        if self._faults is not None:
            self.record.fired += await self._faults.collect()
        settled_after, left = await self._settle()
        self._go_on.set()
        await asyncio.gather(*stuck)
        end = await self._look(began, settled_after, left)
        self.record.rounds.append(end)
        return end

    async def finish(self) -> None:
        """Run the survivors again, each alone, and take the last numbers."""
        self.record.replays, outcomes = await replay_alone(self._survivors, self._send)
        self.record.outcomes += outcomes
        await self._settle()
        self.record.final = await self._scrape()

    async def _client(self, until: float) -> None:
        while time.monotonic() < until:
            await self._one(self._mix.next(self._wanted))

    async def _victim(self, planned: Planned) -> None:
        """It comes back until it is taken in: a refused one does not come by the fault."""
        while await self._one(planned) == "refused":
            await asyncio.sleep(0.2)
            planned = self._mix.again(planned)

    async def _bursts(self, until: float) -> None:
        while await self._pause(until, BURST_SECONDS):
            async with asyncio.TaskGroup() as burst:
                for _ in range(BURST):
                    burst.create_task(self._one(self._mix.burst()))

    async def _stuck_ones(self, until: float, stuck: list[asyncio.Task[Kind]]) -> None:
        while await self._pause(until, STUCK_SECONDS):
            stuck.append(asyncio.create_task(self._one(self._mix.stuck())))

    async def _strike(self, until: float, clients: asyncio.TaskGroup) -> None:
        assert self._faults is not None
        while await self._pause(until, FAULT_SECONDS):
            victim = await self._faults.arm(self._mix.victim)
            if victim is not None:
                clients.create_task(self._victim(victim))

    async def _pause(self, until: float, about: float) -> bool:
        """Whether there is time left behind a pause of about so many seconds."""
        pause = self._rng.uniform(0.5, 1.5) * about
        if time.monotonic() + pause >= until:
            return False
        await asyncio.sleep(pause)
        return True

    async def _one(self, planned: Planned) -> Kind:
        outcome, answered = judge(planned, await self._send(planned))
        self.record.outcomes.append(outcome)
        if answered is not None:
            self._survivors.offer(planned, answered)
            self._wanted -= planned.features
        return outcome.kind

    async def _send(self, planned: Planned) -> Reply:
        return await exchange(
            self._server.address,
            planned.method,
            planned.path,
            planned.raw,
            {"content-type": "application/json", "x-request-id": planned.request_id},
            planned.manner,
            patience=600.0 if planned.manner.stuck else PATIENCE,
            go_on=self._go_on,
        )

    async def _settle(self) -> tuple[float | None, str]:
        """Seconds until nothing ran, waited or held a block; and what was left of it if that did not come."""
        began = time.monotonic()
        while True:
            left = what_is_left(await self._scrape())
            passed = time.monotonic() - began
            if not left:
                return passed, ""
            if passed > SETTLE_SECONDS:
                return None, left
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self, began: float, settled_after: float | None, left: str) -> RoundEnd:
        await self._touch_workers()
        info = json.loads((await self._get("/v1/server_info")).body or b"{}")
        scrape = await self._scrape()
        drafters = scrape.value("drafter_memory_bytes") or 0.0
        return RoundEnd(
            began=began,
            ended=time.monotonic(),
            settled_after=settled_after,
            left=left or what_is_left(scrape),
            memory_bytes=self._server.look(),
            kept_bytes=int(drafters) + int(info.get("structured_output", {}).get("memory_bytes", 0)),
            scrape=scrape,
            health=(await self._get("/health")).status,
            requests=len(self.record.outcomes),
        )

    async def _touch_workers(self) -> None:
        """One of them may have been killed a moment ago: memory is compared with all of them running."""
        new_one = f"[ab]{len(self.record.outcomes)}"  # a known regex would not be compiled
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for path, body in ((CHAT, chat), (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": new_one}})):
            await self._one(self._mix.own(path, {"max_tokens": 1, "return_token_ids": True, **body}))

    async def _scrape(self) -> Scrape:
        return Scrape.parse((await self._get("/metrics")).body.decode())

    async def _get(self, path: str) -> Reply:
        return await exchange(self._server.address, "GET", path, patience=_STATUS_SECONDS)


def what_is_left(scrape: Scrape) -> str:
    """What of a request a server still has; empty if nothing."""
    found = {
        "choices run": scrape.value("num_requests_running"),
        "choices wait": scrape.value("num_requests_waiting"),
        "blocks are held": scrape.value("kv_blocks", state="used"),
    }
    return ", ".join(f"{'?' if count is None else int(count)} {what}" for what, count in found.items() if count != 0)
