"""What people read of the settings: their flags for the command line, and the page docs/settings.md."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from server.settings import ENV_PREFIX, Settings


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def is_switch(info: FieldInfo) -> bool:
    return info.annotation is bool


def choices_of(info: FieldInfo) -> tuple[str, ...] | None:
    return get_args(info.annotation) if get_origin(info.annotation) is Literal else None


def default_text(info: FieldInfo) -> str:
    """The default as a person would write it."""
    if info.default is None or info.default == ():
        return "unset"
    if isinstance(info.default, bool):
        return "on" if info.default else "off"
    return str(info.default)


def settings_markdown() -> str:
    """docs/settings.md, whole."""
    lines = [
        "# Settings",
        "",
        "Each setting is a flag of `truedraft serve`, an environment variable, or a line of the file that `--config`",
        "names (TOML or YAML). A flag wins over the environment, the environment over the file, the file over the",
        "default. A switch is turned off by `--no-` and its name. This page is made from the code:",
        "`python -m server.setting_flags > docs/settings.md`.",
        "",
        "| flag | environment | default | meaning |",
        "|---|---|---|---|",
    ]
    for field, info in Settings.model_fields.items():
        choices = choices_of(info)
        meaning = (info.description or "") + (f" One of: {', '.join(f'`{c}`' for c in choices)}." if choices else "")
        lines.append(f"| `{flag_name(field)}` | `{ENV_PREFIX}{field.upper()}` | `{default_text(info)}` | {meaning} |")
    lines += [
        "",
        f"`{ENV_PREFIX}HOME` is the folder for fetched models and built kernels (by default `truedraft` in the user's",
        f"cache folder); it is no setting of the server alone, so it has no flag. `{ENV_PREFIX}KERNELS` (`torch` or",
        "`off`) holds for the other commands too.",
        "",
        f"`{ENV_PREFIX}API_KEYS` holds API keys as `name:key,name:key`, beside those of `--api-keys-file`. It has no",
        "flag: everybody on the machine sees the flags of a process.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(settings_markdown(), end="")
