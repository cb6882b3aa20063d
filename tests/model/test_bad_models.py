"""A config that does not fit is refused with the field, the tensor and the numbers, and nothing else is printed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from model.errors import ModelError
from model.loader import load_model
from model.quiet import quiet_transformers, reason_of
from tests.model.checkpoints import write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "checkpoint")


def refusal(folder: Path, executor: Any, **changes: Any) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError) as refused:
        load_model(folder, executor=executor, max_batched_tokens=20, home=folder.parent / "home")
    message = str(refused.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


@pytest.mark.parametrize("executor", ["generic", "auto", "fused"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 100, "num_attention_heads": 9}, ["(100)", "(9)", "heads"]),
        ({"hidden_size": "wide"}, ["hidden_size", "'wide'"]),
        ({"num_attention_heads": 0}, ["config.json", "num_attention_heads is 0"]),
        ({"num_key_value_heads": 0}, ["config.json", "num_key_value_heads is 0"]),
        ({"num_hidden_layers": -1}, ["config.json", "num_hidden_layers is -1"]),
        ({"num_key_value_heads": 1}, ["layers.0.self_attn.k_proj.weight", "(32, 64)", "(16, 64)"]),
        ({"vocab_size": 300}, ["(258, 64)", "(300, 64)"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, []),
    ],
    ids=str,
)
def test_the_reason_is_one_line_with_the_numbers_and_nothing_else_is_printed(
    folder: Path, capfd: pytest.CaptureFixture[str], executor: str, changes: dict[str, Any], words: list[str]
) -> None:
    capfd.readouterr()
    message = refusal(folder, executor, **changes)
    for word in words:
        assert word in message
    assert capfd.readouterr() == ("", "")


def test_a_config_inside_a_config_is_looked_at_too(folder: Path) -> None:
    assert "n_head is 0" in refusal(folder, "generic", text_config={"n_head": 0})


def test_stored_weights_that_the_model_does_not_use_are_told_in_one_line_of_ours(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    weights = load_file(folder / "model.safetensors")
    extra = {"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}
    save_file({**weights, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    capfd.readouterr()
    with caplog.at_level(logging.WARNING):
        load_model(folder, executor="generic", max_batched_tokens=20, home=folder.parent / "home")
    (record,) = caplog.records
    assert "no use for 1 stored weights: model.layers.9.mlp.up_proj.weight" in record.getMessage()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("Class error for 'x':\n    ValueError: 100 is no multiple of 9."), None),
        (KeyError("zap"), "KeyError: 'zap'"),
        (RuntimeError(""), "RuntimeError"),
    ],
    ids=str,
)
def test_all_lines_of_an_error_count(error: Exception, line: str | None) -> None:
    assert reason_of(error) == (line or "Class error for 'x': ValueError: 100 is no multiple of 9.")


def test_a_reason_is_bounded_and_ends_with_a_whole_word() -> None:
    reason = reason_of(ValueError("abcdefg " * 1000))
    assert len(reason) <= 404
    assert set(reason.split()) == {"abcdefg", "..."}
    assert len(reason_of(ValueError("a" * 5000))) <= 404
    assert len(reason_of(ValueError("a" * 5000 + " b"))) <= 404


def test_quiet_ends_with_its_block(capfd: pytest.CaptureFixture[str]) -> None:
    from tqdm.auto import tqdm

    before = transformers.utils.logging.get_verbosity()
    with quiet_transformers():
        list(tqdm([1]))
        transformers.utils.logging.get_logger("transformers").error("not heard")
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.get_verbosity() == before
    list(tqdm([1]))
    assert "1/1" in capfd.readouterr().err
