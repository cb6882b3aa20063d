"""Writes every board as JSON, into deploy/grafana/dashboards or the folder that is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deploy.grafana.boards.board import Board
from deploy.grafana.boards.equivalence import EQUIVALENCE
from deploy.grafana.boards.kv_cache import KV_CACHE
from deploy.grafana.boards.service import SERVICE
from deploy.grafana.boards.speculation import SPECULATION

BOARDS: tuple[Board, ...] = (SERVICE, SPECULATION, KV_CACHE, EQUIVALENCE)
FOLDER = Path(__file__).parents[1] / "dashboards"


def write_boards(folder: Path) -> None:
    for board in BOARDS:
        (folder / f"{board.name}.json").write_text(json.dumps(board.json(), indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    write_boards(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
