"""W3C Trace Context: the trace that a request belongs to for whoever sent it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_STATE = 4096  # characters of all tracestate headers together; a longer state is left out, as the standard allows

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceParent:
    trace_id: str  # 32 lower-case hexadecimal digits, not all 0
    span_id: str  # 16: of the span that sent the request
    flags: int  # bit 0: sampled
    state: str = ""  # of the vendors on the way, to be passed on as it is


def read_parent(headers: Iterable[tuple[bytes, bytes]]) -> TraceParent | None:
    """What ``traceparent`` and ``tracestate`` say; None if there is no parent, more than one, or a malformed one.

    Of a version to come, the part that this version has is read, as the standard wants it.
    """
    parents, states = [], []
    for name, value in headers:  # an ASGI server has them in lower case
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value.strip())
    if len(parents) != 1 or (match := _PARENT.fullmatch(parents[0].strip())) is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == b"ff" or (version == b"00" and rest) or not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    state = b",".join(filter(None, states)).decode("latin-1")
    return TraceParent(trace_id.decode(), span_id.decode(), int(flags, 16), state if len(state) <= MAX_STATE else "")
