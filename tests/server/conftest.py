"""One server for the session: it is never restarted, so every test also finds what the ones before left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.service import Service
from tests.server.builders import build_service, running, save_tiny_model
from tests.server.chat_builders import save_chat_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def model_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def service(tiny_model: Path, model_home: Path) -> Service:
    return build_service(tiny_model, model_home)


@pytest.fixture(scope="session")
def base(service: Service) -> Iterator[str]:
    with running(service) as url:
        yield url


@pytest.fixture(scope="session")
def http(base: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture(scope="session")
def chat_service(tiny_model: Path, model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Service:
    return build_service(save_chat_model(tiny_model, tmp_path_factory.mktemp("chat") / "model"), model_home)


@pytest.fixture(scope="session")
def chat_base(chat_service: Service) -> Iterator[str]:
    with running(chat_service) as url:
        yield url


@pytest.fixture(scope="session")
def chat_http(chat_base: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=chat_base, timeout=60, trust_env=False) as client:
        yield client
