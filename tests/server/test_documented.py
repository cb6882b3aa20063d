"""A walk through a live server: each of its endpoints, metrics and settings stands in the docs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import BaseRoute, Route

from server.api_page.page import DOCS, load_docs
from server.app import create_app
from server.metrics import PREFIX
from server.page_files import page_paths
from server.service import Service
from server.setting_flags import flag_name
from server.settings import ENV_PREFIX
from server.ui.shell import PAGE, load_shell, open_paths
from tests.test_docs import API, METRICS, ROOT, codes, table_rows

# Parts of pages.
PARTS = (open_paths(load_shell(keys=False)) - {PAGE}) | (page_paths(DOCS, load_docs(keys=False)) - {DOCS})
HIDDEN = {f"GET {path}" for path in PARTS}


def application(service: Service) -> FastAPI:
    """What the middleware around it leads to."""
    app = create_app(service)
    while not isinstance(app, FastAPI):
        app = vars(app).get("app") or vars(app)["_app"]
    return app


def endpoints(routes: Sequence[BaseRoute]) -> Iterator[str]:
    """None of ours is mounted or has a prefix."""
    for route in routes:
        included = getattr(route, "original_router", None)  # a router that FastAPI has not unfolded
        if included is not None:
            yield from endpoints(included.routes)
            continue
        assert isinstance(route, APIRoute | Route), route
        path = route.path.replace(":path", "")
        yield from (f"{method} {path}" for method in route.methods or () if method != "HEAD")


@pytest.fixture(scope="module")
def documented_endpoints() -> set[str]:
    return set().union(*(codes(row[0]) for row in table_rows(API[: API.index("\n## ")])))


def test_every_endpoint_is_documented_and_no_other(service: Service, documented_endpoints: set[str]) -> None:
    assert set(endpoints(application(service).routes)) - HIDDEN == documented_endpoints


def test_every_metric_that_it_tells_is_documented(http: httpx.Client) -> None:
    families = list(text_string_to_metric_families(http.get("/metrics").text))
    assert families
    for family in families:
        name = family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
        assert f"### `{name}`\n" in METRICS


def test_every_setting_that_it_tells_is_documented(http: httpx.Client) -> None:
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    settings = http.get("/v1/server_info").json()["settings"]
    assert settings
    for name in settings:
        assert f"| `{flag_name(name)}` | `{ENV_PREFIX}{name.upper()}` |" in page
