"""GET /v1/models and one of them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from server.openapi import describe
from server.resolve import check_model
from server.service import Service
from server.shapes import ModelCard, ModelList


def models_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["models"])
    cards = {
        name: {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "truedraft",
            "max_model_len": service.facts.max_model_len,
        }
        for name in service.facts.names
    }

    @router.get("/v1/models", **describe(ModelList))
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": list(cards.values())}

    @router.get("/v1/models/{model:path}", **describe(ModelCard, errors=(400, 401, 404, 500)))
    async def get_model(model: str) -> dict[str, Any]:
        check_model(model, service.facts)
        return cards[model]

    return router
