"""Bodies: strict JSON, whatever a client sends."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.body import MAX_CONTAINERS, MAX_DEPTH, parse_json_object
from server.errors import APIError

BAD = {
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": Infinity}',
    "minus Infinity": b'{"a": [-Infinity]}',
    "beyond a double": b'{"a": 1e999}',
    "digits without end": b'{"a": ' + b"9" * 5000 + b"}",
    "duplicate key": b'{"a": 1, "a": 1}',
    "duplicate key inside": b'{"a": {"b": 1, "\\u0062": 2}}',
    "duplicate lone surrogate": b'{"\\ud800": 1, "\\ud800": 2}',
    "lone surrogate": b'{"a": "\\ud800"}',
    "lone surrogate in a key": b'{"\\uDFFF": 1}',
    "surrogates the wrong way round": b'{"a": "\\udc00\\ud800"}',
    "invalid UTF-8": b'{"a": "\xff"}',
    "UTF-8 of a surrogate": b'{"a": "\xed\xa0\x80"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "deep lists": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "a list": b"[]",
    "a string": b'"{}"',
    "null": b"null",
    "nothing": b"",
    "two objects": b"{}{}",
    "cut off": b'{"a": "\\',
    "a control character": b'{"a": "\n"}',
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_what_is_not_strict_json_is_a_400(body: bytes) -> None:
    with pytest.raises(APIError) as caught:
        parse_json_object(body)
    assert caught.value.status == 400
    json.dumps(caught.value.body, ensure_ascii=False).encode()


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    SCALARS | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), JSON), st.booleans())
def test_strict_json_comes_back_as_it_was(value: dict[str, object], ascii_only: bool) -> None:
    assert parse_json_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_400(body: bytes) -> None:
    status = 200
    try:
        parsed = parse_json_object(body)
    except APIError as error:
        parsed, status = {}, error.status
    assert isinstance(parsed, dict)
    assert status in (200, 400)


def test_brackets_in_strings_are_no_depth() -> None:
    text = '[[["\\"' * 1000
    assert parse_json_object(json.dumps({"a": text}).encode()) == {"a": text}


def test_more_lists_and_objects_than_any_request_needs_are_refused() -> None:
    fitting = b'{"a": [' + b"[]," * (MAX_CONTAINERS - 3) + b"{}]}"
    assert parse_json_object(fitting)
    with pytest.raises(APIError, match=str(MAX_CONTAINERS)):
        parse_json_object(fitting.replace(b"{}]", b"{},{}]"))


def test_the_deepest_allowed_body_is_parsed() -> None:
    depth = MAX_DEPTH - 1
    assert parse_json_object(b'{"a":' + b"[" * depth + b"]" * depth + b"}")
