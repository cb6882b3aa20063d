"""Tiny random models of many families, from transformers' own configs: no files, no network."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from kvcache.storage import TARGET_PLANES
from model.attach import ATTENTION_NAME, register
from model.gate import check_config, context_length
from model.generic import GenericExecutor
from model.interface import ModelInfo
from model.structure import examine

VOCAB = 97
_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD_DIM = {"head_dim": 16}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}

# family -> what its config needs beyond _LLAMA
SERVABLE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7, **_HEAD_DIM},
    "qwen2": {},
    "qwen3": _HEAD_DIM,
    "gemma": _HEAD_DIM,
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 2.0, **_HEAD_DIM, **_ALTERNATING},
    "gemma3_text": {"sliding_window": 5, **_HEAD_DIM, **_ALTERNATING},
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 3.0},
    "cohere": {},
    "cohere2": {"sliding_window": 5, **_ALTERNATING},
    "glm4": _HEAD_DIM,
    "starcoder2": {"sliding_window": 6},
    "stablelm": {},
    "smollm3": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, **_HEAD_DIM, **_ALTERNATING},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS, **_HEAD_DIM},
    "deepseek_v3": {"n_routed_experts": 4, **_EXPERTS, **_MLA},
}

# family -> (config, what the refusal must say)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_layer": 2, "n_head": 4, "seq_length": 512}, "0 times"),
    "jamba": ({"num_experts": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}, "type linear"),
    "qwen3_next": ({"num_experts": 4, **_EXPERTS, **_HEAD_DIM}, "type linear"),
    "olmo_hybrid": ({}, "type linear"),
    "mamba": ({"state_size": 4}, "type linear"),
    "llama4_text": ({"num_local_experts": 2, "intermediate_size_mlp": 64, **_HEAD_DIM}, "chunked_attention"),
    "openai-gpt": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}, "0 times"),
    "xglm": ({"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64}, "0 times"),
    "diffllama": ({}, "2 times"),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}, "type hybrid"),
}


def build_config(family: str, **changes: Any) -> PretrainedConfig:
    extra = SERVABLE[family] if family in SERVABLE else REFUSED[family][0]
    return AutoConfig.for_model(family, **{**_LLAMA, **extra, **changes})


def build_model(config: PretrainedConfig, dtype: str = "float32") -> transformers.PreTrainedModel:
    """A random model with weights drawn so wide that its attention matters."""
    register()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
            elif "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0.0, 0.1)
    return model.to(getattr(torch, dtype)).eval()


def build_executor(
    family: str = "llama", dtype: str = "float32", *, plane_prefix: str = TARGET_PLANES, **changes: Any
) -> GenericExecutor:
    """Through the same checks of config and structure as a checkpoint; the behaviour is not compared."""
    config = build_config(family, **changes)
    check_config(config)
    model = build_model(config, dtype)
    structure = examine(model, plane_prefix)
    text = config.get_text_config()
    info = ModelInfo(
        name=family,
        architecture=type(model).__name__,
        model_type=config.model_type,
        dtype=dtype,
        device="cpu",
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=structure.vocab_size,
        embedding_rows=model.get_input_embeddings().weight.shape[0],
        max_model_len=context_length(config),
        eos_token_ids=(2,),
        weights_hash="0" * 64,
    )
    return GenericExecutor(model, structure, info)
