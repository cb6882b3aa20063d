"""Builders for the kernel and fused-executor tests: paged storage of one layer, tiny models, references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.fused import FusedExecutor
from model.int8 import Quantize
from model.interface import ForwardOutput, ModelInfo
from model.kernels import Kernels, KernelsChoice, find_kernels

DTYPES = (torch.bfloat16, torch.float32)


def need_kernels() -> Kernels:
    """The kernels; skips the test, with the reason, where they cannot run."""
    kernels, reason = find_kernels()
    if kernels is None:
        pytest.skip(f"no compiled kernels: {reason}")
    return kernels


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class PagedLayer:
    """One layer's planes, filled from contiguous per-sequence K and V ``[context, H_kv, D]``; the rest is poison."""

    k_plane: Tensor
    v_plane: Tensor
    tables: list[list[int]]
    block_size: int

    @classmethod
    def build(
        cls,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        block_size: int,
        seed: int = 0,
        poison: float = float("nan"),
    ) -> PagedLayer:
        counts = [-(-len(k) // block_size) for k in keys]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
        planes = [
            torch.full(((len(order) + 1) * block_size, *source[0].shape[1:]), poison, dtype=source[0].dtype)
            for source in (keys, values)
        ]
        tables = []
        for s, count in enumerate(counts):
            table, order = order[:count], order[count:]
            for plane, source in zip(planes, (keys, values), strict=True):
                for position in range(len(source[s])):
                    block = table[position // block_size]
                    plane[block * block_size + position % block_size] = source[s][position]
            tables.append(table)
        return cls(planes[0], planes[1], tables, block_size)

    def batch(self, rows: Sequence[tuple[int, int, int]]) -> PackedBatch:
        """``rows``: (sequence, first position, count) per span."""
        spans = [RowSpan([0] * count, first, self.tables[s], count) for s, first, count in rows]
        return PackedBatch.build(
            spans, block_size=self.block_size, scratch_block=len(self.k_plane) // self.block_size - 1
        )


def attend(
    kernels: Kernels, query: Tensor, layer: PagedLayer, batch: PackedBatch, *, threads: int = 1, **options: float
) -> Tensor:
    return kernels.paged_attention(
        query,
        layer.k_plane,
        layer.v_plane,
        batch.positions,
        batch.row_starts,
        batch.block_tables,
        block_size=layer.block_size,
        scale=query.shape[-1] ** -0.5,
        threads=threads,
        **options,  # type: ignore[arg-type]
    )


def reference_attention(
    query: Tensor, keys: Tensor, values: Tensor, position: int, *, window: int = 0, softcap: float = 0.0
) -> Tensor:
    """One row ``[H, D]`` against a sequence's ``[context, H_kv, D]``, in float64."""
    first = max(0, position - window + 1) if window else 0
    group = query.shape[0] // keys.shape[1]
    k = keys[first : position + 1].double().repeat_interleave(group, dim=1)
    v = values[first : position + 1].double().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,phd->hp", query.double(), k) * query.shape[-1] ** -0.5
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.einsum("hp,phd->hd", scores.softmax(-1), v)


_SHAPE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
TINY_CONFIGS = {
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama-biased-llama3-rope": LlamaConfig(
        **{**_SHAPE, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 45, "intermediate_size": 67},
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral-sliding": MistralConfig(**_SHAPE, sliding_window=21),
    "qwen2": Qwen2Config(**{k: v for k, v in _SHAPE.items() if k != "head_dim"}),
    "qwen2-some-sliding": Qwen2Config(
        **{k: v for k, v in _SHAPE.items() if k != "head_dim"},
        use_sliding_window=True,
        sliding_window=13,
        max_window_layers=1,
    ),
    "qwen3": Qwen3Config(
        **_SHAPE, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}, attention_bias=True
    ),
}


def tiny_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of ``TINY_CONFIGS``, biases and norms random too, in eager attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(TINY_CONFIGS[name], attn_implementation="eager")
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                torch.nn.init.normal_(parameter, std=0.15)
    return model.to(dtype).eval()


def fused_executor(
    model: PreTrainedModel, *, kernels: bool, num_threads: int | None = None, quantize: Quantize = "none"
) -> FusedExecutor:
    if kernels:
        need_kernels()
    config = model.config
    info = ModelInfo(
        name="tiny",
        architecture=type(model).__name__,
        model_type=config.model_type,
        dtype="bfloat16" if model.dtype == torch.bfloat16 else "float32",
        device="cpu",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        embedding_rows=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=(0,),
        weights_hash="",
        quantization=quantize,
    )
    choice: KernelsChoice | None = None if kernels else "torch"
    return FusedExecutor.from_hf(model, config, info=info, num_threads=num_threads, kernels=choice, quantize=quantize)


class PagedRun:
    """Sequences on an executor, with shuffled blocks and poison in every slot that was not written."""

    def __init__(self, executor: FusedExecutor, sequences: Sequence[Sequence[int]], *, block_size: int, seed: int = 0):
        self.executor = executor
        self.sequences = [list(ids) for ids in sequences]
        self.block_size = block_size
        counts = [-(-len(ids) // block_size) for ids in self.sequences]
        self.storage = KVStorage(executor.planes, num_blocks=sum(counts) + 2, block_size=block_size)
        for name in self.storage.names:
            self.storage.plane(name).fill_(float("nan"))
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables = []
        for count in counts:
            self.tables.append(order[:count])
            order = order[count:]
        executor.bind(self.storage)

    def forward(self, rows: Sequence[tuple[int, int, int]]) -> ForwardOutput:
        """``rows``: (sequence, first position, count) per span; logits of all rows, layers captured."""
        spans = [RowSpan(self.sequences[s][at : at + n], at, self.tables[s], 0) for s, at, n in rows]
        batch = PackedBatch.build(spans, block_size=self.block_size, scratch_block=self.storage.scratch_block)
        return self.executor.forward(batch, capture_layers=True)

    def one_by_one(self) -> list[list[tuple[Tensor, Tensor]]]:
        """(logits ``[V]``, layers ``[L, H]``) of each row of each sequence, one row a forward."""
        found = []
        for s, ids in enumerate(self.sequences):
            outputs = [self.forward([(s, at, 1)]) for at in range(len(ids))]
            found.append([(out.logits[0], out.layers[:, 0]) for out in outputs if out.layers is not None])
        return found


def token_ids(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
