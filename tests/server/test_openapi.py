"""The API's own description holds: schemathesis sends what it allows and what it forbids, and looks at the answers.

The long run is ``python -m tests.server.test_openapi [URL] --max-examples 500``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about its own dependencies
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.core.failures import FailureGroup
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

from server.service import Service
from tests.server.builders import build_service, running, save_tiny_model
from tests.server.chat_builders import save_chat_model

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
MODES = {GenerationMode.POSITIVE: CHECKS, GenerationMode.NEGATIVE: [*CHECKS, negative_data_rejection]}
EXAMPLES = 4
PATIENCE = 600.0  # seconds for an answer: a busy machine breaks no description


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for path, methods in document["paths"].items():
        for method in methods:
            yield method.upper(), path


@functools.lru_cache
def load(base: str) -> Any:
    return schemathesis.openapi.from_url(f"{base}/openapi.json")


def explore(base: str, method: str, path: str, examples: int, seen: Counter[int] | None = None) -> Counter[int]:
    """Send ``examples`` requests of each kind to one operation; how often each status came. Raises on a violation."""
    operation = load(base)[path][method]
    seen = Counter() if seen is None else seen
    for mode, checks in MODES.items():
        cases = operation.as_strategy(generation_mode=mode).map(_patient)
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


def _patient(case: Any) -> Any:
    """No answer has to come sooner than any can: that would be a 504."""
    timeout = case.body.get("timeout") if isinstance(case.body, dict) else None
    if isinstance(timeout, int | float) and 0 < timeout < 60:
        case.body["timeout"] = 60
    return case


def _small(case: Any) -> Any:
    """What it asks for takes little time: the description allows as much as fits the context."""
    case.body = _whole(case.body)
    if case.path.endswith("completions"):
        case.body["max_tokens"] = 2
        case.body.pop("max_completion_tokens", None)
        case.body.pop("min_tokens", None)
        case.body.pop("timeout", None)  # nobody can keep one of 1e-9 seconds, and a 504 is the server's error
        case.body["n"] = min(case.body.get("n") or 1, 2)
        _reconcile(case.body)
    return case


def _whole(value: Any) -> Any:
    """Numbers such as 3.0 are integers in JSON schema; a field for an integer refuses them."""
    if isinstance(value, dict):
        return {name: _whole(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _reconcile(body: dict[str, Any]) -> None:
    """Leave out what its other fields, a setting or the model refuse: else most of what is allowed is refused."""
    if body.get("stream"):
        for name in ("best_of", "prompt_logprobs"):
            body.pop(name, None)
    else:
        body.pop("stream_options", None)
    if body.get("best_of"):
        body["best_of"] = body["n"]
    if body.get("response_format") or body.get("structured_outputs"):
        body.pop("ignore_eos", None)
    if body.get("response_format"):
        body.pop("structured_outputs", None)
    if body.get("speculation"):
        body["speculation"].pop("drafter", None)
        body["speculation"]["num_speculative_tokens"] = min(body["speculation"].get("num_speculative_tokens") or 0, 4)
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(name) % 300): value for name, value in body["logit_bias"].items()}
    if isinstance(body.get("stop"), list):
        body["stop"] = body["stop"][:4]
    if body.get("metadata"):
        body["metadata"] = dict(list(body["metadata"].items())[:16])


def _sender(checks: list[Any], seen: Counter[int]) -> Callable[[Any], None]:
    def send(case: Any) -> None:
        response = case.call(timeout=PATIENCE)
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
            kinds = {name: kind for name, kind in response["content"].items() if name != "text/event-stream"}
            (schema,) = {json.dumps(kind["schema"]) for kind in kinds.values() if kind["schema"]}
            assert status == "200" or schema == json.dumps({"$ref": "#/components/schemas/ErrorAnswer"})
        assert method == "GET" or {"400", "404", "408", "413", "415", "503"} <= set(responses)


def test_the_ids_that_a_request_may_have_are_those_of_the_model(document: dict[str, Any], service: Service) -> None:
    facts = service.facts
    most = {"prompt": facts.embedding_rows, "stop_token_ids": facts.vocab_size, "allowed_token_ids": facts.vocab_size}
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for name, rows in most.items():
        field = json.dumps(body["properties"][name])
        assert field.count('"type": "integer"') == field.count(f'"maximum": {rows - 1}') > 0, name


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


def test_the_long_run_fails_for_a_status_that_an_operation_does_not_say(
    base: str, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_version = [base, "--max-examples", "1", "--only", "/version"]
    assert main(only_version) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["GET /version {200: 1}", "no violation"]
    changed = json.loads(json.dumps(document))
    del changed["paths"]["/version"]["get"]["responses"]["200"]
    schema = schemathesis.openapi.from_dict(changed)
    schema.config.update(base_url=base)
    monkeypatch.setattr("tests.server.test_openapi.load", lambda _: schema)
    assert main(only_version) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 operations broke their description"


TESTS: list[Any] = [
    test_requests_as_described_and_others_get_answers_as_described,
    test_what_is_asked_without_a_body_is_answered_as_described,
]


@contextlib.contextmanager
def tiny_server() -> Iterator[str]:
    """A server of a tiny random model with a chat template."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_chat_model(save_tiny_model(Path(folder) / "tiny"), Path(folder) / "model")
        with running(build_service(model, Path(folder) / "home")) as base:
            yield base


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if no operation broke its description."""
    parser = argparse.ArgumentParser(description="Explore every operation of a server.")
    parser.add_argument("url", nargs="?", help="of a server that runs (default: one with a tiny random model)")
    parser.add_argument("--max-examples", type=int, default=500, help="of each kind: allowed and forbidden")
    parser.add_argument("--only", default="", metavar="TEXT", help="operations with TEXT in their path")
    options = parser.parse_args(arguments)
    failed = 0
    with contextlib.ExitStack() as stack:
        base = options.url or stack.enter_context(tiny_server())
        document = httpx.get(f"{base}/openapi.json", trust_env=False).json()
        for method, path in operations(document):
            if options.only not in path:
                continue
            seen: Counter[int] = Counter()
            try:
                explore(base, method, path, options.max_examples, seen)
            except (Exception, FailureGroup):  # which is no Exception
                failed += 1
                traceback.print_exc()
            print(method, path, dict(sorted(seen.items())), flush=True)
    print("no violation" if not failed else f"{failed} operations broke their description")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
