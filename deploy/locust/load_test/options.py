"""What a run does: the flags, checked."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .prompts import OWN_PROMPTS, PromptMix, load_prompts, parse_classes
from .slo import Objective, parse_objectives


@dataclass(frozen=True, slots=True)
class Options:
    """Made by ``read_options`` alone. Times are seconds."""

    chat: bool
    model: str
    rate: float  # of each user; 0: closed loop
    arrivals: str
    think_time: float
    mix: PromptMix
    prompt_tokens: int  # 0: as they are
    output_tokens: tuple[int, int]  # least, most
    natural_end: bool
    temperature: float
    seed: int
    num_speculative_tokens: int | None  # None: the server decides
    sharing: bool
    cancel: float
    honour_retry_after: bool
    plain_openai: bool
    request_timeout: float
    api_key: str
    warm_up: float
    steps: tuple[int, ...]
    step_seconds: float
    metrics_urls: tuple[str, ...] | None  # None: not asked; empty: the host's
    metrics_prefix: str
    objectives: tuple[Objective, ...]
    report: Path | None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def read_options(parsed: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Options:
    """From the values of FLAGS by name. Raises ValueError, one line that names the flag."""
    least_most = _range(str(parsed["output_tokens"]))
    prompts = load_prompts(Path(parsed["prompts"]) if parsed["prompts"] else OWN_PROMPTS)
    options = Options(
        chat=parsed["endpoint"] == "chat",
        model=parsed["model"].strip(),
        rate=_number(parsed, "rate", 0, 1e5),
        arrivals=parsed["arrivals"],
        think_time=_number(parsed, "think_time", 0, 86400),
        mix=PromptMix(prompts, parse_classes(parsed["classes"], tuple(prompts))),
        prompt_tokens=_whole(parsed, "prompt_tokens", 10**7),
        output_tokens=least_most,
        natural_end=parsed["natural_end"],
        temperature=_number(parsed, "temperature", 0, 2),
        seed=_whole(parsed, "seed", 2**53),
        num_speculative_tokens=_speculation(parsed["speculation"]),
        sharing=parsed["sharing"] == "all",
        cancel=_number(parsed, "cancel", 0, 1),
        honour_retry_after=not parsed["no_retry_after"],
        plain_openai=parsed["plain_openai"],
        request_timeout=_number(parsed, "request_timeout", 0.001, 86400),
        api_key=environment.get(parsed["api_key_env"], "").strip(),
        warm_up=_number(parsed, "warm_up", 0, 86400),
        steps=_steps(parsed["steps"]),
        step_seconds=_number(parsed, "step_seconds", 1, 86400),
        metrics_urls=_urls(parsed["metrics_urls"]),
        metrics_prefix=parsed["metrics_prefix"],
        objectives=parse_objectives(parsed["slo"]),
        report=Path(parsed["report"]) if parsed["report"] else None,
    )
    if options.prompt_tokens and (options.chat or options.plain_openai):
        raise ValueError("--prompt-tokens sends token ids: it goes with --endpoint completions, without --plain-openai")
    if options.plain_openai and options.num_speculative_tokens is not None:
        raise ValueError("--speculation is a field beyond OpenAI's API: it does not go with --plain-openai")
    if options.steps and options.warm_up >= options.step_seconds:
        raise ValueError(f"--warm-up must be shorter than --step-seconds; it is {options.warm_up:g}")
    return options


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(parsed: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value = float(parsed[name])
    if not least <= value <= most:  # so that NaN is refused, too
        raise ValueError(f"{_flag(name)} must be in {least:g}..{most:g}; it is {value:g}")
    return value


def _whole(parsed: Mapping[str, Any], name: str, most: float) -> int:
    value = _number(parsed, name, 0, most)
    if value != math.floor(value):
        raise ValueError(f"{_flag(name)} must be a whole number; it is {value:g}")
    return int(value)


def _range(text: str) -> tuple[int, int]:
    least, _, most = (part.strip() for part in text.partition("-"))
    most = most or least
    if not (least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        raise ValueError(f"--output-tokens must be a number from 1 on, or a range such as 16-128; it is {text!r}")
    return int(least), int(most)


def _speculation(text: str) -> int | None:
    if text in ("server", "off"):
        return None if text == "server" else 0
    if not text.isdigit():
        raise ValueError(f"--speculation must be server, off or a number of draft tokens; it is {text!r}")
    return int(text)


def _steps(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--steps must be numbers of users such as 1,2,4,8; it is {text!r}")
    return tuple(map(int, parts))


def _urls(text: str) -> tuple[str, ...] | None:
    if text.strip() == "none":
        return None
    urls = tuple(part.strip() for part in text.split(",") if part.strip())
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--metrics-urls must be http:// or https:// URLs, or none; one is {url!r}")
    return urls
