"""Labels with fixed words, and the words."""

from __future__ import annotations

from scheduler.audit import AUDIT_RESULTS
from server.metrics.kinds import Label
from server.tracing.tracing import TRACE_RESULTS
from specdec.plan import STAGES

BUILD_PARTS = ("positions", "slots", "block_tables", "mask")
FINISH_REASONS = ("stop", "length", "abort", "error")
GRAMMAR_RESULTS = ("accepted", "refused", "timeout", "crashed")
KV_STATES = ("free", "used", "cached")
KV_SLOT_STATES = ("used", "last_block", "reserved", "draft")
# Every reason that scheduler/errors.py has, and the server's own.
REJECTIONS = (
    "queue_full", "queue_tokens", "context_length", "kv_capacity", "shutting_down", "unhealthy",
    "connections", "bodies", "texts", "templates", "grammars",
    "invalid_api_key", "rate_limit_requests", "rate_limit_tokens", "rate_limit_size",
)  # fmt: skip
# Those that an answer usually has; others appear when they are sent. 0: the client left before there was one.
HTTP_CODES = ("0", "200", "400", "401", "404", "405", "408", "413", "429", "500", "503", "504")

STAGE = Label("stage", "of a speculative step", STAGES)
PART = Label("part", "of a batch", BUILD_PARTS)
FINISHED_REASON = Label("finished_reason", "how a choice ended", FINISH_REASONS)
GRAMMAR_RESULT = Label("result", "of compiling it", GRAMMAR_RESULTS)
KV_STATE = Label("state", "of a block", KV_STATES)
KV_SLOT_STATE = Label("state", "of a slot of an allocated block", KV_SLOT_STATES)
REASON = Label("reason", "why a request was refused", REJECTIONS)
TRACE_RESULT = Label("result", "what became of it", TRACE_RESULTS)
CODE = Label("code", "HTTP status; `0`: the client left before there was one", HTTP_CODES)
AUDIT_RESULT = Label("result", "of an audit", AUDIT_RESULTS)
POSITION = Label("position", "place in the draft, from 0 to one below the most draft tokens")
DRAFTER = Label("drafter", "who drafted; `auto` is none: it picks one of these")
