"""What a server would make of a container's environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from server.auth.keys import KEYS_VARIABLE
from server.run import END_SECONDS, ENGINE_SECONDS
from server.settings import ENV_PREFIX, Settings, load_settings

# Read by others than the settings (docs/settings.md).
OTHERS = {f"{ENV_PREFIX}HOME", KEYS_VARIABLE}


def settings_of(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Raises AssertionError for a variable that nobody reads, SettingsError for a value that cannot be."""
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields} | OTHERS
    assert {name for name in environment if name.startswith(ENV_PREFIX)} <= known
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return load_settings()


def seconds_to_end(settings: Settings) -> float:
    """Most that a server takes from SIGTERM to its exit."""
    return settings.shutdown_timeout + ENGINE_SECONDS + END_SECONDS
