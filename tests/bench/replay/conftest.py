"""A tiny model behind a fresh service, for all tests of a replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from model.loader import LoadedModel, load_model
from server.assemble import assemble
from server.service import Service
from tests.server.builders import MODEL_NAME, build_settings, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    home = tmp_path_factory.mktemp("home")
    return load_model(folder, executor="generic", num_threads=1, max_batched_tokens=128, home=home)


@pytest.fixture(scope="module")
def fresh(loaded: LoadedModel) -> Callable[[], Service]:
    return lambda: assemble(build_settings(), loaded, (MODEL_NAME,))
