"""Structured output over HTTP: what was asked for comes, speculation changes nothing, bad grammars hurt nobody."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from scheduler.errors import EngineUnhealthy, ShuttingDown
from server.errors import APIError
from server.grammars import MAX_CHECKING, Grammars, LocalGrammars
from server.resolve import check_limits
from server.schemas import parse_completion
from server.service import Service
from server.settings import load_settings
from specdec.grammar.compiler import GrammarCache, GrammarCompiler, GrammarError, TokenizerText
from specdec.grammar.text import choice, regex
from tests.pauses import pauses
from tests.server.builders import MODEL_NAME, byte_level_tokenizer, metric, sse_events
from tests.server.chat_builders import HELLO
from tests.server.test_schemas import FACTS

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


def schema_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def is_answer(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"name", "ok"} and len(value["name"]) <= 6 and isinstance(value["ok"], bool)


def outputs(**member: object) -> dict[str, Any]:
    return {"structured_outputs": member}


KINDS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "json_schema": ({"response_format": schema_format(SCHEMA)}, is_answer),
    "json": (outputs(json=SCHEMA), is_answer),
    "json as a string": (outputs(json=json.dumps(SCHEMA)), is_answer),
    "regex": (outputs(regex="[a-c]{2,5}/[0-9]+;"), re.compile("[a-c]{2,5}/[0-9]+;").fullmatch),
    "choice": (outputs(choice=["yes", "no", "not at all"]), re.compile("yes|no|not at all").fullmatch),
    "lark": (outputs(grammar='start: "x" ("," "y"){1,4} "."'), re.compile(r"x(,y){1,4}\.").fullmatch),
    "gbnf": (outputs(grammar='root ::= "a" | "b" root'), re.compile("b*a").fullmatch),
}


def body(**extras: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": "the quick brown", "max_tokens": 100, "seed": 7, **extras}


@pytest.mark.parametrize("name", KINDS)
def test_the_output_is_what_was_asked_for_and_a_stream_joins_to_it(http: httpx.Client, name: str) -> None:
    extras, holds = KINDS[name]
    # Line breaks and spaces may go on for ever between two parts of a JSON.
    bias = {str(token): -100 for token in blanks()}
    asked = body(**extras, return_token_ids=True, logit_bias=bias, logprobs=1)
    answer = http.post("/v1/completions", json=asked).json()
    (chosen,) = answer["choices"]
    assert chosen["finish_reason"] == "stop"
    assert holds(chosen["text"]), chosen["text"]
    events = sse_events(http.post("/v1/completions", json={**asked, "stream": True}).content)
    parts = [event["choices"][0] for event in events]  # type: ignore[index]
    assert "".join(part["text"] for part in parts) == chosen["text"]
    assert [token for part in parts for token in part["token_ids"]] == chosen["token_ids"]


def blanks() -> list[int]:
    tokenizer = byte_level_tokenizer()
    return [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token).isspace()]


def test_json_object_gives_an_object_and_text_gives_text(http: httpx.Client) -> None:
    bias = {str(byte_level_tokenizer().encode("}")[0]): 8}
    answer = http.post("/v1/completions", json=body(response_format={"type": "json_object"}, logit_bias=bias)).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert isinstance(json.loads(answer["choices"][0]["text"]), dict)
    texts = [
        http.post("/v1/completions", json=body(max_tokens=8, **extras)).json()["choices"][0]["text"]
        for extras in ({}, {"response_format": {"type": "text"}}, {"response_format": None})
    ]
    assert texts[0] == texts[1] == texts[2]


MIXED: list[dict[str, Any]] = [
    {"response_format": schema_format(SCHEMA), "frequency_penalty": 0.5, "logit_bias": {"40": 2}},
    {**outputs(regex="([a-z]{3} ){2,6}[0-9]"), "presence_penalty": 1.5, "temperature": 0, "logprobs": 2},
    {"temperature": 0, "max_tokens": 30},
    {**outputs(choice=["the quick brown fox", "the slow fox"]), "n": 3},
    {**outputs(regex="[ab]*c"), "stop": ["bb", "aa"], "top_p": 0.9, "prompt": ["abab", "the quick"]},
    {**outputs(json=SCHEMA), "bad_words": ["true"], "repetition_penalty": 1.2, "max_tokens": 40},
    {"min_p": 0.1, "max_tokens": 30},
]


def facts(answer: dict[str, Any]) -> object:
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return answer["choices"], usage


@pytest.mark.case("V 11484")
def test_in_one_batch_with_plain_requests_speculation_changes_nothing(http: httpx.Client) -> None:
    def ask(extras: dict[str, Any]) -> object:
        response = http.post("/v1/completions", json=body(**extras, return_token_ids=True))
        assert response.status_code == 200, response.text
        return facts(response.json())

    off = [ask({**extras, "speculation": {"num_speculative_tokens": 0}}) for extras in MIXED]
    with ThreadPoolExecutor(len(MIXED)) as pool:
        for speculation in ({}, {"num_speculative_tokens": 3}, {"drafter": "ngram"}):
            assert list(pool.map(ask, [{**extras, "speculation": speculation} for extras in MIXED])) == off, speculation


def test_what_the_grammar_forces_is_drafted_and_counted(http: httpx.Client, base: str) -> None:
    asked = body(**outputs(choice=["it is forced from the beginning to the end"]), cache_salt="forced")
    before = metric(base, "spec_decode_drafter_accepted_tokens_total", drafter="grammar")
    answer = http.post("/v1/completions", json={**asked, "speculation": {"num_speculative_tokens": 8}}).json()
    assert answer["choices"][0]["text"] == "it is forced from the beginning to the end"
    found = answer["metrics"]["speculative_decoding"]
    assert found["num_accepted_draft_tokens"] == found["num_draft_tokens"] > 0
    assert metric(base, "spec_decode_drafter_accepted_tokens_total", drafter="grammar") > before


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def any_of(i: int) -> dict[str, Any]:
    return {"anyOf": [{"properties": {f"{i}{j}": {"type": "string"}}} for j in range(9)]}


EVIL: dict[str, dict[str, Any]] = {
    "no schema": {"json": {"type": "nothing"}},
    "no value": {"json": {"allOf": [{"type": "string"}, {"type": "null"}]}},
    "never": {"json": False},
    "itself": {"json": {"$ref": "#"}},
    "fetched": {"json": {"$ref": "http://127.0.0.1:9/x"}},
    "a file": {"json": {"$ref": "file:///etc/passwd"}},
    "huge": {"json": {"enum": [f"{i:09}" for i in range(100_000)]}},
    "product": {"json": {"allOf": [any_of(i) for i in range(9)]}},
    "no regex": {"regex": "((("},
    "look-around": {"regex": "(?=a)(?<!b)a"},
    "back reference": {"regex": "(a)\\1"},
    "no match": {"regex": "[^\\s\\S]"},
    "huge repeat": {"regex": "((a{1,9999}){1,9999}){9999,99999}"},
    "no grammar": {"grammar": "start: other"},
    "deep grammar": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "ambiguous": {
        "grammar": "\n".join(
            ["start: a", "a: " + "|".join(f"a{i}" for i in range(200))]
            + [f"a{i}: a a{(i + 1) % 200} | a{(i + 7) % 200} a | /[a-z ]/ |" for i in range(200)]
        )
    },
    "endless gbnf": {"grammar": "root ::= root"},
    "doubling": {"grammar": "\n".join(["start: a30", 'a0: "x"', *(f"a{i}: a{i - 1} a{i - 1}" for i in range(1, 31))])},
}


@pytest.mark.parametrize("name", EVIL)
def test_a_grammar_that_cannot_be_used_is_refused_by_name(http: httpx.Client, name: str) -> None:
    response = http.post("/v1/completions", json=body(**outputs(**EVIL[name])))
    (member,) = EVIL[name]
    param = f"structured_outputs.{member}"
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), response.text
    assert len(error["message"].splitlines()) == 1
    assert len(error["message"]) < 500
    assert "root:" not in error["message"]


def test_grammars_that_look_evil_and_are_not_give_an_output(http: httpx.Client) -> None:
    itself = {"$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    for wanted in (
        {"choice": [f"number {i}" for i in range(4096)]},
        {"regex": "(a|a)*b"},
        {"regex": "(.*a){40}b"},
        {"json": deep(50)},
        {"json": itself},
    ):
        response = http.post("/v1/completions", json=body(**outputs(**wanted), max_tokens=12))
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")


FORMATS: list[object] = [
    "json",
    [],
    {},
    {"type": "xml"},
    {"type": "text", "more": 1},
    {"type": "json_object", "json_schema": {}},
    {"type": "json_schema"},
    *(
        {"type": "json_schema", "json_schema": named}
        for named in (
            {"name": "a"},
            {"schema": {}},
            {"name": "", "schema": {}},
            {"name": "a", "schema": "{}"},
            {"name": "a", "schema": {}, "strict": "yes"},
            {"name": "a", "schema": {}, "other": 1},
        )
    ),
]
OUTPUTS: list[object] = [
    "json",
    [],
    {},
    {"json": None},
    {"json": "{"},
    {"json": 3},
    {"regex": ""},
    {"regex": 3},
    {"regex": "a" * 200_000},
    {"choice": []},
    {"choice": "yes"},
    {"choice": ["a", 1]},
    {"choice": [None]},
    {"grammar": ["a"]},
    {"json_object": 1},
    {"structural_tag": "a"},
    {"regex": "a", "choice": ["a"]},
    {"json": {}, "whitespace_pattern": " "},
]
REFUSED = [
    *(({"response_format": value}, "response_format") for value in FORMATS),
    *(({"structured_outputs": value}, "structured_outputs") for value in OUTPUTS),
    ({**outputs(regex="a"), "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({**outputs(regex="a"), "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("extras", "param"), REFUSED, ids=lambda value: str(value)[:50])
def test_a_format_that_cannot_be_honoured_is_refused_by_name(extras: dict[str, Any], param: str) -> None:
    with pytest.raises(APIError) as caught:
        check_limits(parse_completion({"model": "m", "prompt": "a", **extras}), FACTS, load_settings())
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message
    assert len(caught.value.message) < 500


@pytest.fixture
def failing(service: Service) -> Iterator[Grammars]:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.serialized is not None
    text = TokenizerText(tokenizer.serialized, tokenizer.vocab_size, (0,))
    cache = GrammarCache(GrammarCompiler(text), 2**20)
    results: list[str] = []
    grammars = Grammars(
        LocalGrammars(cache), text, timeout=1.0, count=results.append, module="tests.server.failing_checks"
    )
    grammars.results = results  # type: ignore[attr-defined]
    yield grammars
    grammars.close()


def test_a_check_that_hangs_or_dies_is_refused_in_time_and_the_loop_never_stands_still(failing: Grammars) -> None:
    async def refused(grammar: str) -> str:
        with pytest.raises(APIError) as caught:
            await failing.check(grammar, "structured_outputs.regex")
        assert (caught.value.status, caught.value.param) == (400, "structured_outputs.regex")
        return caught.value.message

    async def all_of_them() -> None:
        good = regex("[a-f]+")
        assert await failing.check(good, "p") == good  # the process runs now
        hanging = asyncio.ensure_future(refused(regex("hang")))
        waiting = asyncio.ensure_future(failing.check(choice(["good"]), "p"))
        longest, duration = await pauses(hanging)
        assert "takes more than 1 s" in hanging.result()
        assert longest < duration / 2
        assert await waiting == choice(["good"])
        assert "too large or too deep" in await refused(regex("die"))
        assert await failing.check(choice(["still good"]), "p") == choice(["still good"])
        assert await failing.check(good, "p") == good

    asyncio.run(all_of_them())
    assert failing.results == ["accepted", "timeout", "accepted", "crashed", "accepted"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "says"),
    [
        (GrammarError("is too complex"), 400, "invalid_value", "is too complex"),
        (EngineUnhealthy("the engine's process has ended"), 503, "engine_failed", "has ended"),
        (ShuttingDown("the server is shutting down"), 503, "shutting_down", "is shutting down"),
    ],
    ids=["grammar", "failed", "shutting down"],
)
def test_a_grammar_that_the_engine_does_not_take_is_refused_clearly(
    chat_service: Service,
    chat_http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    code: str,
    says: str,
    chat: bool,
) -> None:
    async def prepare(grammar: str) -> None:
        raise error

    monkeypatch.setattr(chat_service.grammars._compiled, "prepare", prepare)
    prompt = {"messages": HELLO} if chat else {"prompt": "a"}
    body = {"model": MODEL_NAME, "structured_outputs": {"regex": f"{code}[ab]"}, **prompt}
    response = chat_http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert says in response.json()["error"]["message"]
    assert ("retry-after" in response.headers) == (status == 503)
    assert chat_service.engine.room.num_requests == 0


def test_no_more_grammars_wait_for_their_check_than_may(failing: Grammars) -> None:
    async def flood() -> list[object]:
        calls = [failing.check(regex(f"a{{{i + 1}}}"), "p") for i in range(MAX_CHECKING + 3)]
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(flood())
    refused = [error for error in found if isinstance(error, APIError)]
    assert [(error.status, error.code) for error in refused] == [(503, "overloaded")] * 3
    assert sum(isinstance(value, str) for value in found) == MAX_CHECKING


def test_a_model_without_grammars_refuses_them_and_says_why() -> None:
    grammars = Grammars(None, None, reason="its tokenizer is written in Python")
    with pytest.raises(APIError, match="its tokenizer is written in Python") as caught:
        asyncio.run(grammars.check(choice(["a"]), "response_format"))
    assert (caught.value.status, caught.value.param) == (400, "response_format")
    assert grammars.info["available"] is False


def test_server_info_says_what_there_is(http: httpx.Client) -> None:
    info = http.get("/v1/server_info").json()["structured_output"]
    assert info["available"] is True
    assert info["reason"] is None
    assert 0 <= info["memory_bytes"] <= info["max_memory_bytes"]
