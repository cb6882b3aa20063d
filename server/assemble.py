"""Builds everything that serves one model, once and in one place, and hands it on as a Service."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from model.loader import LoadedModel
from model.tokenizer import Tokenizer
from scheduler.engine import Engine
from scheduler.interface import EngineInterface
from scheduler.stats import StepRecord
from server.audit_store import AuditStore
from server.audits import AuditReporter
from server.auth.keys import NO_KEYS, ApiKeys, KeysError, load_keys, open_to_others
from server.chat.template import ChatTemplate
from server.description import EngineDescription
from server.engine import Report as Report
from server.engine import build_engine, open_models, tokenizer_text
from server.engine import load as load
from server.grammars import CompiledGrammars, Grammars, LocalGrammars
from server.log_queue import num_dropped_lines
from server.metrics import Metrics
from server.parts import PLAIN, Parts
from server.rate import RateLimiter, RateLimits
from server.service import Service
from server.settings import Settings
from server.start_error import StartError as StartError
from server.tls import TlsError, check_tls
from server.tools.formats import find_format
from server.tools.grammar import AddedTokens
from server.tools.plan import ToolSupport
from server.tracing.start import start_tracing
from server.tracing.tracing import TRACE_RESULTS
from server.ui.feed import Feed
from server.version import VERSION

logger = logging.getLogger("truedraft.assemble")


def build_service(settings: Settings, report: Report, parts: Parts = PLAIN) -> Service:
    """Find, load and measure the model, and build the engine around it: here, or in a process of its own.

    Tells ``report`` how far it is. Raises StartError, model.errors.ModelError or model.source_error.ModelSourceError,
    each with one line, if the model or the settings cannot be served.
    """
    try:
        check_tls(settings)
        keys = load_keys(settings.api_keys_file, os.environ)
        if settings.api_keys_file is not None and (mode := open_to_others(settings.api_keys_file)) is not None:
            logger.warning("api_keys_file %s is open to others (mode %s): chmod 600", settings.api_keys_file, mode)
    except (TlsError, KeysError) as error:
        raise StartError(str(error)) from None
    if settings.engine_process:
        return _around_process(settings, report, parts, keys)
    opened = open_models(settings, report)
    names = settings.served_model_name or (opened.loaded.info.name,)
    return assemble(settings, opened.loaded, names, opened.draft, parts, keys)


def _around_process(settings: Settings, report: Report, parts: Parts, keys: ApiKeys) -> Service:
    # Imported here: who has the engine in this process needs none of it.
    from server.remote.start import start_engine_process

    if parts is not PLAIN:
        raise StartError("parts of one's own cannot go into the engine's process; leave out engine_process")
    started = start_engine_process(settings, report)
    try:
        return surround(
            settings,
            started.engine,
            started.description,
            started.tokenizer,
            started.grammars,
            started.speculation,
            keys=keys,
        )
    except BaseException:
        started.engine.kill()
        raise


def assemble(
    settings: Settings,
    loaded: LoadedModel,
    names: tuple[str, ...],
    draft: LoadedModel | None = None,
    parts: Parts = PLAIN,
    keys: ApiKeys = NO_KEYS,
) -> Service:
    """A service around a loaded model, and a draft model if given; its engine is not started.

    Raises StartError, or ModelError below a required level.
    """
    built = build_engine(settings, loaded, names, draft, parts)
    return surround(
        settings,
        Engine(built.scheduler, built.step),
        built.description,
        loaded.tokenizer,
        None if built.grammars is None else LocalGrammars(built.grammars),
        built.speculation,
        parts,
        keys,
    )


def surround(
    settings: Settings,
    engine: EngineInterface,
    description: EngineDescription,
    tokenizer: Tokenizer,
    grammars: CompiledGrammars | None,
    speculation: Callable[[], Mapping[str, Any]],
    parts: Parts = PLAIN,
    keys: ApiKeys = NO_KEYS,
) -> Service:
    """The wire's side around an engine that was not started. Raises StartError."""
    tokenizer.prepare()
    facts, name = description.facts, description.names[0]
    metrics = Metrics(
        model_name=name,
        audits=description.scheduler.audit is not None,
        max_speculative_tokens=facts.num_speculative_tokens,
        drafters=description.drafting,
        drafter_memory={drafter: partial(_memory_of, speculation, drafter) for drafter in description.remembering},
        exactness_level=int(description.exactness.level[1:]),
        cache_config={
            "block_size": description.block_size,
            "num_blocks": description.num_blocks,
            "enable_prefix_cache": settings.enable_prefix_cache,
            "cache_dtype": description.model.dtype,
        },
        build={
            "version": VERSION,
            "executor": description.executor,
            "exactness": description.exactness.level,
            "system_fingerprint": description.fingerprint,
        },
        alias=settings.metrics_alias,
    )
    limiter = _limiter(settings, keys, metrics)
    tokenizer = parts.tokenizer(tokenizer)
    reporter = AuditReporter(
        model=name,
        fingerprint=description.fingerprint,
        level=description.exactness.level,
        store=_audit_store(settings),
    )
    chat = ChatTemplate(tokenizer, timeout=settings.template_timeout, worker=parts.worker)
    tools = _tools(settings, tokenizer, facts.eos_token_ids, chat)
    serialized = tokenizer.serialized
    feed = Feed() if settings.ui else None
    tracing = start_tracing(settings)

    def on_step(record: StepRecord) -> None:
        metrics.observe(record)
        reporter.observe(record)
        limiter.settle(record.finished)
        if feed is not None:
            feed.observe(record)
        if tracing is not None:
            tracing.observe(record)

    engine.on_step = on_step
    service = Service(
        settings=settings,
        engine=engine,
        reporter=reporter,
        tokenizer=tokenizer,
        grammars=Grammars(
            grammars,
            None if serialized is None else tokenizer_text(serialized, facts.vocab_size, tuple(facts.eos_token_ids)),
            reason=description.no_grammars,
            timeout=settings.grammar_timeout,
            count=metrics.count_grammar_check,
            worker=parts.worker,
        ),
        chat=chat,
        tools=tools,
        facts=facts,
        metrics=metrics,
        keys=keys,
        limiter=limiter,
        fingerprint=description.fingerprint,
        created=description.created,
        audit=description.scheduler.audit,
        speculation=speculation,
        feed=feed,
        tracing=tracing,
        info={**description.info(settings), "tool_calls": tools.info},
    )
    metrics.watch_engine(
        ready=lambda: service.unready_reason is None,
        healthy=lambda: engine.healthy,
        step_age=lambda: engine.seconds_since_progress,
        oldest_arrival=lambda: engine.oldest_arrival,
    )
    metrics.watch("log_lines_dropped", num_dropped_lines)
    if tracing is not None:
        for result in TRACE_RESULTS:
            metrics.watch("traces", partial(tracing.counts.__getitem__, result), result)
    return service


