"""The API's own description holds: schemathesis sends what it allows and what it forbids, and looks at the answers.

The long run is ``python -m tests.server.test_openapi URL --max-examples 500``.
"""

from __future__ import annotations

import argparse
import functools
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about its own dependencies
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
MODES = {GenerationMode.POSITIVE: CHECKS, GenerationMode.NEGATIVE: [*CHECKS, negative_data_rejection]}
EXAMPLES = 4


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for path, methods in document["paths"].items():
        for method in methods:
            yield method.upper(), path


@functools.lru_cache
def load(base: str) -> Any:
    return schemathesis.openapi.from_url(f"{base}/openapi.json")


def explore(base: str, method: str, path: str, examples: int) -> Counter[int]:
    """Send ``examples`` requests of each kind to one operation; how often each status came. Raises on a violation."""
    operation = load(base)[path][method]
    seen: Counter[int] = Counter()
    for mode, checks in MODES.items():
        cases = operation.as_strategy(generation_mode=mode)
        if mode is GenerationMode.POSITIVE:
            cases = cases.map(_small)
        run = given(case=cases)(_sender(checks, seen))
        try:
            settings(
                max_examples=examples,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )(run)()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE, "nothing that it allows can be sent"
            assert not operation.body, "a body can always be wrong"
    return seen


def _small(case: Any) -> Any:
    """What it asks for takes little time: the description allows as much as fits the context."""
    if case.path.endswith("completions"):
        case.body["max_tokens"] = 2
        case.body.pop("max_completion_tokens", None)
        case.body.pop("min_tokens", None)
        case.body["n"] = min(case.body.get("n") or 1, 2)
    return case


def _sender(checks: list[Any], seen: Counter[int]) -> Callable[[Any], None]:
    def send(case: Any) -> None:
        response = case.call()
        seen[response.status_code] += 1
        case.validate_response(response, checks=checks)

    return send


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def test_every_operation_says_what_it_answers_and_how_it_fails(document: dict[str, Any]) -> None:
    for method, path in operations(document):
        responses = document["paths"][path][method.lower()]["responses"]
        assert {"200", "500"} <= set(responses), path
        assert "422" not in responses, path
        for status, response in responses.items():
            (schema,) = {json.dumps(kind["schema"]) for kind in response["content"].values() if kind["schema"]} - {
                json.dumps(kind["schema"]) for name, kind in response["content"].items() if name == "text/event-stream"
            }
            assert status == "200" or schema == json.dumps({"$ref": "#/components/schemas/ErrorAnswer"})
        assert method == "GET" or {"400", "404", "408", "413", "415", "503"} <= set(responses)


def test_every_reference_leads_to_a_schema(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    names = {piece.split('"')[0] for piece in text.split('"$ref": "#/components/schemas/')[1:]}
    assert names <= set(document["components"]["schemas"])
    assert text.count('"$ref"') == text.count('"$ref": "#/components/schemas/')


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_requests_as_described_and_others_get_answers_as_described(chat_base: str, path: str) -> None:
    seen = explore(chat_base, "POST", path, EXAMPLES)
    assert set(seen) <= {200, 400, 404}
    assert seen.total() >= EXAMPLES


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/{model}", "/live", "/health", "/version", "/v1/server_info", "/metrics"]
)
def test_what_is_asked_without_a_body_is_answered_as_described(base: str, path: str) -> None:
    assert set(explore(base, "GET", path, 3)) <= {200, 404}


def test_no_operation_is_left_out(document: dict[str, Any]) -> None:
    tested = {mark.args[1][i] for name in TESTS for mark in name.pytestmark for i in range(len(mark.args[1]))}
    assert tested == {path for _, path in operations(document)}


TESTS: list[Any] = [
    test_requests_as_described_and_others_get_answers_as_described,
    test_what_is_asked_without_a_body_is_answered_as_described,
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Explore every operation of a server that runs.")
    parser.add_argument("url")
    parser.add_argument("--max-examples", type=int, default=500)
    options = parser.parse_args()
    document = httpx.get(f"{options.url}/openapi.json").json()
    for method, path in operations(document):
        seen = explore(options.url, method, path, options.max_examples)
        print(method, path, dict(sorted(seen.items())), flush=True)


if __name__ == "__main__":
    main()
