"""Subjects: the default model as it is served, and tiny random models on every other path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from model.loader import LoadedModel, load_model
from tests.exactness.builders import Subject, build_requests, encoded_prompts
from tests.exactness.tiny import TINY_MODELS, load_tiny


@pytest.fixture(scope="session")
def smol_fp32(default_model_folder: Path) -> LoadedModel:
    # What its probe finds is not what is asked here, and that of all sizes takes as long as the tests.
    return load_model(default_model_folder, dtype="float32", executor="auto", max_batched_tokens=64)


@pytest.fixture(scope="session")
def smol_bf16(default_model_folder: Path) -> LoadedModel:
    return load_model(default_model_folder, dtype="bfloat16", executor="auto")


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def subjects() -> dict[str, Subject]:
    """Those of this run so far: what comes with a parameter is made anew for each file."""
    return {}


@pytest.fixture(scope="session", params=["SmolLM2 bf16", *TINY_MODELS])
def subject(
    request: pytest.FixtureRequest, subjects: dict[str, Subject], tmp_path_factory: pytest.TempPathFactory
) -> Subject:
    name: str = request.param
    if name not in subjects:
        subjects[name] = _make_subject(name, request, tmp_path_factory)
    return subjects[name]


def _make_subject(name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    if name == "SmolLM2 bf16":
        model: LoadedModel = request.getfixturevalue("smol_bf16")
        prompts = encoded_prompts(model.tokenizer, longest=150, count=16)
        stops = frozenset(model.info.eos_token_ids)
        return Subject(name, model.executor, build_requests(prompts, 14, stops))
    tiny = TINY_MODELS[name]
    model = load_tiny(tiny, tmp_path_factory.mktemp("tiny"))
    return Subject(name, model.executor, build_requests(tiny.prompts(), 12, frozenset()))


@pytest.fixture(scope="session")
def quick_subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """The fastest of the tiny models, for tests of many runs: 32 short requests of every kind."""
    name = "mistral bf16"
    model = load_tiny(TINY_MODELS[name], tmp_path_factory.mktemp("tiny"))
    prompts = [prompt[:70] for prompt in TINY_MODELS[name].prompts()]
    return Subject(name, model.executor, build_requests(prompts + [p[::-1] for p in prompts], 8, frozenset()))
