"""Runs a record again, through the code that serves requests, and compares."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.replay.record import AuditRecord, Output, SavedPair, read_choice
from scheduler.request import ChoiceSpec, EngineRequest
from scheduler.rerun import plain_params
from server.audits import params_from_json
from server.body import parse_json_object
from server.commands import CommandError
from server.completion import begin_completion
from server.errors import APIError
from server.schemas import parse_completion
from server.service import Service

Say = Callable[[str], None]
OFF = {"num_speculative_tokens": 0}


@dataclass(frozen=True, slots=True)
class Comparison:
    index: int
    same: bool
    line: str  # for people


def replay(service: Service, record: SavedPair | AuditRecord, *, plain: bool, say: Say) -> bool:
    """True if every choice is the same. ``service``'s engine is started and ended here.

    Raises CommandError if the record is of another model or the request is refused.
    """
    if record.model not in service.facts.names:
        raise CommandError(
            f"the record is of the model {record.model}, this is {service.facts.names[0]}: choose it with --model, or "
            f"say --served-model-name {record.model} if it is the same"
        )
    if record.fingerprint == service.fingerprint:
        say(f"the fingerprint is the record's: {service.fingerprint}")
    else:
        say(
            f"the fingerprint differs: {record.fingerprint} in the record, {service.fingerprint} here; "
            "the ids need not be the same"
        )
    try:
        comparisons = asyncio.run(_run(service, record, plain))
    except APIError as error:
        raise CommandError(f"the request is refused: {error.message}") from error
    for comparison in comparisons:
        say(comparison.line)
    return all(comparison.same for comparison in comparisons)


async def _run(service: Service, record: SavedPair | AuditRecord, plain: bool) -> list[Comparison]:
    service.engine.start()
    try:
        if isinstance(record, AuditRecord):
            return [_compare_audit(record, await _again(service, record, plain))]
        outputs = await _complete(service, record, plain)
        comparisons = [_compare(index, output, outputs.get(index)) for index, output in record.outputs.items()]
        extra = sorted(set(outputs) - set(record.outputs))
        return comparisons + [Comparison(index, False, f"choice {index}: not in the record") for index in extra]
    finally:
        await service.engine.shutdown(drain=False)


async def _complete(service: Service, record: SavedPair, plain: bool) -> dict[int, Output]:
    body = {name: value for name, value in record.body.items() if name not in ("stream", "stream_options")}
    body["return_token_ids"] = True
    if plain:
        body["speculation"] = OFF
    request = parse_completion(parse_json_object(json.dumps(body).encode()))
    completion = await begin_completion(service, request, "replay", time.monotonic())
    answer = await completion.whole()
    return {choice["index"]: read_choice([choice]) for choice in answer["choices"]}


async def _again(service: Service, record: AuditRecord, plain: bool) -> Output:
    request = audit_request(record, plain)
    token_ids: list[int] = []
    async with service.engine.submit(request) as handle:
        async for batch in handle:
            for event in batch:
                if event.error is not None:
                    raise CommandError(f"the request failed: {event.error}")
                token_ids += event.token_ids
                finish_reason = event.finish_reason
    return Output(None, tuple(token_ids), finish_reason)


def audit_request(record: AuditRecord, plain: bool) -> EngineRequest:
    """Raises CommandError if the parameters are those of another version."""
    values: dict[str, Any] = record.values
    try:
        params = params_from_json(values["params"])
        return EngineRequest(
            request_id="replay",
            prompt_token_ids=tuple(map(int, values["prompt_token_ids"])),
            choices=(ChoiceSpec(int(values["choice"]), plain_params(params) if plain else params),),
            arrival_time=time.monotonic(),
            stop=tuple(values["stop"]),
            include_stop_str_in_output=bool(values["include_stop_str_in_output"]),
            skip_special_tokens=bool(values["skip_special_tokens"]),
            read_prefix_cache=False,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CommandError(f"the record cannot be replayed: a field is missing or wrong ({error})") from error


def _compare_audit(record: AuditRecord, now: Output) -> Comparison:
    index = int(record.values["choice"])
    sent = _compare(index, record.output, now)
    if sent.same:
        return sent
    rerun = record.rerun.token_ids or ()
    ids = now.token_ids or ()
    same_as_rerun = ids[: len(rerun)] == rerun
    tail = "; these are the ids of the audit's own run" if same_as_rerun else "; the audit's own run differs as well"
    return Comparison(index, False, sent.line + tail)


def _compare(index: int, then: Output, now: Output | None) -> Comparison:
    def differs(what: str) -> Comparison:
        return Comparison(index, False, f"choice {index}: {what}")

    if now is None:
        return differs("not there any more")
    if then.token_ids is None:
        return _compare_text(index, then, now)
    ids = now.token_ids or ()
    for position, (old, new) in enumerate(zip(then.token_ids, ids, strict=False)):
        if old != new:
            return differs(f"output token {position} is {new}, and was {old}")
    if len(ids) != len(then.token_ids):
        return differs(f"it has {len(ids)} output tokens, and had {len(then.token_ids)}")
    if now.finish_reason != then.finish_reason:
        return differs(f"the ids are the same, but it ended by {now.finish_reason}, and did by {then.finish_reason}")
    if then.logprobs is not None and now.logprobs != then.logprobs:
        return differs("the ids are the same, but not the logprobs")
    return Comparison(index, True, f"choice {index}: the {len(ids)} ids are the same")


def _compare_text(index: int, then: Output, now: Output) -> Comparison:
    if (now.text, now.finish_reason) == (then.text, then.finish_reason):
        return Comparison(index, True, f"choice {index}: the text is the same (the record holds no ids)")
    old, new = then.text or "", now.text or ""
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    return Comparison(index, False, f"choice {index}: the text differs from character {at} on")
