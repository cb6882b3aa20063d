"""The load-time gate: a model is refused, with the reason, unless packed rows compute what it computes alone.

Some architectures look like a causal LM and are silently wrong on packed rows: they bias attention in their own way,
keep recurrent state, look at neighbouring rows, or stretch their positions by the longest row of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.errors import ModelError
from model.generic import GenericExecutor
from model.interface import Executor

_SERVABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
_STRETCHING_ROPE = frozenset({"dynamic", "longrope"})
# Routers with a capacity drop the tokens that come too late, so a row depends on its batch mates.
_CAPACITY_FIELDS = ("expert_capacity", "capacity_factor", "moe_token_dropping", "router_capacity_factor")
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
# Largest relative difference of a logits row. In bfloat16 two correct programs differ by their roundings, in a few rows
# much, so the median row decides between programs; an architecture that is wrong is wrong in most rows. One program
# on the same rows in other company has no such excuse: there every row counts.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.12}
# From the same model in its own precision, of the median row: what int8 takes away is more, but a wrong program is
# further away still (1 and above).
QUANTIZED_TOLERANCE = 0.35
_LENGTHS = (9, 6)  # of the two short sequences


def check_config(config: Any) -> None:
    """Raise ModelError for a config whose model cannot be served, whatever its weights."""
    text = config.get_text_config()
    if getattr(config, "auto_map", None):
        raise ModelError("config.json asks for code of its own (auto_map), which is never run")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"model type {config.model_type!r} is not a causal language model that transformers knows")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"model type {config.model_type!r} has an encoder, which cannot be served")
    if getattr(config, "quantization_config", None):
        raise ModelError("quantised checkpoints cannot be served; convert the weights to bfloat16 first")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _SERVABLE_LAYERS)
    if others:
        raise ModelError(f"layers of type {', '.join(others)} cannot be served; only full and sliding attention can")
    for name in _CAPACITY_FIELDS:
        if getattr(text, name, None):
            raise ModelError(f"its router drops tokens ({name} = {getattr(text, name)}): answers depend on batch mates")
    context_length(config)


def context_length(config: Any) -> int:
    """Positions that may be served. Rope that stretches beyond the original length is served up to that length only:
    beyond it, the frequencies of all rows depend on the longest one. Raises ModelError if no length is known."""
    text = config.get_text_config()
    lengths = [int(getattr(text, name)) for name in _LENGTH_FIELDS if getattr(text, name, None)]
    if not lengths:
        raise ModelError(f"config.json names no context length (none of {', '.join(_LENGTH_FIELDS)})")
    longest = lengths[0]
    for rope in _rope_parameters(text):
        if rope.get("rope_type", rope.get("type")) in _STRETCHING_ROPE:
            original = rope.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            if original:
                longest = min(longest, int(original))
    return longest


def _rope_parameters(text: Any) -> list[dict[str, Any]]:
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]


def check_behaviour(executor: GenericExecutor) -> None:
    """Compare packed rows with the same sequences alone, in pieces, and in Hugging Face's own eager forward.

    Raises ModelError if they differ beyond the dtype's tolerance. Binds a small storage of its own: bind again.
    """
    limit = min(executor.info.max_model_len, max(_LENGTHS))
    sequences = short_sequences(executor, limit)
    own = [_eager_logits(executor, ids) for ids in sequences]
    packed = packed_logits(executor, sequences)
    for i, ids in enumerate(sequences):
        difference = relative_difference(packed[i], own[i], executor.info.dtype)
        _require(executor, difference, "packed rows differ from the model's own forward")
        alone = packed_logits(executor, [ids])[0]
        _require(executor, worst_row(packed[i], alone), "a packed sequence differs from the same sequence alone")
        pieces = packed_logits(executor, [ids], pieces=(4, 1))[0]
        _require(executor, worst_row(pieces, alone), "a sequence in pieces differs from the whole")


def short_sequences(executor: Executor, limit: int) -> list[list[int]]:
    """The two sequences that executors are compared on: fixed ids, spread over the vocabulary."""
    rows = executor.info.embedding_rows
    generator = torch.Generator().manual_seed(20)
    return [
        torch.randint(0, rows, (min(length, limit),), generator=generator, dtype=torch.int64).tolist()
        for length in _LENGTHS
    ]


def packed_logits(executor: Executor, sequences: list[list[int]], *, pieces: tuple[int, ...] = ()) -> list[Tensor]:
    """Logits ``[len, V]`` of all rows of each sequence, packed into one batch (or several: ``pieces`` are the lengths
    of the first ones). Binds a small storage of its own."""
    block_size = 4
    per_sequence = -(-max(map(len, sequences)) // block_size)
    storage = KVStorage(
        executor.planes,
        num_blocks=per_sequence * len(sequences),
        block_size=block_size,
        device=executor.info.device,
    )
    executor.bind(storage)
    blocks = [list(range(s, storage.num_blocks, len(sequences))) for s in range(len(sequences))]
    found: list[list[Tensor]] = [[] for _ in sequences]
    start = 0
    for length in (*pieces, max(map(len, sequences))):
        taking = [s for s, ids in enumerate(sequences) if start < len(ids)]
        if not taking:
            break
        spans = [RowSpan(sequences[s][start : start + length], start, blocks[s], 0) for s in taking]
        batch = PackedBatch.build(spans, block_size=block_size, scratch_block=storage.scratch_block)
        logits = executor.forward(batch).logits
        bounds = batch.row_starts.tolist()
        for i, s in enumerate(taking):
            found[s].append(logits[bounds[i] : bounds[i + 1]])
        start += length
    return [torch.cat(parts) for parts in found]


def relative_difference(a: Tensor, b: Tensor, dtype: str) -> float:
    """Of logits rows ``[rows, V]`` from two programs: the worst row's ``|a - b| / |b|`` in float32, the median row's in
    bfloat16. Infinite if either holds a number that is not finite.
    """
    return worst_row(a, b) if dtype == "float32" else float(_row_differences(a, b).median())


def worst_row(a: Tensor, b: Tensor) -> float:
    """The largest ``|a - b| / |b|`` of logits rows ``[rows, V]``; infinite if a number is not finite."""
    return float(_row_differences(a, b).max())


def _row_differences(a: Tensor, b: Tensor) -> Tensor:
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return torch.full((len(a),), float("inf"))
    return (a - b).double().square().sum(-1).sqrt() / b.double().square().sum(-1).sqrt()


def _require(executor: GenericExecutor, difference: float, what: str) -> None:
    tolerance = TOLERANCE[executor.info.dtype]
    if not difference <= tolerance:
        raise ModelError(
            f"model type {executor.info.model_type!r} cannot be served: {what} "
            f"(by {difference:.2g} of the logits' norm, {tolerance:.2g} allowed)"
        )


def _eager_logits(executor: GenericExecutor, ids: list[int]) -> Tensor:
    """Hugging Face's own forward over the whole sequence: ``[len, V]`` float32."""
    model = executor.model
    try:
        with torch.inference_mode(), executor.own_code():
            input_ids = torch.tensor([ids], device=model.device)
            positions = torch.arange(len(ids), device=model.device)[None]
            output = model(input_ids=input_ids, position_ids=positions, use_cache=False)
            logits: Tensor = output.logits[0].float().cpu()
            return logits
    except Exception as error:
        raise ModelError(f"the model's own eager forward fails: {error}".splitlines()[0]) from error
