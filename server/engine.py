"""The model's side of a server: everything from a loaded model up to the engine, built once and in one place.

What the wire's side (server.assemble) needs of it is an EngineDescription and the engine itself; the rest stays here,
maybe in a process of its own (server.remote).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvcache.ledger import Ledger
from kvcache.memory import available_bytes
from kvcache.storage import KVStorage, PlaneSpec, blocks_in_budget, bytes_per_block
from model.exactness import ExactnessReport
from model.kernels.load import find_kernels, kernels_identity
from model.loader import LoadedModel
from model.opening import open_model
from scheduler.audit import AuditConfig
from scheduler.config import SchedulerConfig
from scheduler.engine import Step
from scheduler.pace import StepPace
from scheduler.request import EngineRequest, TextFilter
from scheduler.scheduler import Scheduler
from server.description import EngineDescription
from server.detokenize import ChoiceText, Decoder
from server.parts import PLAIN, Parts
from server.settings import Settings
from server.speculating import check_speculation, load_draft, report_idle_exit
from server.speculating import speculation as build_speculation
from server.start_error import StartError
from server.version import VERSION
from specdec.describe import describe_speculation, drafter_memory
from specdec.draft_length.controller import DraftLengthController
from specdec.draft_length.cost import StepCost
from specdec.draft_length.measure import measure_step_cost
from specdec.drafters.forced import FORCED
from specdec.grammar.compiler import LIBRARY, GrammarCache, GrammarCompiler, NoGrammars, TokenizerText
from specdec.grammar.constraint import GrammarConstraint
from specdec.probe import measured_exactness
from specdec.step import SpeculativeStep

Report = Callable[[str], None]

AUDIT_MEMORY_SHARE = 8  # audits take at most an eighth of the KV cache's size on top, unless they are told how much
# Two logits this close count as tied below L0: some roundings of logits of the usual size (up to about 20).
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}
FREE_MEMORY_SHARE = 4  # the KV cache takes at most a quarter of what is free, unless it is told how much


@dataclass(frozen=True, slots=True)
class Opened:
    """The models of the settings, loaded."""

    loaded: LoadedModel
    folder: Path
    draft: LoadedModel | None


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """What an engine loop runs, and what the wire has to know of it."""

    scheduler: Scheduler
    step: Step
    description: EngineDescription
    grammars: GrammarCache | None  # that the step's constraint uses too; None if there is no structured output
    speculation: Callable[[], Mapping[str, Any]]  # see specdec.describe


def open_models(settings: Settings, report: Report) -> Opened:
    """Find, load and measure the models that the settings name.

    Tells ``report`` how far it is. Raises StartError, model.errors.ModelError or model.source_error.ModelSourceError,
    each with one line, if a model or the settings cannot be served.
    """
    try:
        check_speculation(settings)
    except ValueError as error:
        raise StartError(str(error)) from error
    loaded, folder = load(settings, report)
    report_idle_exit(settings, report)
    return Opened(loaded, folder, load_draft(settings, loaded, report))


def load(settings: Settings, report: Report) -> tuple[LoadedModel, Path]:
    """The settings' model and its folder; see :func:`model.opening.open_model`."""
    return open_model(
        settings.model,
        report,
        dtype=settings.dtype,
        device=settings.device,
        executor=settings.executor,
        kernels=settings.kernels,
        num_threads=settings.num_threads,
        max_batched_tokens=settings.max_num_batched_tokens,
        quantize=settings.quantize,
    )


