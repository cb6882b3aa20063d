"""docs/limits.md holds to the code: every bound stands there, with the value that it has."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from server.metrics import REJECTIONS
from server.setting_flags import default_text, flag_name
from server.settings import Settings
from tests.test_docs import codes, table_rows

PAGE = (Path(__file__).parents[1] / "docs" / "limits.md").read_text("utf-8")
ROWS = [row for row in table_rows(PAGE) if len(row) == 4 and row[0] != "limit"]
SETTINGS = {row[1].strip("`"): row for row in ROWS if row[1].startswith("`--")}
CONSTANTS = {row[1].strip("`"): row for row in ROWS if not row[1].startswith("`--")}
FIELDS = {flag_name(field): info for field, info in Settings.model_fields.items()}
# What a setting is called that bounds something.
BOUND = re.compile(r"--(audit-)?(max|rate)-.*|--.*-(timeout|memory|bytes|files|blocks)|--num-speculative-tokens")


def test_every_setting_that_is_a_bound_is_there() -> None:
    assert {flag for flag in FIELDS if BOUND.fullmatch(flag)} <= set(SETTINGS)


@pytest.mark.parametrize("flag", SETTINGS)
def test_a_setting_has_the_default_that_the_page_names(flag: str) -> None:
    assert SETTINGS[flag][2] == default_text(FIELDS[flag])


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_has_the_value_that_the_page_names(name: str) -> None:
    module, _, constant = name.rpartition(".")
    assert CONSTANTS[name][2] == str(getattr(importlib.import_module(module), constant))


def test_every_reason_of_a_refusal_is_there_and_no_other() -> None:
    named = set(re.findall(r"\(reason `(\w+)`\)", PAGE))
    assert named == set(REJECTIONS)


def test_every_status_that_a_client_sees_is_one_of_the_api() -> None:
    api = (Path(__file__).parents[1] / "docs" / "api.md").read_text("utf-8")
    seen = set(re.findall(r"\b([45]\d\d)\b", " ".join(row[3] for row in ROWS)))
    assert seen
    for status in seen:
        assert status in api
    assert all(codes(row[1]) for row in ROWS)
