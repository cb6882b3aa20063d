"""A server as the load sees it: whose it is, what it is called, which fields it takes, where its metrics are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.foreign import ForeignError, parse_json, shown
from bench.preflight.info import server_info
from bench.preflight.scrape import Scrape
from bench.serving.engine import OURS, prefix_of
from bench.serving.options import Mode
from bench.serving.wire import Client, WireError
from server.commands import CommandError

OPTIONAL = ("stream_options", "seed", "ignore_eos", "return_token_ids", "cache_salt")
_SETTLE_SECONDS = 2.0
_LOOK_SECONDS = 0.01
_ON_CHAT, _ON_TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(slots=True)
class Target:
    """One server. ``ours``: a Truedraft server, whose requests may choose their speculation."""

    name: str
    client: Client
    model: str
    ours: bool
    chat: bool
    info: Mapping[str, Any] = field(default_factory=dict)  # /v1/server_info, checked
    fields: tuple[str, ...] = OPTIONAL  # of OPTIONAL, those that it takes
    prefix: str | None = None  # of its metrics; None: it has none that are known
    why_no_metrics: str = ""

    @property
    def path(self) -> str:
        return _ON_CHAT if self.chat else _ON_TEXT

    @property
    def level(self) -> str | None:
        """The exactness level that the server measured for itself."""
        return self.info["exactness"]["level"] if self.ours else None

    def may_not(self, mode: Mode) -> str | None:
        """Why the server cannot run this mode; None if it can."""
        if mode.k is None or not self.ours:
            return None
        speculation = self.info.get("speculation")
        known = speculation if isinstance(speculation, dict) else {}
        most, drafters = known.get("num_speculative_tokens"), known.get("drafters")
        if isinstance(most, int) and mode.k > most:
            return f"it drafts at most {most} tokens (serve --num-speculative-tokens)"
        names = [one.get("name") for one in drafters if isinstance(one, dict)] if isinstance(drafters, list) else []
        if mode.drafter is not None and mode.drafter not in names:
            return f"it has no drafter {mode.drafter}; it has {', '.join(map(str, names)) or 'none'}"
        return None

    def body(self, prompt: Mapping[str, Any], tokens: int, optional: Mapping[str, Any]) -> dict[str, Any]:
        """A request: ``prompt`` is the member with the prompt or the messages; of ``optional`` what it takes."""
        taken = {name: value for name, value in optional.items() if name not in OPTIONAL or name in self.fields}
        return {"model": self.model, **prompt, "max_tokens": tokens, "stream": True, **taken}

    async def alive(self) -> bool:
        try:
            await asyncio.wait_for(self.client.get("/v1/models"), 5.0)
        except (WireError, TimeoutError):
            return False
        return True

    async def scrape(self) -> Scrape | None:
        """Its metrics once nothing runs any more, or after two seconds; None if it has none."""
        if self.prefix is None:
            return None
        deadline = asyncio.get_running_loop().time() + _SETTLE_SECONDS
        while True:
            try:
                answer = await self.client.get("/metrics")
                found = Scrape.parse(answer.body.decode("utf-8", "replace"), self.prefix)
            except (WireError, ForeignError):
                return None
            busy = (found.value("num_requests_running") or 0) + (found.value("num_requests_waiting") or 0)
            if not busy or asyncio.get_running_loop().time() > deadline:
                return found
            await asyncio.sleep(_LOOK_SECONDS)


async def open_target(name: str, client: Client, *, model: str | None, chat: bool) -> Target:
    """Ask the server who it is. Raises CommandError, one line."""
    flag = f"--target {client.url}"
    try:
        if model is None:
            answer = await client.get("/v1/models")
            if answer.status != 200:
                raise CommandError(f"{flag}: /v1/models answers {answer.error_text()}")
            model = _first_model(answer.body, flag)
        info = await client.get("/v1/server_info")
        metrics = await client.get("/metrics")
    except WireError as error:
        raise CommandError(f"{flag}: {error}") from error
    target = Target(name, client, model, ours=False, chat=chat)
    if info.status == 200:
        try:
            value = parse_json(info.body)
            server_info(value)
            target.info, target.ours = value, True
        except ForeignError:
            pass  # some other server that has this path too
    if metrics.status != 200:
        target.why_no_metrics = f"its /metrics answers {metrics.status}"
    else:
        target.prefix = prefix_of(metrics.body.decode("utf-8", "replace"))
        if target.prefix is None:
            target.why_no_metrics = "its /metrics has no metric of a known name (truedraft_..., vllm:...)"
    if target.ours and target.prefix != OURS:
        target.why_no_metrics = target.why_no_metrics or "its /metrics are not those of a Truedraft server"
    return target


async def find_fields(target: Target, prompt: Mapping[str, Any], optional: Mapping[str, Any]) -> dict[str, str]:
    """Try each optional field of a stranger's API alone; returns those it refuses, with its words.

    Raises CommandError if it refuses a request without any of them.
    """
    if target.ours:
        return {}
    refused: dict[str, str] = {}
    target.fields = ()
    reason = await _refusal(target, target.body(prompt, 1, {}))
    if reason is not None:
        raise CommandError(f"--target {target.client.url}: a plain request is refused, {reason}")
    taken = []
    for name in OPTIONAL:
        if name not in optional:
            continue
        target.fields = (name,)
        reason = await _refusal(target, target.body(prompt, 1, {name: optional[name]}))
        if reason is None:
            taken.append(name)
        else:
            refused[name] = reason
    target.fields = tuple(taken)
    return refused


async def _refusal(target: Target, body: Mapping[str, Any]) -> str | None:
    try:
        answer = await target.client.post(target.path, body)
    except WireError as error:
        raise CommandError(f"--target {target.client.url}: {error}") from error
    return None if answer.status == 200 else answer.error_text()


def _first_model(body: bytes, flag: str) -> str:
    try:
        value = parse_json(body)
    except ForeignError as error:
        raise CommandError(f"{flag}: /v1/models {error}") from error
    models: Sequence[Any] = value.get("data") or () if isinstance(value, dict) else ()
    names = [one.get("id") for one in models if isinstance(one, dict)] if isinstance(models, list) else []
    if not names or not isinstance(names[0], str):
        raise CommandError(f"{flag}: /v1/models names no model, got {shown(value, 80)}; name it with --served-model")
    return names[0]