def build_engine(
    settings: Settings,
    loaded: LoadedModel,
    names: tuple[str, ...],
    draft: LoadedModel | None = None,
    parts: Parts = PLAIN,
) -> BuiltEngine:
    """For a loaded model, and a draft model if given. Raises StartError, or ModelError below a required level."""
    info = loaded.info
    max_model_len = info.max_model_len if settings.max_model_len is None else settings.max_model_len
    if max_model_len > info.max_model_len:
        raise StartError(
            f"max_model_len is {max_model_len}, but {info.name} has a context of {info.max_model_len} tokens"
        )
    planes = (*loaded.executor.planes, *(draft.executor.planes if draft is not None else ()))
    num_blocks = _num_blocks(settings, planes, info.device, max_model_len)
    audit_blocks = _audit_blocks(settings, num_blocks, max_model_len)
    all_blocks = num_blocks + audit_blocks
    ledger = Ledger(all_blocks, settings.block_size) if settings.ledger else None
    try:
        manager = parts.manager(
            num_blocks,
            settings.block_size,
            enable_prefix_cache=settings.enable_prefix_cache,
            num_private_blocks=audit_blocks,
            observer=ledger,
        )
        storage = KVStorage(planes, num_blocks=all_blocks, block_size=settings.block_size, device=info.device)
    except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
        size = all_blocks * bytes_per_block(planes, settings.block_size)
        raise StartError(
            f"there is no memory for a KV cache of {all_blocks} blocks, which take {size} bytes: set --num-blocks or "
            "--kv-cache-memory lower"
        ) from error
    loaded.executor.bind(storage)
    if draft is not None:
        draft.executor.bind(storage)
    kernels, kernels_found = find_kernels(loaded.kernels)
    sampler = parts.sampler(kernels)
    try:
        speculation = build_speculation(settings, loaded, draft, storage, sampler)
    except ValueError as error:
        raise StartError(str(error)) from error
    drafters = speculation.drafters if speculation else {}
    controller = speculation.controller if speculation else None
    exactness = measured_exactness(loaded, sampler)
    if settings.require_exact:
        exactness.require_exact(info.name)
    sampling = f"{kernels_identity() if kernels is not None else 'numpy'}/{LIBRARY}"
    grammars, no_grammars = _grammars(settings, loaded)
    step = SpeculativeStep(
        parts.executor(loaded.executor),
        manager,
        storage,
        drafters={name: parts.drafter(drafter) for name, drafter in drafters.items()},
        default_drafter=speculation.default_drafter if speculation else None,
        sampler=sampler,
        constraint=None if grammars is None else parts.constraint(GrammarConstraint(grammars)),
        controller=controller,
        auto=speculation.auto if speculation else (),
        max_model_len=max_model_len,
        ledger=ledger,
    )
    config = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_speculative_tokens=settings.num_speculative_tokens,
        max_waiting_requests=settings.max_waiting,
        max_waiting_tokens=settings.max_waiting_tokens,
        itl_slo=settings.itl_slo,
        audit=_audit_config(settings, exactness, info.dtype),
    )
    description = EngineDescription(
        names=names,
        model=info,
        exactness=exactness,
        fingerprint=system_fingerprint(loaded.fingerprint, sampling),
        created=int(time.time()),
        executor=loaded.executor.kind,
        kernels=_kernels_info(loaded, kernels_found),
        scheduler=config,
        num_blocks=num_blocks,
        audit_blocks=audit_blocks,
        block_size=settings.block_size,
        kv_bytes=storage.num_bytes,
        num_planes=len(storage.names),
        drafters=speculation.names if speculation else (),
        drafting=(*drafters, *((FORCED,) if drafters and grammars is not None else ())),
        remembering=tuple(drafter_memory(drafters)),
        no_grammars=no_grammars,
    )
    return BuiltEngine(
        scheduler=Scheduler(
            manager,
            config,
            text_filters=parts.text_filters(TextFilters(loaded.tokenizer)),
            pace=_pace(settings, loaded, storage, controller),
        ),
        step=step,
        description=description,
        grammars=grammars,
        speculation=partial(describe_speculation, drafters, controller.cost if controller else None),
    )


