"""Tiny models of twelve families: saved, loaded as a server would, and exact in both dtypes on every path."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.tiny_models import (
    FAMILIES,
    VOCAB,
    FamilyLevel,
    levels_markdown,
    main,
    measure_family,
    save_tiny_model,
    tiny_config,
)
from model.kernels import KernelsChoice
from model.tokenizer import Tokenizer

FUSED = ("llama", "mistral", "qwen2", "qwen3")
_DTYPES = ("bfloat16", "float32")
_KERNELS: tuple[KernelsChoice, ...] = ("torch", "auto", "auto", "torch")
# The kernels are for the fused families alone; the others take one path whatever is asked for.
CASES = [
    (family, dtype, kernels)
    for family in FAMILIES
    for dtype in ("bfloat16", "float32")
    for kernels in (("auto", "torch") if family in FUSED else ("auto",))
]


@pytest.mark.parametrize(("family", "dtype", "kernels"), CASES, ids=lambda value: value)
def test_every_family_reaches_l0(family: str, dtype: str, kernels: str) -> None:
    # A short context keeps the probe short; it covers a chunk border of either path's attention.
    found = measure_family(family, dtype, kernels, budget=80, max_position_embeddings=140, **_positions(family))  # type: ignore[arg-type]
    assert found.level == "L0", found.detail
    assert found.executor.startswith("fused/" if family in FUSED else "generic/")
    if kernels == "torch" or family not in FUSED:
        assert "/torch" in found.executor
        assert found.padding.startswith("rows to tiles of ")
    assert ("expert" in found.padding) == (family in ("mixtral", "deepseek_v3"))


@pytest.mark.parametrize(("family", "dtype", "kernels"), list(zip(FUSED, _DTYPES * 2, _KERNELS, strict=True)))
def test_the_fused_families_reach_l0_with_int8_weights(family: str, dtype: str, kernels: KernelsChoice) -> None:
    found = measure_family(family, dtype, kernels, budget=80, quantize="int8", max_position_embeddings=140)
    assert found.level == "L0", found.detail
    assert found.executor.endswith("-int8")


def _positions(family: str) -> dict[str, int]:
    return {"n_positions": 140} if family == "gpt2" else {}


def test_the_tokenizer_has_the_models_vocabulary_and_round_trips_any_text(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    text = 'The weather is good: 今天, naïve 1234 {"x": [1]}\n\tyes\u0000'
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < VOCAB
    assert len(tokenizer.encode("the target verifies them")) < 12


def test_the_same_family_is_the_same_model_every_time(tmp_path: Path) -> None:
    first, second = (save_tiny_model("qwen2", tmp_path / name) for name in "ab")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'bert'.*llama"):
        tiny_config("bert")


def test_the_command_saves_a_checkpoint_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["granite", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_the_documented_table_has_every_family_on_both_paths() -> None:
    text = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    rows = [line.split(" | ")[0:2] for line in text.splitlines() if line.startswith("| ")][1:]
    assert [(family.strip("| "), kernels) for family, kernels in rows] == [
        (family, kernels) for family in FAMILIES for kernels in ("auto", "torch")
    ]


def test_the_table_tells_the_reason_below_l0() -> None:
    rows = [
        FamilyLevel("llama", "bfloat16", "torch", "fused/torch", "L0", "rows to tiles of 16", "40 checks"),
        FamilyLevel("llama", "float32", "torch", "fused/torch", "L2", "rows to tiles of 16", "13 rows: 2 differ"),
    ]
    assert levels_markdown(rows).splitlines()[2] == (
        "| llama | torch | fused/torch | L0 | L2 | rows to tiles of 16 | float32: 13 rows: 2 differ |"
    )
