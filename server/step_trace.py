"""Where the tokens of an answer come from, step by step: what ``speculation.trace`` asks for."""

from __future__ import annotations

from typing import Any

from scheduler.request import ChoiceEvent
from server.logprobs import TokenBytes, token_text


def traced_steps(event: ChoiceEvent, tokenizer: TokenBytes) -> list[dict[str, Any]]:
    """The step that brought the event's tokens; none for an event that only says how its choice ended."""
    trace = event.trace
    if trace is None:
        return []
    accepted = trace.num_accepted
    return [
        {
            "drafted": list(trace.draft_token_ids),
            "accepted": accepted,
            "drafter": trace.drafter or None,
            "emitted": list(event.token_ids),
            "texts": list(event.token_texts),
            "rejected_texts": [token_text(tokenizer, token_id) for token_id in trace.draft_token_ids[accepted:]],
        }
    ]