def _pace(
    settings: Settings, loaded: LoadedModel, storage: KVStorage, controller: DraftLengthController | None
) -> StepPace | None:
    """Nothing in ``storage`` is in use. Its cost curve is its own: it learns from steps with prompts too."""
    if settings.itl_slo is None:
        return None
    if controller is not None:
        points = controller.cost.points
    else:
        points = measure_step_cost(loaded.executor, storage, settings.max_num_batched_tokens).points
    return StepPace(settings.itl_slo, StepCost(points))


class TextFilters:
    """Makes the text filter of a choice (scheduler.request.TextFilterFactory)."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __call__(self, request: EngineRequest, index: int) -> TextFilter:
        params = next(choice.params for choice in request.choices if choice.index == index)
        return ChoiceText(
            self._decoder,
            stop=request.stop,
            include_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            shown_special_ids=request.shown_special_ids,
            stop_token_ids=params.stop_token_ids,
            min_tokens=params.min_tokens,
        )


def system_fingerprint(model_fingerprint: str, sampling: str) -> str:
    """Same fingerprint, same seed, same request: same ids. ``sampling``: the kernels that take the logarithms, and what
    makes the masks of grammars."""
    return "fp_" + hashlib.sha256(f"{model_fingerprint}/{sampling}/{VERSION}".encode()).hexdigest()[:16]


def tokenizer_text(serialized: str, vocab_size: int, eos_token_ids: Sequence[int]) -> TokenizerText:
    """What grammars are compiled from."""
    return TokenizerText(serialized, vocab_size, tuple(sorted(eos_token_ids)))


def _grammars(settings: Settings, loaded: LoadedModel) -> tuple[GrammarCache | None, str | None]:
    """What compiles grammars; or why there is no structured output with this model."""
    serialized = loaded.tokenizer.serialized
    if serialized is None:
        return None, "its tokenizer is written in Python"
    text = tokenizer_text(serialized, loaded.info.vocab_size, loaded.info.eos_token_ids)
    try:
        return GrammarCache(GrammarCompiler(text), settings.grammar_cache_memory), None
    except NoGrammars as error:
        return None, str(error)


def _audit_blocks(settings: Settings, num_blocks: int, max_model_len: int) -> int:
    if settings.audit_rate == 0.0:
        return 0
    if settings.audit_blocks is not None:
        return settings.audit_blocks
    return min(-(-max_model_len // settings.block_size), max(1, num_blocks // AUDIT_MEMORY_SHARE))


def _audit_config(settings: Settings, exactness: ExactnessReport, dtype: str) -> AuditConfig | None:
    if settings.audit_rate == 0.0:
        return None
    return AuditConfig(
        rate=settings.audit_rate,
        share=settings.audit_share,
        max_waiting=settings.audit_max_waiting,
        max_waiting_tokens=settings.audit_max_waiting_tokens,
        exact=exactness.level == "L0",
        near_tie=NEAR_TIE.get(dtype, max(NEAR_TIE.values())),
    )


def _num_blocks(settings: Settings, planes: Sequence[PlaneSpec], device: str, max_model_len: int) -> int:
    if settings.num_blocks is not None:
        return settings.num_blocks
    block_size = settings.block_size
    if settings.kv_cache_memory is not None:
        budget, name = settings.kv_cache_memory, "kv_cache_memory"
    else:
        budget, name = available_bytes(device) // FREE_MEMORY_SHARE, "a quarter of the free memory"
    fitting = blocks_in_budget(planes, block_size, budget)
    if fitting < 1:
        needed = 2 * bytes_per_block(planes, block_size)
        raise StartError(f"{name} is {budget} bytes, too little for a KV cache: at least {needed} are needed")
    if settings.kv_cache_memory is not None:
        return fitting
    return min(fitting, settings.max_num_seqs * -(-max_model_len // block_size))


def _kernels_info(loaded: LoadedModel, found: str) -> dict[str, str]:
    """Which code computes: of the forward it is the part of the executor's name behind the slash."""
    forward = loaded.executor.kind.partition("/")[2]
    return {"setting": loaded.kernels, "forward": forward, "compiled": found}
