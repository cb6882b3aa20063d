"""The model of a benchmark that runs it without a server: flags as those of serve, and loading what they name."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from model.errors import ModelError
from model.loader import LoadedModel
from model.opening import open_model
from model.source_error import ModelSourceError

MAX_BATCHED_TOKENS = 512  # rows of a step, as a server has them by default


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="as for serve (default: the default model)")
    parser.add_argument("--kernels", choices=["auto", "torch"], default="auto", help="as for serve")
    parser.add_argument("--threads", type=int, metavar="N", help="as serve --num-threads")


def open_chosen(program: str, options: argparse.Namespace) -> tuple[LoadedModel, Path] | None:
    """The model of ``add_model_flags`` and its folder. None if it cannot be loaded: a line on stderr says why."""
    try:
        return open_model(
            options.model,
            lambda line: print(f"{program}: {line}", file=sys.stderr),
            dtype="auto",
            device="cpu",
            executor="auto",
            kernels=options.kernels,
            num_threads=options.threads,
            max_batched_tokens=MAX_BATCHED_TOKENS,
        )
    except (ModelError, ModelSourceError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return None
