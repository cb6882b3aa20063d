"""One server for all tests of tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from server.service import Service
from server.tools.formats import ToolFormat
from tests.server.builders import build_service
from tests.server.fixtures import server_fixtures
from tests.server.tool_builders import TEMPLATE, save_tool_model
from tests.server.tools.asking import FORMATS, use


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, model_home: Path) -> Service:
    return build_service(save_tool_model(tmp_path_factory.mktemp("tools") / "model", "hermes"), model_home)


base, http = server_fixtures("session")


@pytest.fixture(scope="session")
def client(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(params=FORMATS)
def tool_format(request: pytest.FixtureRequest, service: Service) -> Iterator[ToolFormat]:
    """The server, as if its model wrote calls so."""
    with use(service, FORMATS[request.param], TEMPLATE) as chosen:
        yield chosen
