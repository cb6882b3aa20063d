"""Settings of programs that need the engine in their own process."""

from __future__ import annotations

from server.settings import Settings, SettingsError


def with_engine_here(settings: Settings, why: str) -> Settings:
    """``settings`` without an engine's process. Raises SettingsError with ``why`` if they ask for one."""
    if settings.engine_process and "engine_process" in settings.model_fields_set:
        raise SettingsError(f"engine_process cannot be on: {why}")
    return settings.model_copy(update={"engine_process": False})
