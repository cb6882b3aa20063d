"""The endpoint by which faults are armed: it exists in front of the server's own application, for this command alone.

::

    POST /faults    {"point": "sample", "action": "raise", "match": 7}    -> {"number": 1}
    GET /faults     {"faults": [{"number", "fault", "passed", "fired", "hanging"}]}
    DELETE /faults  disarms all, and whoever hangs goes on                -> {"faults": [...]} as they were
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bench.faults.faults import Armed, Fault, Faults

PATH = "/faults"
_FAULT = TypeAdapter(Fault)


class FaultsEndpoint:
    """``app``, and the endpoint beside it."""

    def __init__(self, app: ASGIApp, faults: Faults) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if request.method == "POST":
            try:
                fault = _FAULT.validate_json(await request.body(), strict=True, extra="forbid")
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(map(str, first["loc"])) or "the body"
                return JSONResponse({"error": f"{where}: {first['msg']}"}, 400)
            return JSONResponse({"number": self._faults.arm(fault)})
        if request.method in ("GET", "DELETE"):
            shown = {"faults": [_shown(armed) for armed in self._faults.armed]}
            if request.method == "DELETE":
                self._faults.clear()
            return JSONResponse(shown)
        return JSONResponse({"error": "POST, GET or DELETE"}, 405)


def _shown(armed: Armed) -> dict[str, Any]:
    return {
        "number": armed.number,
        "fault": asdict(armed.fault),
        "passed": armed.passed,
        "fired": armed.fired,
        "hanging": armed.hanging,
    }
