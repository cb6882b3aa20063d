"""Options of short runs, and what they leave behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.serving.options import Load, Options, Size, parse_mode, parse_slo, parse_target

PROMPTS = ("one two three", "the quick brown fox", "Hello, world!", "0 1 2 3 4 5", "a b", "c d", "e f", "g h")


def silent(line: str) -> None:
    pass


def report_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text("utf-8"))
    return found


def quick_options(
    folder: Path,
    *targets: str,
    modes: Sequence[str] = ("off",),
    rounds: int = 1,
    loads: Sequence[Load] = (Load(seats=2),),
    slos: Sequence[str] = (),
    tokens: int = 6,
    requests: int = 4,
    temperature: float = 0.0,
    chat: bool = False,
) -> Options:
    """Four requests a round out of eight prompts."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(text) + "\n" for text in PROMPTS), "utf-8")
    return Options(
        workloads=(),
        prompts=prompts,
        loads=tuple(loads),
        modes=tuple(map(parse_mode, modes)),
        slos=tuple(map(parse_slo, slos)),
        size=Size(
            rounds=rounds,
            tokens=tokens,
            requests=requests,
            temperature=temperature,
            seed=0,
            ignore_eos=True,
            chat=chat,
            timeout=60.0,
        ),
        targets=tuple(map(parse_target, targets)),
        served_model=None,
        api_key_env="",
        block_sizes=(),
        serve_flags=(),
        nice=5,
        folder=folder,
        command="truedraft bench",
    )
