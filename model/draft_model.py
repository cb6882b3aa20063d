"""A second model that drafts for the target: loaded the same way, refused if its token ids mean something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvcache.storage import DRAFT_PLANES
from model.errors import ModelError
from model.interface import ModelInfo
from model.kernels.load import KernelsChoice, find_kernels
from model.loader import DTypeName, ExecutorName, LoadedModel, load_model
from model.source import resolve_model
from model.tokenizer import Tokenizer

# Texts on which tokenizers with the same pieces may still part: spaces, digits, case, accents, normal forms, bytes.
PROBES = (
    "The quick brown fox jumps over the lazy dog. It's they're I'LL",
    "  two  spaces,\ttabs\t\tand\n\n\nlines \r\n ends ",
    "0 12 345 6789 01234567890 3.14159 1e-9 $1,000,000.00 0xFF",
    "def f(x):\n    return [i ** 2 for i in range(x) if i % 3 != 0]  # squares\n",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}',
    "naïve café – “quoted” … ﬁne ½ Å e\u0301 é ǅ ß İstanbul",
    "今天的天气很好。こんにちは 안녕하세요 Привет, мир! مرحبا שלום नमस्ते",
    "👩‍👩‍👧‍👦 🏳️‍🌈 \U0001f600\u200d\ufeff\u00a0\u2028",
    "<|endoftext|><|im_start|>user\nHello<|im_end|>\n<s>[INST] </s> <pad> <unk>",
    "a" * 40 + " " * 40 + "=" * 40,
)
_SHOWN = 60  # characters of a piece or text in a refusal


def open_draft_model(
    model: str,
    target: LoadedModel,
    report: Callable[[str], None],
    *,
    dtype: DTypeName,
    executor: ExecutorName,
    kernels: KernelsChoice,
    num_threads: int | None,
    max_batched_tokens: int = 512,
) -> LoadedModel:
    """Find or fetch ``model``, compare it with ``target``, and load it on the target's device and planes of its own.

    The options are those of :func:`model.loader.load_model`. The vocabularies may be padded to different widths; a
    shorter context means that longer sequences get no drafts, which is reported. Raises ModelError or ModelSourceError,
    each one line that names the setting or the model, also for a model whose tokenizer is not the target's.
    """
    try:
        source = resolve_model(model, report=report)
        folder = Path(source.path)
        # Before anything long: loading checks and measures the model.
        tokenizer = Tokenizer.from_folder(folder)
    except ModelError as error:
        message = str(error).replace("--model", "--draft-model")
        raise type(error)(message if "--draft-model" in message else f"--draft-model {model}: {message}") from error
    reason = refusal(tokenizer, target.tokenizer_or_none)
    if reason is not None:
        raise _refused(source.name, target, reason)
    find_kernels(kernels, progress=report)
    report(f"loading {source.name} to draft")
    try:
        draft = load_model(
            folder,
            dtype=dtype,
            device=target.info.device,
            executor=executor,
            kernels=kernels,
            num_threads=num_threads,
            max_batched_tokens=max_batched_tokens,
            name=source.name,
            plane_prefix=DRAFT_PLANES,
        )
    except ModelError as error:
        raise _refused(source.name, target, str(error)) from error
    assert tokenizer is not None
    reason = too_small(draft.info, target.info, tokenizer)
    if reason is not None:
        raise _refused(source.name, target, reason)
    if draft.info.max_model_len < target.info.max_model_len:
        report(
            f"{source.name} has a context of {draft.info.max_model_len} tokens, {target.info.name} one of "
            f"{target.info.max_model_len}: longer sequences get no drafts from it"
        )
    return draft


def refusal(draft: Tokenizer | None, target: Tokenizer | None) -> str | None:
    """How the draft's tokenizer differs from the target's, in one line; None if ids mean the same for both."""
    if draft is None or target is None:
        return f"{'it' if draft is None else 'the target'} has no tokenizer, so their token ids cannot be compared"
    return _other_pieces(draft, target) or _other_special_tokens(draft, target) or _other_ids(draft, target)


def too_small(draft: ModelInfo, target: ModelInfo, tokenizer: Tokenizer) -> str | None:
    """Why the draft model cannot take or give an id that its tokenizer and the target have; None if it can."""
    needed = min(max(tokenizer.pieces, default=0) + 1, target.num_token_ids)
    for what, size in (("embedding", draft.embedding_rows), ("head", draft.vocab_size)):
        if size < needed:
            return f"its {what} covers {size} token ids, the target's tokenizer has {needed}"
    return None


def _refused(name: str, target: LoadedModel, reason: str) -> ModelError:
    return ModelError(f"{name} cannot draft for {target.info.name}: {reason}")


def _other_pieces(draft: Tokenizer, target: Tokenizer) -> str | None:
    mine, theirs = draft.pieces, target.pieces
    if mine == theirs:
        return None
    wrong = sorted(i for i in mine.keys() | theirs.keys() if mine.get(i) != theirs.get(i))
    first = wrong[0]
    more = f" ({len(wrong)} ids differ)" if len(wrong) > 1 else ""
    return f"token id {first} is {_shown(mine.get(first))} for it, {_shown(theirs.get(first))} for the target{more}"


def _other_special_tokens(draft: Tokenizer, target: Tokenizer) -> str | None:
    ends = draft.eos_token_id, target.eos_token_id
    if ends[0] != ends[1]:
        mine, theirs = (
            "none" if end is None else f"{end} {_shown(tokenizer.token_piece(end))}"
            for end, tokenizer in zip(ends, (draft, target), strict=True)
        )
        return f"its end-of-text token is {mine}, the target's {theirs}"
    wrong = sorted(draft.special_token_ids ^ target.special_token_ids)
    if not wrong:
        return None
    first = wrong[0]
    whose = "it" if first in draft.special_token_ids else "the target"
    return f"token id {first} ({_shown(target.token_piece(first))}) is a special token for {whose} alone"


def _other_ids(draft: Tokenizer, target: Tokenizer) -> str | None:
    """Special tokens are for the texts around; drafts continue ids, so none are added here."""
    mine, theirs = (tokenizer.encode_many(PROBES, add_special_tokens=False) for tokenizer in (draft, target))
    for text, own, other in zip(PROBES, mine, theirs, strict=True):
        if own != other:
            at = next(
                (i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other))
            )
            return (
                f"it encodes the text {_shown(text)} otherwise: its token {at} is {_id(own, at)}, "
                f"the target's {_id(other, at)}"
            )
    return None


def _id(ids: list[int], at: int) -> str:
    return str(ids[at]) if at < len(ids) else "absent"


def _shown(text: str | None) -> str:
    if text is None:
        return "absent"
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
