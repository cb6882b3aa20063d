"""Runs a record again, through the code that serves requests, and compares."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from bench.foreign import shown
from bench.replay.compare import Comparison, compare, compare_usage, not_compared
from bench.replay.joining import Output
from bench.replay.record import Answer, AuditRecord, SavedPair, read_answer
from scheduler.errors import AdmissionError
from scheduler.request import ChoiceSpec, EngineRequest
from scheduler.rerun import plain_params
from server.audits import params_from_json
from server.body import parse_json_object
from server.chat.completion import begin_chat
from server.chat.schema import parse_chat
from server.commands import CommandError
from server.completion import begin_completion
from server.errors import APIError
from server.schemas import parse_completion
from server.service import Service

Say = Callable[[str], None]
OFF = {"num_speculative_tokens": 0}


def replay(service: Service, record: SavedPair | AuditRecord, *, plain: bool, say: Say) -> bool:
    """True if all that the record holds is the same. ``service``'s engine is started and ended here.

    Raises CommandError if the record is of another model or the request is refused.
    """
    if record.model not in service.facts.names:
        model = shown(record.model, 64)
        raise CommandError(
            f"the record is of the model {model}, this is {service.facts.names[0]}: choose it with --model, or "
            f"say --served-model-name {model} if it is the same"
        )
    if record.fingerprint == service.fingerprint:
        say(f"the fingerprint is the record's: {service.fingerprint}")
    else:
        then = "none" if record.fingerprint is None else shown(record.fingerprint)
        say(f"the fingerprint differs: {then} in the record, {service.fingerprint} here; the ids need not be the same")
    try:
        comparisons = asyncio.run(_run(service, record, plain))
    except APIError as error:
        raise CommandError(f"the request is refused: {shown(error.message, 300)}") from error
    for comparison in comparisons:
        say(comparison.line)
    left_out = not_compared(record)
    if left_out:
        say(left_out)
    return all(comparison.same for comparison in comparisons)


async def _run(service: Service, record: SavedPair | AuditRecord, plain: bool) -> list[Comparison]:
    service.engine.start()
    try:
        if isinstance(record, AuditRecord):
            return [_compare_audit(record, await _again(service, record, plain))]
        now = await _complete(service, record, plain)
        then = record.answer
        comparisons = [
            compare(index, output, now.outputs.get(index), record.asked) for index, output in then.outputs.items()
        ]
        extra = sorted(set(now.outputs) - set(then.outputs))
        comparisons += [Comparison(False, f"choice {index}: not in the record") for index in extra]
        return comparisons + ([compare_usage(then.usage, now.usage or {})] if then.usage else [])
    finally:
        await service.engine.shutdown(drain=False)
        service.grammars.close()
        service.chat.close()


async def _complete(service: Service, record: SavedPair, plain: bool) -> Answer:
    body = {name: value for name, value in record.body.items() if name not in ("stream", "stream_options", "timeout")}
    body["return_token_ids"] = True
    if plain:
        body["speculation"] = OFF
    parsed, now = parse_json_object(json.dumps(body).encode()), time.monotonic()
    if record.is_chat:
        completion = await begin_chat(service, parse_chat(parsed), "replay", now)
    else:
        completion = await begin_completion(service, parse_completion(parsed), "replay", now)
    answer = await completion.whole()
    return read_answer([json.loads(json.dumps(answer))], chat=record.is_chat)  # as a client has it


async def _again(service: Service, record: AuditRecord, plain: bool) -> Output:
    request = audit_request(record, plain)
    rows = service.facts.embedding_rows
    wrong = [token for token in request.prompt_token_ids if not 0 <= token < rows]
    if wrong or not request.prompt_token_ids:
        told = f"holds the id {shown(wrong[0])}; this model has {rows}" if wrong else "is empty"
        raise CommandError(f"the record cannot be replayed: its prompt {told}")
    output: dict[str, Any] = {"token_ids": [], "finish_reason": None, "stop_reason": None}
    try:
        handle = service.engine.submit(request)
    except (AdmissionError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CommandError(f"the record cannot be replayed: {shown(str(error))}") from error
    async with handle:
        async for batch in handle:
            for event in batch:
                if event.error is not None:
                    raise CommandError(f"the request failed: {shown(event.error)}")
                output["token_ids"] += event.token_ids
                output |= {"finish_reason": event.finish_reason, "stop_reason": event.stop_reason}
    return output


def audit_request(record: AuditRecord, plain: bool) -> EngineRequest:
    """Raises CommandError if the parameters are those of another version."""
    values: dict[str, Any] = record.values
    try:
        params = params_from_json(values["params"])
        return EngineRequest(
            request_id="replay",
            prompt_token_ids=tuple(values["prompt_token_ids"]),
            choices=(ChoiceSpec(record.choice, plain_params(params) if plain else params),),
            arrival_time=time.monotonic(),
            stop=tuple(values["stop"]),
            include_stop_str_in_output=values["include_stop_str_in_output"],
            skip_special_tokens=values["skip_special_tokens"],
            read_prefix_cache=False,
        )
    except (TypeError, ValueError) as error:
        raise CommandError(f"the record cannot be replayed: its params are wrong ({shown(str(error))})") from error


def _compare_audit(record: AuditRecord, now: Output) -> Comparison:
    sent = compare(record.choice, record.output, now)
    if sent.same:
        return sent
    same_as_rerun = tuple(now["token_ids"][: len(record.rerun)]) == record.rerun
    tail = "; these are the ids of the audit's own run" if same_as_rerun else "; the audit's own run differs as well"
    return Comparison(False, sent.line + tail)
