"""Builds everything that serves one model, once and in one place, and hands it on as a Service."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from kvcache.ledger import Ledger
from kvcache.manager import KVCacheManager
from kvcache.memory import available_bytes
from kvcache.storage import KVStorage, PlaneSpec, blocks_in_budget, bytes_per_block
from model.exactness import ExactnessReport
from model.kernels.load import find_kernels, kernels_identity
from model.loader import LoadedModel
from model.opening import open_model
from scheduler.audit import AuditConfig
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.request import EngineRequest, TextFilter
from scheduler.scheduler import Scheduler
from scheduler.stats import StepRecord
from server.audit_store import AuditStore
from server.audits import AuditReporter
from server.chat.template import ChatTemplate
from server.detokenize import ChoiceText, Decoder
from server.grammars import Grammars
from server.metrics import Metrics
from server.resolve import ModelFacts
from server.service import Service
from server.settings import Settings
from server.speculating import check_speculation, load_draft, report_idle_exit
from server.speculating import speculation as build_speculation
from server.tools.formats import find_format
from server.tools.grammar import AddedTokens
from server.tools.plan import ToolSupport
from server.version import VERSION
from specdec.describe import describe_speculation, drafter_memory
from specdec.drafters.forced import FORCED
from specdec.grammar.compiler import LIBRARY, GrammarCache, GrammarCompiler, NoGrammars, TokenizerText
from specdec.grammar.constraint import GrammarConstraint
from specdec.probe import measured_exactness
from specdec.sampling import Sampler
from specdec.step import SpeculativeStep

Report = Callable[[str], None]

AUDIT_MEMORY_SHARE = 8  # audits take at most an eighth of the KV cache's size on top, unless they are told how much
# Two logits this close count as tied below L0: some roundings of logits of the usual size (up to about 20).
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}
FREE_MEMORY_SHARE = 4  # the KV cache takes at most a quarter of what is free, unless it is told how much


class StartError(Exception):
    """The server cannot start; the message is one line."""


def build_service(settings: Settings, report: Report) -> Service:
    """Find, load and measure the model, and build the engine around it.

    Tells ``report`` how far it is. Raises StartError, model.errors.ModelError or model.source_error.ModelSourceError,
    each with one line, if the model or the settings cannot be served.
    """
    try:
        check_speculation(settings)
    except ValueError as error:
        raise StartError(str(error)) from error
    loaded, _ = load(settings, report)
    report_idle_exit(settings, report)
    draft = load_draft(settings, loaded, report)
    return assemble(settings, loaded, settings.served_model_name or (loaded.info.name,), draft)


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
    )


def assemble(
    settings: Settings, loaded: LoadedModel, names: tuple[str, ...], draft: LoadedModel | None = None
) -> Service:
    """A service around a loaded model, and a draft model if given; its engine is not started.

    Raises StartError, or ModelError below a required level.
    """
    info = loaded.info
    max_model_len = info.max_model_len if settings.max_model_len is None else settings.max_model_len
    if max_model_len > info.max_model_len:
        raise StartError(
            f"max_model_len is {max_model_len}, but {info.name} has a context of {info.max_model_len} tokens"
        )
    k = settings.num_speculative_tokens
    planes = (*loaded.executor.planes, *(draft.executor.planes if draft is not None else ()))
    num_blocks = _num_blocks(settings, planes, info.device, max_model_len)
    audit_blocks = _audit_blocks(settings, num_blocks, max_model_len)
    all_blocks = num_blocks + audit_blocks
    ledger = Ledger(all_blocks, settings.block_size) if settings.ledger else None
    manager = KVCacheManager(
        num_blocks,
        settings.block_size,
        enable_prefix_cache=settings.enable_prefix_cache,
        num_private_blocks=audit_blocks,
        observer=ledger,
    )
    storage = KVStorage(planes, num_blocks=all_blocks, block_size=settings.block_size, device=info.device)
    loaded.executor.bind(storage)
    if draft is not None:
        draft.executor.bind(storage)
    kernels, kernels_found = find_kernels(loaded.kernels)
    sampler = Sampler(kernels)
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
    fingerprint = system_fingerprint(loaded.fingerprint, sampling)
    grammars, text, no_grammars = _grammars(settings, loaded)
    step = SpeculativeStep(
        loaded.executor,
        manager,
        storage,
        drafters=drafters,
        default_drafter=speculation.default_drafter if speculation else None,
        sampler=sampler,
        constraint=None if grammars is None else GrammarConstraint(grammars),
        controller=controller,
        auto=speculation.auto if speculation else (),
        max_model_len=max_model_len,
        ledger=ledger,
    )
    tokenizer = loaded.tokenizer
    scheduler = Scheduler(
        manager,
        SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=max_model_len,
            num_speculative_tokens=k,
            max_waiting_requests=settings.max_waiting,
            max_waiting_tokens=settings.max_waiting_tokens,
            audit=_audit_config(settings, exactness, info.dtype),
        ),
        text_filters=TextFilters(tokenizer),
    )
    facts = ModelFacts(
        names=names,
        max_model_len=max_model_len,
        vocab_size=info.vocab_size,
        embedding_rows=info.embedding_rows,
        eos_token_ids=frozenset(info.eos_token_ids),
        kv_capacity=num_blocks * settings.block_size,
        num_speculative_tokens=k,
        drafters=speculation.names if speculation else (),
    )
    metrics = Metrics(
        model_name=names[0],
        audits=settings.audit_rate > 0.0,
        max_speculative_tokens=k,
        drafters=(*drafters, *((FORCED,) if drafters and grammars is not None else ())),
        drafter_memory=drafter_memory(drafters),
        exactness_level=int(exactness.level[1:]),
        cache_config={
            "block_size": settings.block_size,
            "num_blocks": num_blocks,
            "enable_prefix_cache": settings.enable_prefix_cache,
            "cache_dtype": info.dtype,
        },
    )
    reporter = AuditReporter(
        model=names[0], fingerprint=fingerprint, level=exactness.level, store=_audit_store(settings)
    )

    chat = ChatTemplate(tokenizer, timeout=settings.template_timeout)
    tools = _tools(settings, loaded, chat)

    def on_step(record: StepRecord) -> None:
        metrics.observe(record)
        reporter.observe(record)

    return Service(
        settings=settings,
        engine=Engine(scheduler, step, on_step=on_step),
        reporter=reporter,
        tokenizer=tokenizer,
        grammars=Grammars(
            grammars, text, reason=no_grammars, timeout=settings.grammar_timeout, count=metrics.count_grammar_check
        ),
        chat=chat,
        tools=tools,
        facts=facts,
        metrics=metrics,
        fingerprint=fingerprint,
        created=int(time.time()),
        speculation=partial(describe_speculation, drafters, controller.cost if controller else None),
        info={
            **_server_info(
                settings, loaded, exactness, facts, storage, fingerprint, _kernels_info(loaded, kernels_found)
            ),
            "tool_calls": tools.info,
        },
    )


def _grammars(settings: Settings, loaded: LoadedModel) -> tuple[GrammarCache | None, TokenizerText | None, str | None]:
    """What compiles grammars, and from what; or why there is no structured output with this model."""
    tokenizer = loaded.tokenizer.serialized
    if tokenizer is None:
        return None, None, "its tokenizer is written in Python"
    text = TokenizerText(tokenizer, loaded.info.vocab_size, tuple(sorted(loaded.info.eos_token_ids)))
    try:
        return GrammarCache(GrammarCompiler(text), settings.grammar_cache_memory), text, None
    except NoGrammars as error:
        return None, None, str(error)


def _tools(settings: Settings, loaded: LoadedModel, chat: ChatTemplate) -> ToolSupport:
    tokenizer, with_tools = loaded.tokenizer, chat.source(with_tools=True)
    added = tokenizer.added_tokens
    tool_format = find_format(settings.tool_call_parser, with_tools, added.values())
    tokens = AddedTokens(added, tokenizer.special_token_ids, frozenset(loaded.info.eos_token_ids))
    return ToolSupport(tool_format, tokens, chat.source(with_tools=False), with_tools)


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


def _audit_store(settings: Settings) -> AuditStore | None:
    if settings.audit_store is None or settings.audit_rate == 0.0:
        return None
    try:
        return AuditStore(
            settings.audit_store, max_files=settings.audit_store_files, max_bytes=settings.audit_store_bytes
        )
    except OSError as error:
        raise StartError(f"audit_store {settings.audit_store} cannot be used: {error.strerror or error}") from error


def system_fingerprint(model_fingerprint: str, sampling: str) -> str:
    """Same fingerprint, same seed, same request: same ids. ``sampling``: the kernels that take the logarithms, and what
    makes the masks of grammars."""
    return "fp_" + hashlib.sha256(f"{model_fingerprint}/{sampling}/{VERSION}".encode()).hexdigest()[:16]


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


def _server_info(
    settings: Settings,
    loaded: LoadedModel,
    exactness: ExactnessReport,
    facts: ModelFacts,
    storage: KVStorage,
    fingerprint: str,
    kernels: dict[str, str],
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "model": {**asdict(loaded.info), "served_names": list(facts.names)},
        "exactness": {
            "level": exactness.level,
            "summary": exactness.summary,
            "detail": exactness.detail,
            "padding": exactness.padding,
            "cached": exactness.cached,
            "checks": [asdict(check) for check in exactness.checks],
        },
        "executor": loaded.executor.kind,
        "kernels": kernels,
        "system_fingerprint": fingerprint,
        "kv_cache": {
            "num_blocks": facts.kv_capacity // storage.block_size,
            "audit_blocks": storage.num_blocks - facts.kv_capacity // storage.block_size,
            "block_size": storage.block_size,
            "capacity_tokens": facts.kv_capacity,
            "bytes": storage.num_bytes,
            "planes": len(storage.names),
        },
        "limits": {
            "max_model_len": facts.max_model_len,
            "max_n": settings.max_n,
            "max_stop": settings.max_stop,
            "max_prompts": settings.max_prompts,
            "max_choices": settings.max_choices,
            "max_body_bytes": settings.max_body_bytes,
            "max_waiting": settings.max_waiting,
        },
        # The models' folders are nobody's business; their names stand above. Nor is the audits'.
        "settings": settings.model_dump(mode="json", exclude={"model", "draft_model", "audit_store"}),
    }
