"""What /v1/server_info says, checked: the one place that trusts nothing of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.foreign import ForeignError, parse_json, shown

LEVELS = ("L0", "L2")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What preflight needs of it; every text is fit for a terminal."""

    model: str
    served_name: str | None  # what a request calls the model; exact, never shown
    level: str
    detail: str
    audit_rate: float | None  # None: the server has no such setting


def read_server_info(body: bytes) -> ServerInfo:
    """Raises ForeignError with the field that is not that of a Truedraft server."""
    try:
        value = parse_json(body)
    except ForeignError as error:
        raise ForeignError(f"is not that of a Truedraft server: it {error}") from error
    return server_info(value)


def server_info(value: Any) -> ServerInfo:
    """As ``read_server_info``, of what the JSON holds."""
    if not isinstance(value, dict) or not isinstance(value.get("exactness"), dict):
        raise ForeignError("is not that of a Truedraft server: it has no object named exactness")
    exactness, model, settings = value["exactness"], _object(value, "model"), _object(value, "settings")
    level = exactness.get("level")
    if level not in LEVELS:
        raise _wrong("exactness.level", "L0 or L2", level)
    names = model.get("served_names")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise _wrong("model.served_names", "a list of names", names)
    return ServerInfo(
        model=shown(_text(model, "model.name", "unknown model")),
        served_name=names[0] if names else None,
        level=level,
        detail=shown(_text(exactness, "exactness.detail", "")),
        audit_rate=_share(settings, "settings.audit_rate"),
    )


def _object(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = value.get(name)
    if found is not None and not isinstance(found, dict):
        raise _wrong(name, "an object", found)
    return found or {}


def _text(value: Mapping[str, Any], path: str, default: str) -> str:
    found = value.get(path.rpartition(".")[2])
    if found is not None and not isinstance(found, str):
        raise _wrong(path, "a text", found)
    return default if found is None else found


def _share(value: Mapping[str, Any], path: str) -> float | None:
    found = value.get(path.rpartition(".")[2])
    if found is None:
        return None
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= 1:
        raise _wrong(path, "a number from 0 to 1", found)
    return float(found)


def _wrong(path: str, wanted: str, found: object) -> ForeignError:
    return ForeignError(f"is not that of a Truedraft server: {path} must be {wanted}, got {shown(found, 60)}")
