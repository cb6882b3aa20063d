"""Is it alive, is it ready, what is it: /live, /health, /version, /v1/server_info."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from server.errors import unavailable
from server.openapi import OPEN, describe
from server.service import Service
from server.shapes import ServerInfo, Status, Version
from server.version import VERSION


def status_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.head("/live", include_in_schema=False)
    @router.get("/live", **describe(Status, errors=(*OPEN, 503)))
    async def live() -> dict[str, str]:
        """200 unless only a new start can help: the engine failed, or a step does not end. Then 503 with the reason."""
        reason = service.lost_reason
        if reason is not None:
            raise unavailable("not_alive", reason, retry_after=5)
        return {"status": "alive"}

    @router.head("/health", include_in_schema=False)
    @router.get("/health", **describe(Status, errors=(500, 503)))
    async def health() -> dict[str, str]:
        """200 if new requests are welcome, else 503 with the reason."""
        reason = service.unready_reason
        if reason is not None:
            raise unavailable("not_ready", reason, retry_after=5)
        return {"status": "ready"}

    @router.get("/version", **describe(Version))
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @router.get("/v1/server_info", **describe(ServerInfo))
    async def server_info() -> dict[str, Any]:
        await service.engine.refresh()
        return {
            **service.info,
            "speculation": service.speculation_info,
            "audit": service.audit_info,
            "structured_output": service.grammars.info,
        }

    return router
