from __future__ import annotations

import pytest

from bench.tiny_models import save_tiny_model
from model.loader import LoadedModel, load_model


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A random llama with a tokenizer and a context of 2048 tokens."""
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))
    # A short budget keeps the probe short.
    return load_model(folder, home=tmp_path_factory.mktemp("home"), name="tiny", max_batched_tokens=80)
