"""Traces of requests, made of what is known when one is over. Only spans.py and export.py know OpenTelemetry."""
