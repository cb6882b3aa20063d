"""What a client saw is judged by what it asked for."""

from __future__ import annotations

from typing import Any

import pytest

from bench.soak.outcome import judge
from bench.soak.requests import Planned
from bench.soak.wire import Manner, Reply
from tests.bench.soak.builders import answer, choice, error, planned, stream, whole

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
STREAMED = planned(body={"stream": True})
PIECES = [
    {"seed": 5, "choices": [choice(text="a", token_ids=[70], finish_reason=None)]},
    {"seed": 5, "choices": [choice(text="b", token_ids=[71])]},
]
LAST = {"seed": 5, "choices": [], "usage": answer(choice())["usage"]}
STUCK = planned(manner=Manner("stuck", stuck=True))

CASES: dict[str, tuple[Planned, Reply, str]] = {
    "a whole answer": (planned(), whole(answer(choice())), "answered"),
    "a whole stream": (STREAMED, stream(*PIECES), "answered"),
    "a stream with usage": (planned(body=USAGE), stream(*PIECES, LAST), "answered"),
    "a stream without the usage that it should have": (planned(body=USAGE), stream(*PIECES), "wrong"),
    "a stream with usage that nobody wanted": (STREAMED, stream(*PIECES, LAST), "wrong"),
    "a stream that goes on after its end": (STREAMED, stream(PIECES[1], PIECES[1]), "wrong"),
    "a stream without an end": (STREAMED, stream(PIECES[0]), "wrong"),
    "a stream without [DONE]": (STREAMED, Reply("whole", 200, {}, stream(*PIECES).body[:-14]), "wrong"),
    "a choice is missing": (planned(body={"n": 2}), whole(answer(choice())), "wrong"),
    "a choice too many": (planned(), whole(answer(choice(), choice(index=1))), "wrong"),
    "usage counts others than came": (planned(), whole(answer(choice(), usage={"completion_tokens": 3})), "wrong"),
    "an end that is none": (planned(), whole(answer(choice(finish_reason="abort"))), "wrong"),
    "no JSON": (planned(), Reply("whole", 200, {}, b"{"), "wrong"),
    "the client left": (planned(), Reply("left", 200), "left"),
    "nothing came": (planned(), Reply("hung"), "hung"),
    "the connection was closed": (planned(), Reply("cut", 200, {}, b"{"), "wrong"),
    "the connection of one who does not read": (STUCK, Reply("cut", 200), "cut"),
    "the server failed": (planned(), whole(error("server_error"), 500), "failed"),
    "the server failed in a stream": (STREAMED, stream(PIECES[0], error("server_error")), "failed"),
    "overload": (planned(), whole(error("overloaded"), 503), "refused"),
    "overload in a stream that had begun": (STREAMED, stream(error("overloaded")), "wrong"),
    "the refusal that is due": (planned(expected=404), whole(error("model_not_found"), 404), "refused"),
    "another refusal": (planned(expected=404), whole(error("invalid_value"), 400), "wrong"),
    "a refusal that is not due": (planned(), whole(error("invalid_value"), 400), "wrong"),
    "taken, though it is not due": (planned(expected=400), whole(answer(choice())), "wrong"),
    "too late": (planned(features=frozenset({"deadline"})), whole(error("timeout"), 504), "late"),
    "too late without a deadline": (planned(), whole(error("timeout"), 504), "wrong"),
    "it shuts down": (planned(), whole(error("shutting_down"), 503), "wrong"),
    "an error without its four members": (planned(), whole({"error": {"code": "server_error"}}, 500), "wrong"),
    "no answer of ours": (planned(), whole({"detail": "Not Found"}, 404), "wrong"),
}


@pytest.mark.parametrize(("asked", "reply", "kind"), CASES.values(), ids=CASES.keys())
def test_an_outcome_is_what_the_request_makes_of_the_reply(asked: Planned, reply: Reply, kind: str) -> None:
    outcome, answered = judge(asked, reply)
    assert outcome.kind == kind, outcome.problem
    assert (answered is not None) == (kind == "answered")
    assert bool(outcome.problem) == (kind in ("wrong", "failed", "refused", "late", "hung"))


@pytest.mark.parametrize("headers", [{}, {"retry-after": "1"}])
def test_a_refusal_tells_whether_it_says_when_to_come_back(headers: dict[str, str]) -> None:
    outcome, _ = judge(planned(), whole(error("overloaded"), 503, **headers))
    assert outcome.retry_after == bool(headers)


def test_a_stream_and_its_whole_answer_are_the_same() -> None:
    answers: list[Any] = [
        judge(asked, reply)[1] for asked, reply in ((STREAMED, stream(*PIECES)), (planned(), whole(answer(choice()))))
    ]
    assert answers[0].answer.outputs == answers[1].answer.outputs
    assert answers[0].seed == answers[1].seed == 5
