"""GET /metrics in Prometheus' text format."""

from __future__ import annotations

from fastapi import APIRouter, Response

from server.metrics import CONTENT_TYPE
from server.openapi import describe
from server.service import Service


def metrics_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get("/metrics", **describe(None, text="text/plain"))
    async def metrics() -> Response:
        await service.engine.refresh()
        # Whatever a scraper asks for, it gets the same format: OpenMetrics would rename the counters.
        return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    return router
