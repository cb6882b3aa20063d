"""Loading a model that drafts: planes of its own, and a refusal that names what differs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.draft_model import open_draft_model, refusal, too_small
from model.errors import ModelError
from model.fused import FusedExecutor
from model.interface import Executor
from model.kernels import KernelsChoice
from model.loader import LoadedModel, load_model
from model.source_error import ModelSourceError
from model.structure import examine
from model.tokenizer import Tokenizer
from tests.model.checkpoints import write_folder
from tests.model.families import build_config, build_executor, build_model

SPECIAL = ["<|end|>", "<|start|>"]


def tokenizer(
    *,
    swapped: bool = False,
    more: tuple[str, ...] = (),
    merges: bool = True,
    eos: str = SPECIAL[0],
    special: tuple[str, ...] = (),
    change: Callable[[RustTokenizer], None] = lambda rust: None,
) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swapped:
        letters[40], letters[41] = letters[41], letters[40]
    pieces = [*SPECIAL, *letters, "th", "he", *more]
    both = [("t", "h"), ("h", "e")]
    rust = RustTokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=both if merges else both[::-1])
    )
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.add_special_tokens([AddedToken(piece, special=True) for piece in special])
    change(rust)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=eos, bos_token=SPECIAL[1]))


def lower(rust: RustTokenizer) -> None:
    rust.normalizer = normalizers.Lowercase()


def split_digits(rust: RustTokenizer) -> None:
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )


def test_the_same_tokenizer_is_not_refused() -> None:
    assert refusal(tokenizer(), tokenizer()) is None


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (tokenizer(swapped=True), r"token id 42 is 'J' for it, 'I' for the target \(2 ids differ\)"),
        (tokenizer(more=("the",)), "token id 260 is 'the' for it, absent for the target$"),
        (tokenizer(eos="<|start|>"), r"end-of-text token is 1 '<\|start\|>', the target's 0 '<\|end\|>'"),
        (tokenizer(special=("th",)), r"token id 258 \('th'\) is a special token for it alone"),
        (
            tokenizer(merges=False),
            "encodes the text .The quick brown fox .* otherwise: its token 30 is 85, the target's 258",
        ),
        (tokenizer(change=lower), "encodes the text .The quick brown"),
        (tokenizer(change=split_digits), "encodes the text"),
        (None, "it has no tokenizer"),
    ],
)
def test_another_tokenizer_is_refused_by_its_difference(draft: Tokenizer | None, says: str) -> None:
    reason = refusal(draft, tokenizer())
    assert reason is not None
    assert "\n" not in reason
    assert re.search(says, reason), reason


def test_a_target_without_a_tokenizer_cannot_be_compared() -> None:
    assert refusal(tokenizer(), None) == "the target has no tokenizer, so their token ids cannot be compared"


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.NFC(),
        normalizers.NFD(),
        normalizers.NFKC(),
        normalizers.Lowercase(),
        normalizers.StripAccents(),
        normalizers.Strip(),
        normalizers.Nmt(),
        normalizers.Prepend(" "),
        normalizers.Replace("\r\n", "\n"),
        normalizers.Replace("\t", " "),
    ],
    ids=repr,
)
def test_the_probes_show_what_the_pieces_do_not(normalizer: normalizers.Normalizer) -> None:
    def normalise(rust: RustTokenizer) -> None:
        rust.normalizer = normalizer

    reason = refusal(tokenizer(change=normalise), tokenizer())
    assert reason is not None
    assert reason.startswith("it encodes the text")


def test_padding_of_the_vocabulary_may_differ_but_every_id_must_fit() -> None:
    info = build_executor().info
    own = tokenizer()  # 260 ids
    target = dataclasses.replace(info, vocab_size=300, embedding_rows=300)
    for size in (260, 290, 512):
        assert too_small(dataclasses.replace(info, vocab_size=size, embedding_rows=size), target, own) is None
    short = dataclasses.replace(info, vocab_size=300, embedding_rows=259)
    assert too_small(short, target, own) == "its embedding covers 259 token ids, the target's tokenizer has 260"
    narrow = dataclasses.replace(info, vocab_size=259, embedding_rows=300)
    assert too_small(narrow, target, own) == "its head covers 259 token ids, the target's tokenizer has 260"


# -- planes ------------------------------------------------------------------------------------------------------------


def executors(path: str, prefix: str) -> Executor:
    config = build_config("llama")
    model = build_model(config)
    if path == "generic":
        from model.generic import GenericExecutor

        return GenericExecutor(model, examine(model, prefix), build_executor().info)
    kernels: KernelsChoice = "torch" if path == "fused torch" else "auto"
    return FusedExecutor.from_hf(model, config, info=build_executor().info, kernels=kernels, plane_prefix=prefix)


@pytest.mark.parametrize("path", ["generic", "fused torch", "fused"])
def test_a_draft_shares_a_storage_with_the_target_and_touches_its_own_planes_only(path: str) -> None:
    target, draft = executors(path, "target"), executors(path, "draft")
    assert [plane.name for plane in draft.planes] == [f"draft.{i}.{part}" for i in range(2) for part in "kv"]
    assert [plane.name for plane in target.planes] == [f"target.{i}.{part}" for i in range(2) for part in "kv"]
    storage = KVStorage((*target.planes, *draft.planes), num_blocks=2, block_size=8)
    target.bind(storage)
    draft.bind(storage)
    batch = PackedBatch.build([RowSpan([3, 5, 8, 13], 0, [1], 0)], block_size=8, scratch_block=2)
    logits = draft.forward(batch).logits
    assert all(not storage.plane(plane.name).any() for plane in target.planes)
    assert all(storage.plane(plane.name).any() for plane in draft.planes)
    kept = [storage.plane(plane.name).clone() for plane in draft.planes]
    assert torch.equal(target.forward(batch).logits, logits)
    for plane, before in zip(draft.planes, kept, strict=True):
        assert torch.equal(storage.plane(plane.name), before)


# -- opening -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("draft") / "tiny")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def target(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setenv("TRUEDRAFT_HOME", str(home))
    return load_model(folder, executor="fused", max_batched_tokens=20, name="the target")


def opened(model: str | Path, target: LoadedModel, lines: list[str] | None = None, **changes: Any) -> LoadedModel:
    options: dict[str, Any] = {"dtype": "auto", "executor": "fused", "kernels": "auto", "num_threads": None}
    report = (lambda line: None) if lines is None else lines.append
    return open_draft_model(str(model), target, report, **{**options, "max_batched_tokens": 20, **changes})


def test_a_draft_is_loaded_and_measured_like_a_target(folder: Path, target: LoadedModel) -> None:
    lines: list[str] = []
    draft = opened(folder, target, lines)
    assert draft.executor.kind == target.executor.kind
    assert draft.exactness.level == "L0"
    assert draft.exactness.cached, "what was measured for the same weights holds for another name of their planes"
    assert {plane.name.partition(".")[0] for plane in draft.executor.planes} == {"draft"}
    assert lines[-1] == "loading tiny to draft"


def edited(folder: Path, to: Path, file: str, **changes: Any) -> Path:
    to.mkdir()
    for source in folder.iterdir():
        (to / source.name).write_bytes(source.read_bytes())
    content = json.loads((to / file).read_text())
    content.update(changes)
    (to / file).write_text(json.dumps(content))
    return to


def test_a_draft_with_another_end_of_text_is_refused_before_it_is_loaded(
    folder: Path, target: LoadedModel, tmp_path: Path
) -> None:
    other = edited(folder, tmp_path / "other", "tokenizer_config.json", eos_token="<|start|>")
    lines: list[str] = []
    with pytest.raises(ModelError, match=r"^other cannot draft for the target: its end-of-text token is 1"):
        opened(other, target, lines)
    assert not any("loading" in line for line in lines)


def test_a_draft_that_cannot_be_served_says_so(folder: Path, target: LoadedModel, tmp_path: Path) -> None:
    broken = edited(folder, tmp_path / "broken", "config.json", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ModelError, match=r"^broken cannot draft for the target: "):
        opened(broken, target)


def test_a_draft_that_cannot_be_found_is_an_error_of_its_own_setting(target: LoadedModel) -> None:
    with pytest.raises(ModelSourceError, match=r"^--draft-model '/no/such/model\.gguf'"):
        opened("/no/such/model.gguf", target)


def test_whatever_is_wrong_with_a_drafts_folder_names_its_setting(target: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=rf"^--draft-model {re.escape(str(tmp_path))}: .*config\.json"):
        opened(tmp_path, target)


def test_a_shorter_context_is_reported(folder: Path, target: LoadedModel, tmp_path: Path) -> None:
    short = edited(folder, tmp_path / "short", "config.json", max_position_embeddings=64)
    lines: list[str] = []
    assert opened(short, target, lines).info.max_model_len == 64
    assert lines[-1] == (
        "short has a context of 64 tokens, the target one of 128: longer sequences get no drafts from it"
    )
