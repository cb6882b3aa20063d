"""What became of one request, judged by what its client saw."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.replay.joining import BadRecord
from bench.replay.record import Answer, read_answer
from bench.soak.events import StreamFault, read_events
from bench.soak.requests import CHAT, Planned
from bench.soak.wire import Reply

_WORKER_DIED = "cannot be compiled: it is too large or too deep"  # what the server concludes from it

# - answered: all of an answer came
# - refused: before it was taken in, with a reason that fits
# - failed: the server said that it failed
# - late: its deadline came first
# - left: the client did not want to know
# - cut: the server closed the connection of a client who did not read
# - hung: nothing more came in time
# - wrong: anything else
Kind = Literal["answered", "refused", "failed", "late", "left", "cut", "hung", "wrong"]


@dataclass(frozen=True, slots=True)
class Outcome:
    number: int
    kind: Kind
    features: frozenset[str]
    status: int | None = None
    completion_tokens: int | None = None  # as the answer's usage has it
    problem: str = ""  # of what is no answer: one line
    retry_after: bool = False  # a refusal said when to come back

    @property
    def request_id(self) -> str:
        return f"soak-{self.number}"


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole answer, and the seed that was used."""

    answer: Answer
    seed: int


def judge(planned: Planned, reply: Reply) -> tuple[Outcome, Answered | None]:
    """The outcome, and the answer if all of one came."""
    return _Judge(planned, reply).judge()


class _Judge:
    def __init__(self, planned: Planned, reply: Reply) -> None:
        self._planned = planned
        self._reply = reply

    def judge(self) -> tuple[Outcome, Answered | None]:
        reply = self._reply
        if reply.end == "left":
            return self._outcome("left"), None
        if reply.end == "hung":
            return self._outcome("hung", f"nothing more came after {len(reply.body)} bytes"), None
        if reply.end == "cut":
            if self._planned.manner.stuck:
                return self._outcome("cut"), None
            return self._wrong(f"the connection was closed after {len(reply.body)} bytes"), None
        try:
            if reply.status == 200:
                return self._success()
            error = json.loads(reply.body)["error"]
            return self._error(error, reply.status), None
        except (StreamFault, BadRecord, ValueError, LookupError, TypeError) as error:
            return self._wrong(f"an answer of status {reply.status} that cannot be read: {error!r}"), None

    def _success(self) -> tuple[Outcome, Answered | None]:
        planned = self._planned
        if planned.expected is not None:
            return self._wrong(f"taken, though it had to be refused with {planned.expected}"), None
        if planned.body.get("stream"):
            pieces = read_events(self._reply.body)
            error = next((piece["error"] for piece in pieces if "error" in piece), None)
            if error is not None:
                return self._error(error, None), None
            wanted = planned.body.get("stream_options", {}).get("include_usage", False)
            if wanted != any(piece["choices"] == [] for piece in pieces):
                return self._wrong(f"a usage chunk was {'' if wanted else 'not '}asked for"), None
        else:
            pieces = [json.loads(self._reply.body)]
        answer = read_answer(pieces, chat=planned.path == CHAT)
        problem = self._incomplete(answer)
        if problem:
            return self._wrong(problem), None
        tokens = None if answer.usage is None else answer.usage["completion_tokens"]
        return self._outcome("answered", completion_tokens=tokens), Answered(answer, pieces[0]["seed"])

    def _incomplete(self, answer: Answer) -> str:
        """Why it is not all that was asked for; empty if it is."""
        body = self._planned.body
        count = (len(body["prompt"]) if "several prompts" in self._planned.features else 1) * body.get("n", 1)
        if list(answer.outputs) != list(range(count)):
            return f"{count} choices were asked for, {list(answer.outputs)} came"
        for index, output in answer.outputs.items():
            if output["finish_reason"] not in ("stop", "length", "tool_calls"):
                return f"choice {index} has the finish reason {output['finish_reason']}"
        if answer.usage is not None and body.get("return_token_ids") and "best_of" not in body:
            ids = sum(len(output.get("token_ids", ())) for output in answer.outputs.values())
            if ids != answer.usage["completion_tokens"]:
                return f"usage counts {answer.usage['completion_tokens']} tokens, {ids} came"
        return ""

    def _error(self, error: Mapping[str, Any], status: int | None) -> Outcome:
        """``status`` is None for an error in a stream that had begun."""
        planned = self._planned
        if sorted(error) != ["code", "message", "param", "type"]:
            return self._wrong(f"an error with the members {sorted(error)}")
        code, message = error["code"], f"{error['code']}: {error['message']}"
        if code == "timeout" and "deadline" in planned.features:
            return self._outcome("late", message)
        if code == "server_error" or _WORKER_DIED in message:
            return self._outcome("failed", message)
        if (status == 503 and code == "overloaded") or (status is not None and status == planned.expected):
            return self._outcome("refused", message, retry_after="retry-after" in self._reply.headers)
        return self._wrong(f"{'in a stream' if status is None else f'status {status}'}: {message}")

    def _wrong(self, problem: str) -> Outcome:
        return self._outcome("wrong", problem)

    def _outcome(
        self, kind: Kind, problem: str = "", *, completion_tokens: int | None = None, retry_after: bool = False
    ) -> Outcome:
        return Outcome(
            self._planned.number,
            kind,
            self._planned.features,
            self._reply.status,
            completion_tokens=completion_tokens,
            problem=problem,
            retry_after=retry_after,
        )


def count_kinds(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many of each kind, most first."""
    counts: dict[str, int] = {}
    for one in outcomes:
        counts[one.kind] = counts.get(one.kind, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
