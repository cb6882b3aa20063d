"""What the scripts of this package share: the server, and the client program that is run against it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from model.source import resolve_model

NAME = "model"  # what the server calls it


class ClientFailed(RuntimeError):
    """The client ended with an error, or did not say what it should; the message holds its last lines."""


def options(description: str, program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--program", default=program, help=f"the client: {program} on the PATH, or a path to it")
    parser.add_argument("--model", default="default", help="as `truedraft serve --model` takes it")
    parser.add_argument("--out", type=Path, default=Path("client-out"), help="folder for what it leaves")
    return parser


def server_flags(model: str) -> list[str]:
    return ["--model", model, "--served-model-name", NAME, "--max-model-len", "2048"]


def tokenizer_folder(model: str) -> str:
    """The model's own tokenizer as a folder: nothing has to be fetched."""
    path = resolve_model(model).path
    return str(path if path.is_dir() else path.parent)


def run_client(program: str, arguments: Sequence[str], log: Path, *, offline: bool = True, timeout: float = 900) -> str:
    """What it printed, also in ``log``. Raises ClientFailed."""
    found = shutil.which(program)
    if found is None:
        raise ClientFailed(f"there is no program {program}; docs/clients.md says how to install it")
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "160", "TOKENIZERS_PARALLELISM": "false"}
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        environment.pop(name, None)
        if offline:
            environment[name] = "1"
    with log.open("wb") as out:
        ended = subprocess.run(
            [found, *arguments], stdout=out, stderr=subprocess.STDOUT, env=environment, timeout=timeout, check=False
        )
    text = log.read_text("utf-8", errors="replace")
    if ended.returncode != 0:
        tail = "\n".join(text.splitlines()[-15:])
        raise ClientFailed(f"{program} ended with exit code {ended.returncode}:\n{tail}")
    return text


def fail(error: ClientFailed) -> int:
    print(error, file=sys.stderr)
    return 1