def _limiter(settings: Settings, keys: ApiKeys, metrics: Metrics) -> RateLimiter:
    default = RateLimits(settings.rate_limit_requests, settings.rate_limit_tokens)
    limits: dict[str | None, RateLimits] = {name: keys.limits_of(name, default) for name in keys.names}
    return RateLimiter(limits or {None: default}, count=metrics.reject, clock=time.monotonic)


def _memory_of(speculation: Callable[[], Mapping[str, Any]], name: str) -> float:
    """What a drafter holds of past texts now, in bytes."""
    return next((each["memory_bytes"] or 0 for each in speculation()["drafters"] if each["name"] == name), 0)


def _tools(settings: Settings, tokenizer: Tokenizer, eos_token_ids: frozenset[int], chat: ChatTemplate) -> ToolSupport:
    with_tools, added = chat.source(with_tools=True), tokenizer.added_tokens
    tool_format = find_format(settings.tool_call_parser, with_tools, added.values())
    tokens = AddedTokens(added, tokenizer.special_token_ids, eos_token_ids)
    return ToolSupport(tool_format, tokens, chat.source(with_tools=False), with_tools)


def _audit_store(settings: Settings) -> AuditStore | None:
    if settings.audit_store is None or settings.audit_rate == 0.0:
        return None
    try:
        return AuditStore(
            settings.audit_store, max_files=settings.audit_store_files, max_bytes=settings.audit_store_bytes
        )
    except OSError as error:
        raise StartError(f"audit_store {settings.audit_store} cannot be used: {error.strerror or error}") from error
