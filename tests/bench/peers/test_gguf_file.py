"""The GGUF file that llama.cpp gets is the checkpoint: read back by the import of GGUF, which others wrote."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from bench.peers.gguf_file import GgufError, write_gguf
from model.gguf_import import convert_gguf
from tests.model.checkpoints import write_folder


def checkpoint(tmp_path: Path) -> Path:
    """A tiny llama whose tokenizer has a merge, as every real one has: in the place of a byte that no test writes."""
    folder = write_folder(tmp_path / "model")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    vocab = content["model"]["vocab"]
    del vocab[max(vocab, key=vocab.__getitem__)]
    vocab["th"] = len(vocab)
    content["model"]["merges"] = [["t", "h"]]
    path.write_text(json.dumps(content), "utf-8")
    return folder


def read_back(folder: Path, tmp_path: Path, precision: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors of the checkpoint, and those of its GGUF converted back."""
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, precision)
    convert_gguf(path, tmp_path / "back", lambda line: None)
    return load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_weights_come_back_to_the_bit(tmp_path: Path, precision: str) -> None:
    before, after = read_back(checkpoint(tmp_path), tmp_path, precision)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_int8_is_within_half_a_step_of_its_block_and_norms_stay_whole(tmp_path: Path) -> None:
    before, after = read_back(checkpoint(tmp_path), tmp_path, "int8")
    for name, tensor in before.items():
        if tensor.ndim == 1:
            assert torch.equal(tensor, after[name])
            continue
        blocks = tensor.float().reshape(-1, 32)
        step = blocks.abs().amax(1, keepdim=True) / 127
        worst = (blocks - after[name].float().reshape(-1, 32)).abs()
        assert (worst <= 0.52 * step + 2**-8 * blocks.abs()).all(), name  # and bf16's own rounding on the way back
        assert worst.max() > 0


def test_the_tokenizer_comes_back_the_same(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = checkpoint(tmp_path)
    read_back(folder, tmp_path, "bf16")
    texts = ["<|start|>Hello the 1234!<|end|>", "naïve café 你好 🙂", "  two  spaces\n\n"]
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "back"))
    assert [ours(text)["input_ids"] for text in texts] == [theirs(text)["input_ids"] for text in texts]


def test_special_tokens_are_marked_and_nothing_is_put_in_front(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    write_gguf(folder, tmp_path / "model.gguf", "bf16")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")

    def value(name: str) -> object:
        field = reader.get_field(name)
        assert field is not None, name
        return field.contents()

    types = value("tokenizer.ggml.token_type")
    assert isinstance(types, list)
    assert types[:3] == [3, 3, 1]
    assert value("tokenizer.ggml.add_bos_token") is False
    assert (value("tokenizer.ggml.bos_token_id"), value("tokenizer.ggml.eos_token_id")) == (1, 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "yarn"),
        ({"attention_bias": True}, "biases"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path, change: dict[str, object], named: str) -> None:
    folder = checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **change}), "utf-8")
    with pytest.raises(GgufError, match=named):
        write_gguf(folder, tmp_path / "model.gguf", "bf16")
