"""The incremental JSON reader: it agrees with the standard library, wherever the text is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.tools.scan import ObjectScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=4)
CUTS = st.lists(st.integers(0, 80), max_size=8)


def scan(text: str, cuts: list[int]) -> tuple[int, ObjectScanner, list[tuple[str, str]]]:
    """Where the object ended, the scanner, and the members that it told, as (name, raw value)."""
    scanner, end = ObjectScanner(), 0
    members: list[tuple[str, str]] = []
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for start, stop in itertools.pairwise(borders):
        if scanner.done or scanner.failed:
            break
        taken, events = scanner.feed(text[:stop], start)
        end = taken
        for kind, value in events:
            if kind == "key":
                members.append((value, ""))
            elif kind == "piece":
                members[-1] = (members[-1][0], members[-1][1] + value)
    return end, scanner, members


@given(OBJECTS, CUTS, st.booleans(), st.sampled_from([None, 0, 2]))
def test_an_object_is_read_to_its_end_and_its_members_are_its_raw_values(
    value: dict[str, object], cuts: list[int], ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    end, scanner, members = scan(text + "}tail", cuts)
    assert scanner.done
    assert end == len(text)
    assert {name: json.loads(raw) for name, raw in members} == value


@given(
    st.text(alphabet='{}[]",:\\u0d8a1-+.eEtrufalsn \n\x01/', max_size=24).map(lambda text: "{" + text)
    | OBJECTS.map(json.dumps),
    CUTS,
)
@example('{"a": 01}', [])
@example('{"a": 1.}', [])
@example('{"a": tru}', [])
@example('{"a": "\\ud8"}', [])
@example('{"a": 1,}', [])
@example('{"a": [1,]}', [])
@example('{"a": NaN}', [])
@example('{"a": "\n"}', [])
@example('{"a" 1}', [])
@example('{"a": [}', [])
@example('{"a": {]}', [])
def test_it_takes_what_the_standard_library_takes_and_nothing_else(text: str, cuts: list[int]) -> None:
    def refuse(constant: str) -> object:
        raise ValueError(constant)

    try:
        _, expected = json.JSONDecoder(parse_constant=refuse).raw_decode(text)
    except ValueError:
        expected = None
    end, scanner, _ = scan(text, cuts)
    assert (end if scanner.done else None) == expected


@given(st.text(alphabet='{}[]",:\\u0d8a1-+.eE tn', max_size=24).map(lambda text: "{" + text), CUTS)
def test_where_it_fails_does_not_depend_on_the_cuts(text: str, cuts: list[int]) -> None:
    whole, cut = scan(text, []), scan(text, cuts)
    assert (whole[0], whole[1].done, whole[1].failed) == (cut[0], cut[1].done, cut[1].failed)
    assert not whole[1].failed or whole[2][:-1] == cut[2][:-1]


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_depth_has_no_bound_but_memory(opening: str) -> None:
    depth = 20_000
    text = '{"a":' + opening * depth + "1" + ("]" if opening == "[" else "}") * depth + "}"
    assert scan(text, [])[1].done
