"""What a user saved, read strictly: a request with its answer, or the record of an audit.

A saved pair::

    {"request": <body of POST /v1/completions, or of /v1/chat/completions>,
     "response": <the answer, or the list of a stream's chunks>,
     "seed": <the header X-Seed, if no part of the response has a seed>}

An audit's record has ``"kind": "truedraft.audit"`` (server.audits writes it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.foreign import ForeignError, parse_json, read_file, shown
from bench.replay.joining import BadRecord, Output, join_chat, join_completion
from server.commands import CommandError

AUDIT_KIND = "truedraft.audit"
AUDIT_VERSION = 1
MAX_BYTES = 64 * 2**20

# What of a choice the request, its seed and the fingerprint decide, in the order in which it is compared. A completion
# has a text, a chat a message.
FIELDS = (
    "token_ids", "text", "message", "finish_reason", "stop_reason", "logprobs", "prompt_token_ids", "prompt_logprobs",
)  # fmt: skip
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")  # not how many of them were cached


@dataclass(frozen=True, slots=True)
class Answer:
    outputs: dict[int, Output]  # by index
    usage: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class SavedPair:
    body: dict[str, Any]  # as it was sent, with the seed that was used
    answer: Answer
    model: str
    fingerprint: str | None

    @property
    def is_chat(self) -> bool:
        return "messages" in self.body

    @property
    def asked(self) -> frozenset[str]:
        """Fields of every choice that the request asks for, so that the answer had them."""
        asked = {name for name in ("logprobs", "prompt_logprobs") if self.body.get(name) is not None}
        if self.is_chat and self.body.get("logprobs") is not True:  # there it is a switch
            asked.discard("logprobs")
        return frozenset(asked | ({"token_ids", "prompt_token_ids"} if self.body.get("return_token_ids") else set()))


@dataclass(frozen=True, slots=True)
class AuditRecord:
    values: dict[str, Any]
    choice: int
    output: Output  # what was sent
    rerun: tuple[int, ...]  # the ids that the audit got
    model: str
    fingerprint: str | None


def read_record(path: Path) -> SavedPair | AuditRecord:
    """From a regular file, or standard input for ``-``. Raises CommandError with one line that says what is wrong."""
    try:
        value = parse_json(read_file(path, MAX_BYTES))
    except OSError as error:
        raise CommandError(f"cannot read the record {path}: {error.strerror or error}") from error
    except ForeignError as error:
        raise CommandError(f"the record {path} {error}") from error
    try:
        if not isinstance(value, dict):
            raise BadRecord("it must be an object")
        return _audit(value) if "kind" in value else _pair(value)
    except BadRecord as error:
        raise CommandError(f"the record {path} cannot be replayed: {error}") from error


def _pair(value: dict[str, Any]) -> SavedPair:
    body, response = value.get("request"), value.get("response")
    if not isinstance(body, dict):
        raise BadRecord('it needs "request", the body that was sent, and "response", the answer')
    pieces: list[Any] = response if isinstance(response, list) else [response]
    if not pieces or not all(isinstance(piece, dict) for piece in pieces):
        raise BadRecord("its response must be the answer, or the list of a stream's chunks")
    failed = next((piece["error"] for piece in pieces if "error" in piece), None)
    if failed is not None:
        message = failed.get("message") if isinstance(failed, dict) else failed
        raise BadRecord(f"its response is an error: {shown(message)}")
    answer = read_answer(pieces, chat="messages" in body)
    if not answer.outputs:
        raise BadRecord("its response has no choices")
    model = _said(pieces, "model") or body.get("model")
    if not isinstance(model, str):
        raise BadRecord("it does not say the model")
    fingerprint = _said(pieces, "system_fingerprint")
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise BadRecord(f"its system_fingerprint must be a text, got {shown(fingerprint)}")
    return SavedPair(_with_seed(body, value, pieces), answer, model, fingerprint)


def _with_seed(body: dict[str, Any], value: Mapping[str, Any], pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    said = _said(pieces, "seed")
    seed = next((seed for seed in (body.get("seed"), said, value.get("seed")) if seed is not None), None)
    if seed is None:
        if body.get("temperature") != 0:
            raise BadRecord('it does not say the seed; add the answer\'s header X-Seed as "seed"')
        seed = 0  # greedy: any will do
    if said is not None and said != seed:
        raise BadRecord(f"its request has the seed {shown(seed)}, its response {shown(said)}")
    return {**body, "seed": seed}


def read_answer(pieces: Sequence[Mapping[str, Any]], *, chat: bool) -> Answer:
    """Of a whole answer, or of a stream's chunks in order. Raises BadRecord."""
    parts: dict[int, list[Mapping[str, Any]]] = {}
    usage = None
    for piece in pieces:
        choices = piece.get("choices")
        if not isinstance(choices, list):
            raise BadRecord("a part of its response has no choices")
        for choice in choices:
            index = choice.get("index") if isinstance(choice, dict) else None
            if not isinstance(index, int) or isinstance(index, bool):
                raise BadRecord("a choice of its response has no index")
            parts.setdefault(index, []).append(choice)
        usage = piece["usage"] if piece.get("usage") is not None else usage
    if usage is not None and not isinstance(usage, dict):
        raise BadRecord(f"its usage must be an object, got {shown(usage)}")
    join = join_chat if chat else join_completion
    outputs = {index: join(index, parts[index]) for index in sorted(parts)}
    return Answer(outputs, None if usage is None else {name: usage[name] for name in USAGE if name in usage})


def _audit(value: dict[str, Any]) -> AuditRecord:
    if value["kind"] != AUDIT_KIND or value.get("version") != AUDIT_VERSION:
        found = f"{shown(value['kind'])!r}, version {shown(value.get('version'))}"
        raise BadRecord(f"it is of the kind {found}; known is {AUDIT_KIND!r}, version {AUDIT_VERSION}")
    kinds: dict[str, tuple[type, ...]] = {
        "token_ids": (list,), "rerun_token_ids": (list,), "prompt_token_ids": (list,), "stop": (list,),
        "params": (dict,), "choice": (int,), "model": (str,), "system_fingerprint": (str, type(None)),
        "finish_reason": (str,), "include_stop_str_in_output": (bool,), "skip_special_tokens": (bool,),
    }  # fmt: skip
    for name, kind in kinds.items():
        if name not in value:
            raise BadRecord(f"a field is missing: {name}")
        if not isinstance(value[name], kind):
            raise BadRecord(f"a field is wrong: {name} is {shown(value[name])}")
        items: type = str if name == "stop" else int
        wrong = [item for item in value[name] if type(item) is not items] if isinstance(value[name], list) else []
        if wrong:
            raise BadRecord(f"a field is wrong: {name} holds {shown(wrong[0])}")
    return AuditRecord(
        values=value,
        choice=int(value["choice"]),
        output={name: value[name] for name in ("token_ids", "finish_reason", "stop_reason") if name in value},
        rerun=tuple(value["rerun_token_ids"]),
        model=value["model"],
        fingerprint=value["system_fingerprint"],
    )


def _said(pieces: Sequence[Mapping[str, Any]], name: str) -> Any:
    """What every part says that says anything; None if none does."""
    said = [piece[name] for piece in pieces if piece.get(name) is not None]
    other = next((value for value in said if value != said[0]), None)
    if other is not None:
        raise BadRecord(f"the parts of its response have the {name} {shown(said[0])} and {shown(other)}")
    return said[0] if said else None
