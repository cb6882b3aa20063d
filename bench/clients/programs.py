"""What the scripts of this package share: the server, and the client program that is run against it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from model.source import resolve_model

NAME = "model"  # what the server calls it


class ClientFailed(RuntimeError):
    """The client ended with an error, or did not say what it should; the message holds its last lines."""


def options(description: str, program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--program", default=program, help=f"the client: {program} on the PATH, or a path to it")
    parser.add_argument("--model", default="default", help="as `truedraft serve --model` takes it")
    parser.add_argument("--out", type=Path, default=Path("client-out"), help="folder for what it leaves")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one run of the client may take")
    return parser


def server_flags(model: str) -> list[str]:
    return ["--model", model, "--served-model-name", NAME, "--max-model-len", "2048"]


def tokenizer_folder(model: str) -> str:
    """The model's own tokenizer as a folder: nothing has to be fetched."""
    path = resolve_model(model).path
    return str(path if path.is_dir() else path.parent)


def run_client(program: str, arguments: Sequence[str], log: Path, *, timeout: float, offline: bool = True) -> str:
    """What it printed, also in ``log``; ``timeout`` is in seconds. Raises ClientFailed."""
    found = shutil.which(program)
    if found is None:
        raise ClientFailed(f"there is no program {program}; docs/clients.md says how to install it")
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "160", "TOKENIZERS_PARALLELISM": "false"}
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        environment.pop(name, None)
        if offline:
            environment[name] = "1"
    with log.open("wb") as out:
        try:
            ended = subprocess.run(
                [found, *arguments], stdout=out, stderr=subprocess.STDOUT, env=environment, timeout=timeout, check=False
            )
            why = f"ended with exit code {ended.returncode}" if ended.returncode else None
        except subprocess.TimeoutExpired:
            why = f"did not end within {timeout:g} seconds (--timeout)"
    text = log.read_text("utf-8", errors="replace")
    if why is not None:
        tail = "\n".join(text.splitlines()[-15:])
        raise ClientFailed(f"{program} {why}:\n{tail}")
    return text


def accepted_drafts(url: str) -> int:
    """How many draft tokens the server has accepted since its start."""
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    values = re.findall(r"^truedraft_spec_decode_num_accepted_tokens_total\S* (\S+)$", text, re.MULTILINE)
    if not values:
        raise ClientFailed("the server does not say how many draft tokens it accepted")
    return int(sum(map(float, values)))


def fail(error: ClientFailed) -> int:
    print(error, file=sys.stderr)
    return 1
