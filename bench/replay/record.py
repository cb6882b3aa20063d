"""What a user saved, read strictly: a request with its answer, or the record of an audit.

A saved pair::

    {"request": <body of POST /v1/completions>, "response": <the answer, or the list of a stream's chunks>,
     "seed": <the header X-Seed, if no part of the response has a seed>}

An audit's record has ``"kind": "truedraft.audit"`` (server.audits writes it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.commands import CommandError

AUDIT_KIND = "truedraft.audit"
AUDIT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Output:
    """One choice of an answer, as far as it is known."""

    text: str | None
    token_ids: tuple[int, ...] | None  # None: the answer does not hold them (return_token_ids was off)
    finish_reason: str | None
    logprobs: tuple[float | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class SavedPair:
    body: dict[str, Any]  # as it was sent, with the seed that was used
    outputs: dict[int, Output]  # by index
    model: str
    fingerprint: str | None


@dataclass(frozen=True, slots=True)
class AuditRecord:
    values: dict[str, Any]
    output: Output  # what was sent
    rerun: Output  # what the audit got
    model: str
    fingerprint: str | None


def read_record(path: Path) -> SavedPair | AuditRecord:
    """Raises CommandError with one line that says what is wrong with the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CommandError(f"cannot read the record {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CommandError(f"the record {path} is not JSON: {' '.join(str(error).split())}") from error
    try:
        if not isinstance(value, dict):
            raise _Bad("it must be an object")
        return _audit(value) if "kind" in value else _pair(value)
    except _Bad as error:
        raise CommandError(f"the record {path} cannot be replayed: {error}") from error


class _Bad(Exception):
    pass


def _pair(value: dict[str, Any]) -> SavedPair:
    body, response = value.get("request"), value.get("response")
    if not isinstance(body, dict):
        raise _Bad('it needs "request", the body that was sent, and "response", the answer')
    pieces: list[Any] = response if isinstance(response, list) else [response]
    if not pieces or not all(isinstance(piece, dict) for piece in pieces):
        raise _Bad("its response must be the answer, or the list of a stream's chunks")
    failed = next((piece["error"] for piece in pieces if "error" in piece), None)
    if failed is not None:
        message = failed.get("message") if isinstance(failed, dict) else failed
        raise _Bad(f"its response is an error: {str(message)[:200]}")
    outputs = _outputs(pieces)
    if not outputs:
        raise _Bad("its response has no choices")
    model = _first(pieces, "model") or body.get("model")
    if not isinstance(model, str):
        raise _Bad("it does not say the model")
    fingerprint = _first(pieces, "system_fingerprint")
    return SavedPair(_with_seed(body, value, pieces), outputs, model, fingerprint)


def _with_seed(body: dict[str, Any], value: Mapping[str, Any], pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    said = _first(pieces, "seed")
    seed = next((seed for seed in (body.get("seed"), said, value.get("seed")) if seed is not None), None)
    if seed is None:
        if body.get("temperature") != 0:
            raise _Bad('it does not say the seed; add the answer\'s header X-Seed as "seed"')
        seed = 0  # greedy: any will do
    if said is not None and said != seed:
        raise _Bad(f"its request has the seed {seed}, its response {said}")
    return {**body, "seed": seed}


def _outputs(pieces: Sequence[Mapping[str, Any]]) -> dict[int, Output]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for piece in pieces:
        choices = piece.get("choices")
        if not isinstance(choices, list):
            raise _Bad("a part of its response has no choices")
        for choice in choices:
            if not isinstance(choice, dict) or not isinstance(choice.get("index"), int):
                raise _Bad("a choice of its response has no index")
            found.setdefault(choice["index"], []).append(choice)
    return {index: read_choice(parts) for index, parts in sorted(found.items())}


def read_choice(parts: Sequence[Mapping[str, Any]]) -> Output:
    """A choice out of an answer's, or out of the chunks that hold it, in order."""
    try:
        ids = [part.get("token_ids") for part in parts]
        logprobs = [part.get("logprobs") for part in parts]
        return Output(
            text="".join(part["text"] for part in parts),
            token_ids=None if None in ids else tuple(token for some in ids if some is not None for token in some),
            finish_reason=parts[-1].get("finish_reason"),
            logprobs=(
                None
                if None in logprobs
                else tuple(entry for some in logprobs if some is not None for entry in some["token_logprobs"])
            ),
        )
    except (KeyError, TypeError) as error:
        raise _Bad(f"a choice of its response lacks a field or has a wrong one ({error})") from error


def _audit(value: dict[str, Any]) -> AuditRecord:
    if value["kind"] != AUDIT_KIND or value.get("version") != AUDIT_VERSION:
        found = f"{value['kind']!r}, version {value.get('version')!r}"
        raise _Bad(f"it is of the kind {found}; known is {AUDIT_KIND!r}, version {AUDIT_VERSION}")
    try:
        return AuditRecord(
            values=value,
            output=Output(None, tuple(map(int, value["token_ids"])), value["finish_reason"]),
            rerun=Output(None, tuple(map(int, value["rerun_token_ids"])), value["rerun_finish_reason"]),
            model=str(value["model"]),
            fingerprint=value["system_fingerprint"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _Bad(f"a field is missing or wrong ({error})") from error


def _first(pieces: Sequence[Mapping[str, Any]], name: str) -> Any:
    return next((piece[name] for piece in pieces if piece.get(name) is not None), None)
