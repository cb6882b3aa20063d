"""load_model: what a checkpoint folder becomes, what is refused, and what a second start remembers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import model.fused
import model.loader
from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.checks_cache import ChecksCache
from model.errors import ModelError
from model.kernels.build import INSTRUCTION_SET, missing_instructions
from model.kernels.load import kernels_identity
from model.loader import LoadedModel, load_model
from model.weights import hash_weights, weight_files
from tests.model.checkpoints import write_folder
from tests.model.families import build_config, build_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "checkpoint")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def load(folder: Path, home: Path, **changes: Any) -> LoadedModel:
    return load_model(folder, **{"executor": "generic", "max_batched_tokens": 20, "home": home, **changes})


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def some_logits(loaded: LoadedModel) -> torch.Tensor:
    storage = KVStorage(loaded.executor.planes, num_blocks=2, block_size=8)
    loaded.executor.bind(storage)
    spans = [RowSpan([3, 5, 8, 13], 0, [1], 0)]
    return loaded.executor.forward(PackedBatch.build(spans, block_size=8, scratch_block=2)).logits


def test_a_checkpoint_becomes_a_measured_executor(folder: Path, home: Path) -> None:
    loaded = load(folder, home, name="tiny")
    assert (loaded.info.name, loaded.info.model_type, loaded.info.dtype) == ("tiny", "llama", "bfloat16")
    assert (loaded.info.vocab_size, loaded.info.embedding_rows, loaded.info.max_model_len) == (258, 258, 128)
    assert loaded.exactness.level == "L0"
    assert loaded.executor.kind.startswith("generic/torch")
    assert torch.isfinite(some_logits(loaded)).all()
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("héllo")) == "héllo"


def test_auto_takes_the_fused_executor_where_it_agrees(folder: Path, home: Path) -> None:
    fused, generic = load(folder, home, executor="auto"), load(folder, home)
    assert fused.executor.kind.startswith("fused/")
    torch.testing.assert_close(some_logits(fused), some_logits(generic), rtol=0.05, atol=0.05)
    assert fused.info == generic.info
    assert fused.fingerprint != generic.fingerprint


def test_a_fused_executor_that_computes_something_else_is_not_used(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = model.fused.FusedExecutor.from_hf.__func__

    def without_a_layer(cls: Any, state: Any, config: Any, **kwargs: Any) -> Any:
        state = {k: v * 3 if k.endswith("layers.1.mlp.down_proj.weight") else v for k, v in state.items()}
        return original(cls, state, config, **kwargs)

    monkeypatch.setattr(model.fused.FusedExecutor, "from_hf", classmethod(without_a_layer))
    # The tiny model's layers hardly matter at its default initialisation: make this one matter.
    weights = load_file(folder / "model.safetensors")
    save_file({k: v * 20 for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        assert load(folder, home, executor="auto").executor.kind.startswith("generic/torch")
    assert "differs from the generic one" in caplog.text
    with pytest.raises(ModelError, match="differs from the generic one"):
        load(folder, home, executor="fused")


def test_fused_is_refused_where_it_does_not_support_the_model(tmp_path: Path, home: Path) -> None:
    build_model(build_config("gpt2")).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ModelError, match="gpt2"):
        load(tmp_path / "gpt2", home, executor="fused")
    assert load(tmp_path / "gpt2", home, executor="auto").executor.kind.startswith("generic/torch")


@pytest.mark.parametrize("executor", ["generic", "auto"])
def test_a_second_start_repeats_no_check_and_gives_the_same_bits(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    first = load(folder, home, executor=executor)

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a check ran again")

    for name in ("probe_exactness", "check_behaviour", "packed_logits"):
        monkeypatch.setattr(model.loader, name, forbidden)
    if executor == "auto":
        monkeypatch.setattr(model.loader, "AutoModelForCausalLM", None)  # the fused executor needs no other model
    second = load(folder, home, executor=executor)
    assert second.exactness == first.exactness
    assert (first.exactness.cached, second.exactness.cached) == (False, True)
    assert "measured now" in first.exactness.line
    assert "from the cache" in second.exactness.line
    assert second.fingerprint == first.fingerprint
    assert torch.equal(some_logits(second), some_logits(first))


def test_other_weights_threads_or_dtype_are_measured_anew(folder: Path, home: Path) -> None:
    found = {load(folder, home).fingerprint, load(folder, home, dtype="float32").fingerprint}
    found.add(load(folder, home, num_threads=2).fingerprint)
    torch.set_num_threads(1)
    write_folder(folder, seed=1)
    found.add(load(folder, home).fingerprint)
    assert len(found) == 4


def test_a_level_measured_under_another_setting_of_the_libraries_is_not_believed(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(folder, home)
    assert load(folder, home).exactness.cached
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    second = load(folder, home)
    assert not second.exactness.cached
    assert second.fingerprint != first.fingerprint
    monkeypatch.delenv("DNNL_MAX_CPU_ISA")
    third = load(folder, home)
    assert third.exactness.cached
    assert third.fingerprint == first.fingerprint


@pytest.mark.skipif(missing_instructions() != (), reason="this processor cannot run the kernels")
def test_other_compiled_kernels_are_measured_anew_and_only_where_they_compute(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def both() -> tuple[LoadedModel, LoadedModel]:
        found = load(folder, home, executor="auto", kernels="auto"), load(folder, home, kernels="torch")
        assert [INSTRUCTION_SET in one.executor.kind for one in found] == [True, False]
        return found

    with_kernels, without = both()
    assert kernels_identity() != ""
    assert with_kernels.fingerprint != without.fingerprint
    monkeypatch.setattr(model.loader, "kernels_identity", lambda: "built by another compiler")
    again, same = both()
    assert not again.exactness.cached
    assert again.fingerprint != with_kernels.fingerprint
    assert same.exactness.cached
    assert same.fingerprint == without.fingerprint


def test_what_ends_or_makes_a_text_is_in_the_fingerprint_but_needs_no_new_measurement(folder: Path, home: Path) -> None:
    found = [load(folder, home)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    found.append(load(folder, home))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found.append(load(folder, home))
    edit(folder / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    found.append(load(folder, home))
    (folder / "README.md").write_text("# A model")
    edit(folder / "generation_config.json", temperature=0.5)  # a default of others; requests say theirs
    last = load(folder, home)
    assert len({loaded.fingerprint for loaded in found}) == len(found)
    assert last.fingerprint == found[-1].fingerprint
    assert all(loaded.exactness.cached for loaded in [*found[1:], last])


def test_a_damaged_or_unwritable_cache_only_costs_time(folder: Path, home: Path) -> None:
    first = load(folder, home)
    for file in (home / "checks").iterdir():
        file.write_text("{")
    assert load(folder, home).exactness == first.exactness
    home_file = home.parent / "file"
    home_file.write_text("in the way")
    assert load(folder, home_file).exactness == first.exactness


def test_stop_ids_are_the_generation_configs_and_the_tokenizers(folder: Path, home: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[7, 9])
    assert load(folder, home).info.eos_token_ids == (7, 9, 0)
    edit(folder / "generation_config.json", eos_token_id=7)
    assert load(folder, home).info.eos_token_ids == (7, 0)


def test_a_checkpoint_without_tokenizer_loads_and_says_so_when_asked(folder: Path, home: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    loaded = load(folder, home)
    with pytest.raises(ModelError, match="no tokenizer"):
        _ = loaded.tokenizer


def test_dtype_auto_widens_what_is_not_bfloat16(folder: Path, home: Path) -> None:
    edit(folder / "config.json", dtype="float16")
    assert load(folder, home).info.dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "int4"}, "int4"),
        ({"executor": "magic"}, "magic"),
        ({"device": "toaster"}, "toaster"),
        ({"device": "meta"}, "meta"),
    ],
    ids=lambda value: "",
)
def test_a_wrong_argument_is_named(folder: Path, home: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load(folder, home, **changes)


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")


def _without_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _of_another_shape(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=128)


def _code_of_its_own(folder: Path) -> None:
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})


def _unknown_type(folder: Path) -> None:
    edit(folder / "config.json", model_type="never-heard-of")


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def _an_encoder(folder: Path) -> None:
    edit(folder / "config.json", model_type="t5", d_model=64, num_layers=2, architectures=None)


@pytest.mark.parametrize("executor", ["generic", "auto"])
@pytest.mark.parametrize(
    "damage",
    [
        _pickle_only,
        _truncated,
        _no_safetensors,
        _without_a_tensor,
        _of_another_shape,
        _code_of_its_own,
        _unknown_type,
        _no_config,
        _broken_config,
        _broken_tokenizer,
        _an_encoder,
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_one_clear_line(folder: Path, home: Path, damage, executor: str) -> None:
    damage(folder)
    with pytest.raises(ModelError) as refused:
        load(folder, home, executor=executor)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) > 20


def test_the_weights_hash_ignores_how_files_are_cut_and_sees_every_bit(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    cut = tmp_path / "cut"
    cut.mkdir()
    parts = {"b.safetensors": names[:5], "a.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, cut / file)
    index = {name: file for file, part in parts.items() for name in part}
    (cut / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    whole = hash_weights(weight_files(folder))
    assert hash_weights(weight_files(cut)) == whole

    weights[names[0]].view(torch.int16).view(-1)[3] ^= 1
    save_file(weights, folder / "model.safetensors")
    assert hash_weights(weight_files(folder)) != whole


def test_an_index_cannot_name_files_outside_of_the_folder(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match="elsewhere"):
        weight_files(folder)


def test_a_weights_hash_is_remembered_until_the_file_changes(folder: Path, home: Path) -> None:
    cache = ChecksCache(home)
    files = weight_files(folder)
    first = cache.weights_hash(files)
    (entry,) = home.iterdir()
    entry.write_text(json.dumps({"value": "remembered"}))
    assert cache.weights_hash(files) == "remembered"
    write_folder(folder, seed=5)
    assert cache.weights_hash(files) not in (first, "remembered")
