"""A server for the tests of what stands around one: it is as the wire's tests have it."""

from __future__ import annotations

from tests.server.conftest import base, model_home, service, tiny_model

__all__ = ["base", "model_home", "service", "tiny_model"]
