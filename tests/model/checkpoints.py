"""Builders of tiny checkpoints on disk: a folder of safetensors, and a GGUF file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

SPECIAL_TOKENS = ("<|end|>", "<|start|>")
HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, CONTEXT = 64, 2, 4, 2, 64, 128


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes with."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_folder(folder: Path, *, seed: int = 0) -> Path:
    """A tiny random llama in safetensors with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *byte_alphabet()])}
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=INTERMEDIATE,
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|start|>").save_pretrained(
        folder
    )
    return folder


def write_gguf(path: Path, *, pre_tokenizer: str = "smollm", seed: int = 0) -> Path:
    """A tiny random llama as GGUF: matrices in Q8_0, norms in F32, a byte-level tokenizer with one merge."""
    import gguf

    tokens = [*SPECIAL_TOKENS, *byte_alphabet(), "th"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    generator = np.random.default_rng(seed)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = generator.normal(0, 0.05, (rows, columns)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))

    matrix("token_embd", len(tokens), HIDDEN)
    norm("output_norm")
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        norm(f"{block}.ffn_norm")
        matrix(f"{block}.attn_q", HIDDEN, HIDDEN)
        matrix(f"{block}.attn_k", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        matrix(f"{block}.attn_v", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        matrix(f"{block}.attn_output", HIDDEN, HIDDEN)
        matrix(f"{block}.ffn_gate", INTERMEDIATE, HIDDEN)
        matrix(f"{block}.ffn_up", INTERMEDIATE, HIDDEN)
        matrix(f"{block}.ffn_down", HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
