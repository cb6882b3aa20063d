"""The load-time gate: families that pass, families that are refused, and models that would be silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.attach import ATTENTION_NAME, AttentionCall, attach, detach
from model.errors import ModelError
from model.gate import check_behaviour, check_config, context_length
from model.generic import GenericExecutor
from model.structure import examine
from tests.model.families import REFUSED, SERVABLE, build_config, build_executor, build_model


@pytest.mark.parametrize("family", SERVABLE)
def test_a_family_that_computes_alike_packed_and_alone_passes(family: str) -> None:
    executor = build_executor(family)
    check_behaviour(executor)
    assert executor.model.config._attn_implementation == ATTENTION_NAME  # the comparison put it back


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_packed_rows_would_break_is_refused_with_the_reason(family: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[family][1]) as refused:
        check_behaviour(build_executor(family))
    assert "\n" not in str(refused.value)


def _layer_hook(executor: GenericExecutor, hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
    layer = executor.structure.layers[0]
    layer.register_forward_hook(lambda module, args, output: hook(output))


def test_a_model_that_looks_at_neighbouring_rows_is_refused() -> None:
    executor = build_executor("llama")
    _layer_hook(executor, lambda x: x + 0.2 * torch.roll(x, 1, dims=1))
    with pytest.raises(ModelError, match="differ"):
        check_behaviour(executor)


@pytest.mark.case("V 39273")
def test_a_model_with_state_beside_its_kv_is_refused() -> None:
    executor = build_executor("llama")

    def running_sum(x: torch.Tensor) -> torch.Tensor:
        """Right for whole sequences, packed or alone; knows nothing of a sequence's earlier forwards."""
        spans = [(0, x.shape[1])]
        if executor._rows is not None:
            spans = [(s.first, s.first + s.count) for s in executor.rows.attention.sequences]
        out = x.clone()
        for first, last in spans:
            out[:, first:last] += 0.2 * x[:, first:last].cumsum(1)
        return out

    _layer_hook(executor, running_sum)
    with pytest.raises(ModelError, match="in pieces"):
        check_behaviour(executor)


def test_a_model_whose_attention_is_biased_in_its_own_forward_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    eager = modeling_llama.eager_attention_forward

    def with_distance_bias(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        distance = torch.arange(key.shape[2])[None] - torch.arange(query.shape[2])[:, None]
        return eager(module, query, key, value, mask + 0.1 * distance, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", with_distance_bias)
    with pytest.raises(ModelError, match="own forward"):
        check_behaviour(build_executor("llama"))


def test_a_bfloat16_model_is_refused_too() -> None:
    executor = build_executor("llama", "bfloat16")
    check_behaviour(executor)
    _layer_hook(executor, lambda x: x + 0.2 * torch.roll(x, 1, dims=1))
    with pytest.raises(ModelError, match="differ"):
        check_behaviour(executor)


def test_logits_that_are_not_finite_are_refused() -> None:
    executor = build_executor("llama")
    _layer_hook(executor, lambda x: x * float("nan"))
    with pytest.raises(ModelError, match="differ"):
        check_behaviour(executor)


class _Pass:
    def attend(self, module: torch.nn.Module, call: AttentionCall) -> torch.Tensor:
        return call.query


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"attention_mask": torch.zeros(1)}, "mask"),
        ({"alibi": torch.zeros(1)}, "alibi"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "both directions"),
        ({"query": torch.zeros(2, 2, 3, 4)}, "expected"),
    ],
    ids=lambda value: "",
)
def test_what_the_attention_function_cannot_honour_is_an_error(given: dict[str, Any], reason: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    build_executor("llama")  # registers the function
    attention = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]
    module = torch.nn.Linear(1, 1)
    attach(module, _Pass())
    arguments = {name: torch.zeros(1, 2, 3, 4) for name in ("query", "key", "value")} | {"attention_mask": None}
    attention(module, **arguments, position_ids=torch.zeros(1), use_cache=False)
    with pytest.raises(ModelError, match=reason):
        attention(module, **{**arguments, **given})
    detach(module)
    with pytest.raises(ModelError, match="outside"):
        attention(module, **arguments)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["full_attention", "mamba"]}, "mamba"),
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}}, "auto_map"),
        ({"expert_capacity": 4}, "expert_capacity = 4"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"max_position_embeddings": 0}, "context length"),
    ],
    ids=lambda value: "",
)
def test_a_config_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    config = build_config("llama")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match=reason):
        check_config(config)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_stretches_is_served_up_to_its_original_length_only(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    assert context_length(build_config("llama")) == 512
    assert context_length(build_config("llama", rope_parameters=rope)) == 128


def test_examining_leaves_nothing_on_the_model() -> None:
    model = build_model(build_config("llama"))
    structure = examine(model)
    assert [p.name for p in structure.planes] == ["target.0.k", "target.0.v", "target.1.k", "target.1.v"]
    assert all("truedraft_state" not in module.__dict__ for module in model.modules())


def test_kv_geometry_comes_from_the_forward_not_the_config() -> None:
    planes = build_executor("deepseek_v3").planes
    assert [p.shape for p in planes[:2]] == [(4, 24), (4, 12)]
