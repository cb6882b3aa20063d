"""A checkpoint folder as a GGUF file, for llama.cpp: the same weights, the same tokenizer.

Written with the ``gguf`` package, which converts no checkpoints by itself. Only what our default model needs: llama's
architecture with its default rotary embedding, and byte-level BPE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

KINDS = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "fp32": gguf.GGMLQuantizationType.F32,
    "int8": gguf.GGMLQuantizationType.Q8_0,  # blocks of 32 weights with one fp16 scale
}
_FILE_TYPES = {
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "fp32": gguf.LlamaFileType.ALL_F32,
    "int8": gguf.LlamaFileType.MOSTLY_Q8_0,
}


class GgufError(ValueError):
    """The checkpoint cannot be written as GGUF here; one line."""


def write_gguf(folder: Path, path: Path, precision: str) -> None:
    """Matrices in ``precision`` (KINDS), vectors in fp32, as llama.cpp's own conversion does. Raises GgufError."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    rope = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or {}),
    }
    if config.get("model_type") != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise GgufError(f"{folder}: only a llama without biases can be written, got {config.get('model_type')!r}")
    if rope.get("rope_type", "default") != "default":
        raise GgufError(f"{folder}: only the default rotary embedding can be written, got {rope['rope_type']!r}")
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_file_type(_FILE_TYPES[precision])
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, folder, config)
    _add_tensors(writer, folder, config, precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer: gguf.GGUFWriter, folder: Path, config: Mapping[str, Any], precision: str) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    kind = KINDS[precision]
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                to = names.get_name(name, try_suffixes=(".weight",))
                if to is None:
                    raise GgufError(f"{file}: GGUF has no name for the tensor {name}")
                values: npt.NDArray[np.float32] = tensors.get_tensor(name).float().numpy()
                projection = name.split(".")[-2]
                if projection in heads:
                    values = _interleaved(values, heads[projection])
                if values.ndim == 1 or kind is gguf.GGMLQuantizationType.F32:
                    writer.add_tensor(to, np.ascontiguousarray(values))
                else:
                    writer.add_tensor(to, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _interleaved(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """GGUF's llama rotates pairs that lie side by side, checkpoints for transformers halves of a head."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: Mapping[str, Any]) -> None:
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    model = content["model"]
    if model["type"] != "BPE":
        raise GgufError(f"{folder}: only byte-level BPE can be written, got a tokenizer {model['type']}")
    tokens: list[str | None] = [None] * config["vocab_size"]
    types = [gguf.TokenType.UNUSED] * len(tokens)
    for token, i in model["vocab"].items():
        tokens[i], types[i] = token, gguf.TokenType.NORMAL
    for added in content["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(content["pre_tokenizer"], folder))
    writer.add_token_list([f"[unused{i}]" if token is None else token for i, token in enumerate(tokens)])
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    for name, add in (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
        ("pad_token_id", writer.add_pad_token_id),
    ):
        value = config.get(name)
        if isinstance(value, list):
            value = value[0] if value else None
        if value is not None:
            add(value)
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text("utf-8"))


def _pre_tokenizer(content: Mapping[str, Any], folder: Path) -> str:
    """GGUF's name for it."""
    parts: Sequence[Mapping[str, Any]] = content.get("pretokenizers") or [content]
    kinds = [part["type"] for part in parts]
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return "smollm"
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    raise GgufError(f"{folder}: GGUF has no name here for the pre-tokenizer {' + '.join(kinds)}")
