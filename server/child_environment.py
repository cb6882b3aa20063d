"""What the server's own child processes see of its environment: everything but secrets."""

from __future__ import annotations

from collections.abc import Mapping

from server.settings import ENV_PREFIX, SECRETS

# What only the wire's side needs to know, or a client: the key of ``truedraft top``, and that of who receives traces.
_HIDDEN = frozenset(
    (
        *(f"{ENV_PREFIX}{name.upper()}" for name in (*SECRETS, "api_keys", "api_key")),
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    )
)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.upper() not in _HIDDEN}
