"""Tracing as the settings want it. OpenTelemetry is imported here, if at all."""

from __future__ import annotations

import logging

from server.settings import Settings
from server.start_error import StartError
from server.tracing.tracing import Tracing


def start_tracing(settings: Settings) -> Tracing | None:
    """None, and nothing imported, without ``otlp_endpoint``. Raises StartError."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from server.tracing.export import TraceExporter

        tracing = Tracing(TraceExporter(settings.otlp_endpoint))
    except ImportError as error:
        raise StartError(
            f"otlp_endpoint needs OpenTelemetry, which is not installed: pip install 'truedraft[otel]' ({error})"
        ) from None
    except Exception as error:  # what its environment variables say cannot be used
        message = " ".join(str(error).split())
        raise StartError(f"OpenTelemetry cannot be set up ({type(error).__name__}: {message[:200]})") from None
    # From here on it would say of every batch that it cannot be sent, and of every header what a client got wrong.
    logging.getLogger("opentelemetry").setLevel("CRITICAL")
    return tracing
