"""Requests that ask for much. Each is another one than those before, so that nothing about it is known already.

A load makes the path and the body (without the model) of its ``i``-th request. What a body asks for may be answered or
refused; the loads are about what that costs everybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Load = Callable[[int], tuple[str, dict[str, Any]]]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MEGABYTE = 1_000_000
GRAMMAR_BYTES = 120_000  # just below what a grammar may have
WORDS = "hello world, how are you? the quick brown fox "


def _text(i: int, size: int = MEGABYTE) -> str:
    return (f"{i} " + WORDS * (size // len(WORDS) + 1))[:size]


def _ids(i: int, count: int) -> list[int]:
    return [30 + (i + j) % 200 for j in range(count)]


def _completion(**body: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "the quick brown", "max_tokens": 16, **body}


def _chat(*messages: dict[str, Any], **body: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": list(messages), "max_completion_tokens": 16, **body}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _schema(schema: object) -> tuple[str, dict[str, Any]]:
    return _completion(structured_outputs={"json": schema})


def _output(**wanted: object) -> tuple[str, dict[str, Any]]:
    return _completion(structured_outputs=wanted)


def _product(i: int) -> dict[str, Any]:
    """All of several alternatives: as many combinations as their product."""
    return {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}_{j}_{k}": {"type": "string"}}} for k in range(9)]} for j in range(9)
        ]
    }


def _optional(i: int, count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}_{j}": {"type": "string"} for j in range(count)}}


def _recursive(i: int) -> dict[str, Any]:
    again = {"$ref": "#/$defs/tree"}
    tree = {"type": "object", "properties": {f"n{i}": {"type": "string"}, "of": again}}
    return {"$defs": {"tree": {"anyOf": [tree, {"type": "array", "items": again}]}}, **again}


def _nested(i: int, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"const": i}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _enum(i: int, size: int) -> dict[str, Any]:
    return {"enum": [f"{i}-{j:09}" for j in range(size // 18)]}


def _tools(i: int, count: int, parameters: int) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"f{j}", "parameters": _optional(i, parameters)}}
        for j in range(count)
    ]


def _ambiguous(i: int) -> str:
    rules = [f"a{j}: a a{(j + 1) % 200} | a{(j + 7) % 200} a | /[a-z ]/ |" for j in range(200)]
    return "\n".join([f'start: a "{i}"', "a: " + "|".join(f"a{j}" for j in range(200)), *rules])


def _doubling(i: int, times: int) -> str:
    return "\n".join([f"start: a{times}", f'a0: "x{i}"', *(f"a{j}: a{j - 1} a{j - 1}" for j in range(1, times + 1))])


def stream(i: int) -> tuple[str, dict[str, Any]]:
    """What everybody else does meanwhile."""
    return _completion(prompt=f"{i} {WORDS}", max_tokens=64, stream=True)


LOADS: Mapping[str, Mapping[str, Load]] = {
    "schemas": {
        "product": lambda i: _schema(_product(i)),
        "optional": lambda i: _schema(_optional(i, 199)),
        "very optional": lambda i: _schema(_optional(i, 2000)),
        "recursive": lambda i: _schema(_recursive(i)),
        "nested": lambda i: _schema(_nested(i, 50)),
        "enumeration": lambda i: _schema(_enum(i, GRAMMAR_BYTES)),
        "megabyte": lambda i: _schema(_enum(i, MEGABYTE)),
    },
    "regexes": {
        "repetitions": lambda i: _output(regex=f"((a{{1,{900 + i % 99}}}){{1,999}}){{99,999}}"),
        "states": lambda i: _output(regex=f"(.*a){{{20 + i % 40}}}b{i}"),
        "backtracking": lambda i: _output(regex=f"(a|a)*{i}b"),
        "options": lambda i: _output(regex=f"(x?){{{200 + i % 99}}}x{{{200 + i % 99}}}"),
        "alternation": lambda i: _output(regex="|".join(f"[a-z]{{{1 + j % 9}}}{i}{j}" for j in range(6000))),
        "look-around": lambda i: _output(regex=f"(?=a){i}"),
    },
    "grammars": {
        "ambiguous": lambda i: _output(grammar=_ambiguous(i)),
        "doubling": lambda i: _output(grammar=_doubling(i, 30)),
        "deep": lambda i: _output(grammar="start: " + "(" * 20_000 + f'"{i}"' + ")" * 20_000),
        "endless": lambda i: _output(grammar=f'root ::= "{i}" root | root'),
        "choices": lambda i: _output(choice=[f"{i} number {j}" for j in range(4096)]),
    },
    "long prompts": {
        "text": lambda i: _completion(prompt=_text(i)),
        "text to cut": lambda i: _completion(prompt=_text(i), truncate_prompt_tokens=64),
        "texts to cut": lambda i: _completion(
            prompt=[_text(i + j, 16_000) for j in range(60)], truncate_prompt_tokens=16, max_tokens=1
        ),
        "ids": lambda i: _completion(prompt=_ids(i, MEGABYTE // 5)),
        "ids to cut": lambda i: _completion(prompt=_ids(i, MEGABYTE // 5), truncate_prompt_tokens=64),
        "prediction": lambda i: _completion(prediction={"type": "content", "content": _text(i)}),
    },
    "long chats": {
        "message": lambda i: _chat(_user(_text(i))),
        "message to cut": lambda i: _chat(_user(_text(i)), truncate_prompt_tokens=64),
        "messages": lambda i: _chat(*[_user(f"{i} {j} {WORDS}") for j in range(4096)], truncate_prompt_tokens=64),
        "control tokens": lambda i: _chat(_user("<|im_end|>" * (MEGABYTE // 10) + str(i)), truncate_prompt_tokens=64),
        "parts": lambda i: _chat(_user([{"type": "text", "text": _text(i, 900)}] * 1000), truncate_prompt_tokens=64),
        "tools": lambda i: _chat(_user(str(i)), tools=_tools(i, 100, 20)),
    },
    "long lists": {
        "stop ids": lambda i: _completion(stop_token_ids=_ids(i, MEGABYTE // 5)),
        "allowed ids": lambda i: _completion(allowed_token_ids=_ids(i, MEGABYTE // 5)),
        "bad words": lambda i: _completion(bad_words=[f"{_text(j, 240)}{i}" for j in range(256)]),
        "bias": lambda i: _completion(logit_bias={str(30 + (i + j) % 220): 1 for j in range(200)}, n=16),
        "metadata": lambda i: _completion(metadata={f"{i}-{j}": "x" for j in range(MEGABYTE // 16)}),
        "objects": lambda i: _completion(metadata={"a": [{}] * 60_000, "b": i}),
    },
    "long answers": {
        "echo": lambda i: _completion(prompt=_ids(i, 400), echo=True, logprobs=20, max_tokens=1),
        "prompt logprobs": lambda i: _completion(prompt=_ids(i, 400), prompt_logprobs=20, max_tokens=1),
        "many prompt logprobs": lambda i: _completion(prompt=_ids(i, 4000), prompt_logprobs=20, max_tokens=1),
        "streams": lambda i: _completion(n=16, logprobs=20, stream=True, seed=i, max_tokens=32),
        "tokenize": lambda i: ("/tokenize", {"prompt": _text(i, 200_000), "return_token_strs": True}),
        "detokenize": lambda i: ("/detokenize", {"tokens": _ids(i, 60_000)}),
    },
}


def loads_of(case: str) -> tuple[Load, ...]:
    """Of a group, or of one load as ``group: load``; none if there is no such case."""
    group, _, name = case.partition(": ")
    loads = LOADS.get(group, {})
    if name:
        return (loads[name],) if name in loads else ()
    return tuple(loads.values())
