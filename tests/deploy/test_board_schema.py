"""The boards hold to Grafana's own types: a setting that it does not know would be ignored there."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy import boards

SCHEMAS = Path(__file__).parent / "schemas" / "grafana"
SCHEMA = json.loads((SCHEMAS / "board.json").read_text("utf-8"))
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


@pytest.mark.parametrize("name", boards.NAMES)
def test_a_board_is_one_that_grafana_takes(name: str) -> None:
    found = [(list(error.absolute_path), error.message[:200]) for error in VALIDATOR.iter_errors(boards.board(name))]
    assert found == []


def first(board: dict[str, Any], kind: str) -> Any:
    return next(panel for panel in board["panels"] if panel["type"] == kind)


def custom(board: dict[str, Any]) -> Any:
    return first(board, "timeseries")["fieldConfig"]["defaults"]["custom"]


FAULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a kind of panel that there is not": lambda board: first(board, "stat").update(type="number"),
    "an option of another panel": lambda board: first(board, "stat")["options"].update(mergeValues=True),
    "an option that is missing": lambda board: first(board, "timeseries")["options"].pop("legend"),
    "a word that is none of an option's": lambda board: first(board, "stat")["options"].update(colorMode="alarm"),
    "a field setting that there is not": lambda board: custom(board).update(thickness=1),
    "a text for a number": lambda board: first(board, "stat")["gridPos"].update(w="3"),
    "a setting of the board that there is not": lambda board: board.update(period="10s"),
    "a variable of no kind": lambda board: board["templating"]["list"][1].update(type="label"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_schema_refuses(fault: str) -> None:
    board = copy.deepcopy(boards.board("service"))
    FAULTS[fault](board)
    assert not VALIDATOR.is_valid(board)


def test_every_kind_of_panel_on_the_boards_has_its_own_part_of_the_schema() -> None:
    source = (SCHEMAS / "board.ts").read_text("utf-8")
    kinds = {panel["type"] for name in boards.NAMES for panel in boards.panels(name)}
    assert kinds == set(re.findall(r"PanelOf<'([\w-]+)'", source))


def test_the_schema_is_of_the_grafana_that_we_run() -> None:
    compose = yaml.safe_load((boards.ROOT / "deploy" / "compose" / "compose.yaml").read_text("utf-8"))
    version = compose["services"]["grafana"]["image"].partition(":")[2]
    assert f"@grafana/schema {version}," in SCHEMA["$comment"]
