"""What /docs and /openapi.json say: each body, answer and error of an operation, declared beside its route."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from server.fields import ID
from server.resolve import ModelFacts
from server.shapes import ErrorAnswer

_REASONS = {
    400: "A parameter or the body is wrong; `param` names it",
    401: "There is no valid API key",
    404: "There is no such model or path",
    405: "The path does not take this method",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is not plain JSON",
    429: "More than the API key may use; see `Retry-After`",
    500: "The server failed",
    503: "The server takes no requests now; see `Retry-After`",
    504: "The answer was not complete within the request's `timeout`",
}
OPEN = (500,)  # of what needs no API key
ANY = (401, 500)
POST = (400, 401, 404, 408, 413, 415, 429, 500, 503)
GENERATING = (*POST, 504)
_SCHEMAS = "#/components/schemas/"


def describe(
    answer: type[BaseModel] | None,
    *,
    body: type[BaseModel] | Iterable[type[BaseModel]] | None = None,
    refused: Collection[str] = (),
    chunk: type[BaseModel] | None = None,
    text: str | None = None,
    errors: Iterable[int] = ANY,
    facts: ModelFacts | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a route.

    ``answer`` is the JSON answer's shape, ``text`` the media type of one that is no JSON, ``chunk`` the shape of an
    event of a streamed one. ``body`` is what the body may be, one or the other; ``refused``: its fields that are
    refused unless they are null. With ``facts`` it says what this model takes.
    """
    content: dict[str, Any] = {} if text is None else {text: {"schema": {"type": "string"}}}
    if chunk is not None:
        content["text/event-stream"] = {"itemSchema": _event_schema(chunk)}
    ok: dict[str, Any] = {"description": "OK"} | ({"content": content} if content else {})
    if answer is not None:
        ok["model"] = answer
    responses: dict[int | str, dict[str, Any]] = {200: ok}
    for status in errors:
        responses[status] = {"model": ErrorAnswer, "description": _REASONS[status]}
    described: dict[str, Any] = {"responses": responses}
    if body is not None:
        bodies = (body,) if isinstance(body, type) else tuple(body)
        schemas = [_body_schema(each, refused, facts) for each in bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        described["openapi_extra"] = {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        }
    return described


def _event_schema(chunk: type[BaseModel]) -> dict[str, Any]:
    """Of one server-sent event: a chunk, an error after the 200, or the end."""
    shapes = [{"$ref": _SCHEMAS + shape.__name__} for shape in (chunk, ErrorAnswer)]
    data = {"contentMediaType": "application/json", "contentSchema": {"anyOf": shapes}}
    return {
        "type": "object",
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }


def _body_schema(body: type[BaseModel], refused: Collection[str], facts: ModelFacts | None) -> dict[str, Any]:
    """Its fields may be null where they may be left out: a null stands for the default."""
    schema: dict[str, Any] = json.loads(_schema_of(body))
    if facts is not None:
        _narrow(schema["properties"], facts)
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
            notes = {key: field.pop(key) for key in ("title", "default", "description") if key in field}
            schema["properties"][name] = {"anyOf": [dict(field), {"type": "null"}], **notes}
    schema["properties"] |= {name: {"type": "null", "description": "Not supported"} for name in refused}
    return schema


@functools.cache
def _schema_of(body: type[BaseModel]) -> str:
    """JSON, as each app changes its own. Made once: it takes a good part of the time that an app does."""
    return json.dumps(body.model_json_schema())


def _narrow(fields: dict[str, dict[str, Any]], facts: ModelFacts) -> None:
    fields["model"] = {"type": "string", "enum": list(facts.names)}
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        for kind in _kinds(fields.get(name, {})):
            if kind.get("type") == "integer":
                kind["maximum"] = facts.max_model_len - 1
    ids = {"prompt": facts.embedding_rows, "tokens": facts.embedding_rows}
    ids |= dict.fromkeys(("stop_token_ids", "allowed_token_ids"), facts.vocab_size)
    for name, rows in ids.items():
        if name in fields:
            fields[name] = _with_most(fields[name], rows - 1)
    for kind in _kinds(fields.get("allowed_token_ids", {})):
        if kind.get("type") == "array":
            kind |= {"minItems": 1, "maxItems": facts.vocab_size}


def _with_most(schema: Any, most: int) -> Any:
    """``schema`` with so much as the largest id wherever it has one."""
    if isinstance(schema, dict):
        if schema == ID:
            return {**schema, "maximum": most}
        return {name: _with_most(inner, most) for name, inner in schema.items()}
    return [_with_most(inner, most) for inner in schema] if isinstance(schema, list) else schema


def _kinds(field: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a field."""
    kinds: list[dict[str, Any]] = field.get("anyOf", [field])
    return kinds


def install(app: FastAPI, chunks: Iterable[type[BaseModel]] = (), *, keys: bool = False) -> None:
    """Make ``app`` serve this description. ``chunks``: shapes no answer refers to. ``keys``: there are API keys."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            for chunk in chunks:
                made["components"]["schemas"][chunk.__name__] = chunk.model_json_schema()
            app.openapi_schema = _tidy(made)
            if keys:
                _ask_for_keys(app.openapi_schema)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _tidy(document: dict[str, Any]) -> dict[str, Any]:
    """Definitions in one place, and nothing of FastAPI's own validation, which answers in our form."""
    document = json.loads(json.dumps(document).replace('"#/$defs/', f'"{_SCHEMAS}'))
    components = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    _collect(document, components)
    return document


def _ask_for_keys(document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for operations in document["paths"].values():
        for operation in operations.values():
            if "401" in operation["responses"]:
                operation["security"] = [{"key": []}]


def _collect(value: Any, components: dict[str, Any]) -> None:
    if isinstance(value, dict):
        definitions = value.pop("$defs", {})
        for name, definition in definitions.items():
            components.setdefault(name, definition)
            _collect(definition, components)
        if "$ref" in value and len(value) > 1:  # what FastAPI took from the annotation says less
            for key in [key for key in value if key != "$ref"]:
                del value[key]
        for each in list(value.values()):
            _collect(each, components)
    elif isinstance(value, list):
        for each in value:
            _collect(each, components)
