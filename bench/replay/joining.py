"""A choice out of what a record holds of it: one answer, or the chunks of a stream, joined strictly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.foreign import shown

# A choice by names of bench.replay.record.FIELDS; a name that is not there is not known.
Output = Mapping[str, Any]


class BadRecord(Exception):
    """The record cannot be replayed; the message is the rest of a line."""


def join_completion(index: int, parts: Sequence[Mapping[str, Any]]) -> Output:
    """``parts``: the choice of every chunk that holds it, in order. Raises BadRecord."""
    joined = _ends(index, parts)
    joined["text"] = "".join(_texts(parts))
    for name, kind in (("token_ids", list), ("logprobs", dict)):
        held = [part[name] for part in parts if part.get(name) is not None]
        if not held:
            continue
        if len(held) < len(parts) or not all(isinstance(value, kind) for value in held):
            raise BadRecord(f"a choice of its response lacks a field or has a wrong one: {name}")
        joined[name] = _join_lists(held) if kind is dict else [item for value in held for item in value]
    return joined


def join_chat(index: int, parts: Sequence[Mapping[str, Any]]) -> Output:
    """The same of a chat. Its ``message`` is without the ids of calls, which are drawn anew for every answer."""
    joined = _ends(index, parts)
    if "message" in parts[0]:
        if len(parts) > 1:
            raise BadRecord(f"its choice {shown(index)} is there several times")
        joined["message"] = _message(_object(parts[0], "message"))
        joined |= {name: parts[0][name] for name in ("token_ids", "logprobs") if parts[0].get(name) is not None}
        return joined
    joined["message"] = _joined_deltas([_object(part, "delta") for part in parts])
    ids = [part["token_ids"] for part in parts if part.get("token_ids") is not None]
    if ids:  # not with every delta: text may lag behind its tokens, and a token may make several deltas
        joined["token_ids"] = _concatenated(ids, "token_ids")
    logprobs = [_object(part, "logprobs") for part in parts if part.get("logprobs") is not None]
    if logprobs:
        if any(each.keys() != {"content", "refusal"} or each["refusal"] is not None for each in logprobs):
            raise BadRecord("the logprobs of a chat's stream must be objects of content, and of refusal, which is null")
        content = _concatenated([each["content"] for each in logprobs], "logprobs.content")
        joined["logprobs"] = {"content": content, "refusal": None}
    return joined


def _ends(index: int, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What comes once: an end with the last part, the prompt with the first."""
    for name in ("finish_reason", "stop_reason"):
        early = next((part[name] for part in parts[:-1] if part.get(name) is not None), None)
        if early is not None:
            raise BadRecord(f"its choice {shown(index)} goes on after its end, {name} {shown(early)}")
    joined = {name: parts[-1][name] for name in ("finish_reason", "stop_reason") if name in parts[-1]}
    return joined | {name: parts[0][name] for name in ("prompt_token_ids", "prompt_logprobs") if name in parts[0]}


def _texts(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    if not all(isinstance(part.get("text"), str) for part in parts):
        raise BadRecord("a choice of its response lacks a field or has a wrong one: text")
    return [part["text"] for part in parts]


def _join_lists(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of objects whose values are lists, in a stream: the lists one after the other."""
    if len(parts) == 1:
        return dict(parts[0])
    if any(part.keys() != parts[0].keys() or not all(isinstance(v, list) for v in part.values()) for part in parts):
        raise BadRecord("the logprobs of a stream must be objects of the same lists")
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def _object(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = part.get(name)
    if not isinstance(value, dict):
        raise BadRecord(f"a choice of its response lacks a field or has a wrong one: {name}")
    return value


def _concatenated(lists: Sequence[object], name: str) -> list[Any]:
    joined: list[Any] = []
    for value in lists:
        if not isinstance(value, list):
            raise BadRecord(f"a choice of its response lacks a field or has a wrong one: {name}")
        joined += value
    return joined


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, which clients' own objects have where the answer had nothing, and without the ids of calls."""
    kept = {name: value for name, value in message.items() if value is not None}
    calls = kept.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadRecord("a choice of its response lacks a field or has a wrong one: message.tool_calls")
        kept["tool_calls"] = [{name: value for name, value in call.items() if name != "id"} for call in calls]
    return kept


def _joined_deltas(deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of them."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name, value in delta.items():
            if value is None:
                continue
            if name == "tool_calls":
                _join_calls(calls, value)
            elif name == "content" and isinstance(value, str):
                message["content"] = message.get("content", "") + value
            elif name in message or name == "content":
                raise BadRecord(f"a delta of its response has a wrong member, or has it twice: {shown(name, 40)}")
            else:
                message[name] = value
    if calls:
        if sorted(calls) != list(range(len(calls))):
            raise BadRecord("the calls of its response are not numbered from 0 on")
        message["tool_calls"] = [calls[number] for number in range(len(calls))]
        if not message.get("content"):  # as an answer of calls alone has it
            message.pop("content", None)
    return message


def _join_calls(calls: dict[int, dict[str, Any]], deltas: object) -> None:
    for delta in deltas if isinstance(deltas, list) else [None]:
        number = delta.get("index") if isinstance(delta, dict) else None
        function = delta.get("function") if isinstance(delta, dict) else None
        if type(number) is not int or not isinstance(function, dict):
            raise BadRecord("a delta of its response has a wrong member, or has it twice: tool_calls")
        assert isinstance(delta, dict)
        begun = calls.setdefault(number, {"function": {"arguments": ""}})
        for name, value in delta.items():
            if name not in ("index", "id", "function") and value is not None:
                begun[name] = value
        for name, value in function.items():
            if name == "arguments" and isinstance(value, str):
                begun["function"]["arguments"] += value
            elif value is not None:
                begun["function"][name] = value
