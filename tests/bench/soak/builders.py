"""A soak that went well, as plain data, and requests with what came of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from bench.preflight.scrape import Labels, Scrape
from bench.soak.checks import Soaked
from bench.soak.drive import Record, RoundEnd
from bench.soak.faults import Fired
from bench.soak.log import ServerLog
from bench.soak.outcome import Outcome
from bench.soak.requests import COMPLETIONS, Planned
from bench.soak.survivors import Replayed
from bench.soak.wire import Manner, Reply

NUM_BLOCKS = 100
TOKENS = {"soak-1": 7, "soak-2": 5, "soak-3": 2}  # the third one's client left
MIB = 2**20


def scrape(**changes: float) -> Scrape:
    """Of a server that has nothing to do. A name with ``__`` has a label's value behind it: ``kv_blocks__used``."""
    values: dict[str, float] = {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_blocks__free": 60,
        "kv_blocks__cached": 40,
        "kv_blocks__used": 0,
        "generation_tokens_total": 14,
        "ended_generation_tokens_total__stop": 12,
        "ended_generation_tokens_total__abort": 2,
        "spec_decode_num_drafts_total": 4,
        "spec_decode_acceptance_length_count": 4,
        "spec_decode_num_draft_tokens_total": 9,
        "spec_decode_drafter_draft_tokens_total__ngram": 9,
        "spec_decode_num_accepted_tokens_total": 5,
        "spec_decode_num_accepted_tokens_per_pos_total__0": 4,
        "spec_decode_num_accepted_tokens_per_pos_total__1": 1,
        "spec_decode_drafter_accepted_tokens_total__ngram": 5,
        "kv_alignment_bytes_moved_total": 0,
        "kv_blocks_moved_total": 0,
        "request_success_total__stop": 2,
        "request_success_total__abort": 1,
        **changes,
    }
    labels = {"kv_blocks": "state", "ended_generation_tokens_total": "finished_reason"}
    samples: dict[str, dict[Labels, float]] = {}
    for key, value in values.items():
        name, _, label = key.partition("__")
        pairs: Labels = ((labels.get(name, "finished_reason"), label),) if label else ()
        samples.setdefault(name, {})[pairs] = value
    return Scrape(samples, {})


def round_end(**changes: Any) -> RoundEnd:
    end = RoundEnd(
        began=0.0,
        ended=30.0,
        settled_after=0.1,
        left="",
        memory_bytes=400 * MIB,
        kept_bytes=10 * MIB,
        scrape=scrape(),
        health=200,
        requests=3,
    )
    return replace(end, **changes)


def outcomes() -> list[Outcome]:
    return [
        Outcome(1, "answered", frozenset({"stream"}), 200, completion_tokens=7),
        Outcome(2, "answered", frozenset({"whole"}), 200, completion_tokens=5),
        Outcome(3, "left", frozenset({"stream"})),
        Outcome(4, "refused", frozenset({"burst"}), 503, retry_after=True),
        Outcome(5, "failed", frozenset({"chat"}), 500, problem="server_error: it failed"),
        Outcome(6, "cut", frozenset({"stuck"}), 200),
    ]


def soaked() -> Soaked:
    """All invariants hold."""
    record = Record(
        outcomes(),
        [round_end(), round_end(memory_bytes=420 * MIB, kept_bytes=12 * MIB), round_end()],
        [Fired("sample raise", 1)],
        [Replayed(1, frozenset({"stream"}), ""), Replayed(2, frozenset({"whole"}), "")],
        scrape(),
    )
    log = ServerLog(tokens=dict(TOKENS), statuses=dict.fromkeys(TOKENS, 200), num_injected=1)
    must_happen = frozenset({"answered stream", "cut stuck", "sample raise", "replayed whole", "rejected drafts"})
    return Soaked(record, log, NUM_BLOCKS, 1, 0, (), must_happen)


def planned(path: str = COMPLETIONS, **changes: Any) -> Planned:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "return_token_ids": True}
    body |= changes.pop("body", {})
    made = Planned(1, path, body, json.dumps(body).encode(), Manner(), frozenset({"completion"}))
    return replace(made, **changes)


def choice(**changes: Any) -> dict[str, Any]:
    whole = {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    return {**whole, "token_ids": [70, 71], **changes}


def answer(*choices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    count = sum(len(one["token_ids"]) for one in choices)
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count}
    return {"id": "cmpl-1", "seed": 5, "choices": list(choices), "usage": usage, **changes}


def whole(body: Any, status: int = 200, **headers: str) -> Reply:
    return Reply("whole", status, headers, json.dumps(body).encode())


def stream(*events: Any) -> Reply:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return Reply("whole", 200, {}, ("".join(lines) + "data: [DONE]\n\n").encode())


def error(code: str, kind: str = "server_error") -> dict[str, Any]:
    return {"error": {"message": "because", "type": kind, "param": None, "code": code}}
