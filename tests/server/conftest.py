"""One server for the session: it is never restarted, so every test also finds what the ones before left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.service import Service
from tests.server.builders import build_service, save_tiny_model
from tests.server.chat_builders import save_chat_model
from tests.server.fixtures import server_fixtures


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def model_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def service(tiny_model: Path, model_home: Path) -> Service:
    return build_service(tiny_model, model_home)


base, http = server_fixtures("session")


@pytest.fixture(scope="session")
def chat_service(tiny_model: Path, model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Service:
    return build_service(save_chat_model(tiny_model, tmp_path_factory.mktemp("chat") / "model"), model_home)


chat_base, chat_http = server_fixtures("session", service="chat_service", base="chat_base")
