"""``otlp_endpoint``: what it takes, and the one line if it cannot be used."""

from __future__ import annotations

import sys

import pytest

from server.settings import SettingsError, load_settings
from server.start_error import StartError
from server.tracing.start import start_tracing

HERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    "value",
    ["http://collector:4318", "https://host.example/otlp/v1/traces", "http://[::1]:4318", "http://10.0.0.1"],
)
def test_addresses_of_receivers_are_taken(value: str) -> None:
    assert load_settings({"otlp_endpoint": value}).otlp_endpoint == value


@pytest.mark.parametrize(
    "value", ["collector:4318", "grpc://collector:4317", "http://", "http://me:secret@host", "http://a b", "http://h?x"]
)
def test_others_are_one_line_that_names_the_setting(value: str) -> None:
    with pytest.raises(SettingsError, match=r"^otlp_endpoint = .*write it as http://collector:4318") as caught:
        load_settings({"otlp_endpoint": value})
    assert "\n" not in str(caught.value)


def test_without_the_packages_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "server.tracing.export", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartError, match=r"otlp_endpoint needs OpenTelemetry.*pip install 'truedraft\[otel\]'"):
        start_tracing(load_settings({"otlp_endpoint": HERE}))


def test_a_variable_that_cannot_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")
    with pytest.raises(StartError, match=r"OpenTelemetry cannot be set up.*OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"):
        start_tracing(load_settings({"otlp_endpoint": HERE}))
