"""The one adapter between step records and Prometheus: plain numbers in, the text format out.

What each metric is stands in server.metrics.schema; how it is written in server.metrics.exposition.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

from kvcache.manager import KVCacheStats
from scheduler.audit import AUDIT_RESULTS
from scheduler.stats import FinishedChoice, StepRecord
from server.metrics.cells import Cell, Counter, Family, Gauge, Histogram, Watched
from server.metrics.exposition import Exposition, render
from server.metrics.labels import (
    BUILD_PARTS,
    FINISH_REASONS,
    GRAMMAR_RESULTS,
    HTTP_CODES,
    KV_SLOT_STATES,
    REJECTIONS,
)
from server.metrics.schema import SCHEMA
from specdec.plan import STAGES, StepStats

Alias = Literal["none", "vllm"]
T = TypeVar("T", bound=Cell)


class Metrics:
    """Every metric of docs/metrics.md. ``observe`` takes each step record once.

    All methods are for the event loop's thread. Labels hold the model's name and the engine's number, and fixed words;
    nothing that a request sent. ``drafters`` are the names of those that draft; ``drafter_memory`` is asked when
    somebody reads the metrics, so its functions must be quick. ``build`` holds the labels of ``build_info``. With
    ``alias`` the metrics that vLLM has too are also told under its names. ``clock`` is that of the requests' arrivals,
    ``wall_clock`` gives Unix time.
    """

    def __init__(
        self,
        *,
        model_name: str,
        max_speculative_tokens: int,
        engine: str = "0",
        exactness_level: int | None = None,
        audits: bool = False,
        cache_config: Mapping[str, object] | None = None,
        drafters: Sequence[str] = (),
        drafter_memory: Mapping[str, Callable[[], float]] | None = None,
        build: Mapping[str, str] | None = None,
        alias: Alias = "none",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._common = (model_name, engine)
        self._max_speculative_tokens = max_speculative_tokens
        self._clock = clock
        self._families: dict[str, Family] = {}
        self.registry = Exposition(self._families, vllm=alias == "vllm")  # its ``collect`` gives what is told
        gauge, counter, histogram = self._gauge, self._counter, self._histogram

        self._running = gauge("num_requests_running")
        self._waiting = gauge("num_requests_waiting")
        self._prompt_tokens = counter("prompt_tokens")
        self._generation_tokens = counter("generation_tokens")
        self._success = {reason: counter("request_success", reason) for reason in FINISH_REASONS}
        self._ended_tokens = {reason: counter("ended_generation_tokens", reason) for reason in FINISH_REASONS}
        self._rejections = {reason: counter("admission_rejections", reason) for reason in REJECTIONS}
        self._timeouts = counter("request_timeouts")
        self._responses = {int(code): counter("http_responses", code) for code in HTTP_CODES}
        self._grammar_checks = {result: counter("grammar_checks", result) for result in GRAMMAR_RESULTS}
        gauge("start_time_seconds").set(wall_clock())
        if build is not None:
            gauge("build_info", *_in_order("build_info", build)).set(1)

        self._ttft = histogram("time_to_first_token_seconds")
        self._itl = histogram("inter_token_latency_seconds")
        self._tpot = histogram("request_time_per_output_token_seconds")
        self._e2e = histogram("e2e_request_latency_seconds")
        self._queue = histogram("request_queue_time_seconds")
        self._prefill = histogram("request_prefill_time_seconds")
        self._decode = histogram("request_decode_time_seconds")
        self._loop_lag = histogram("event_loop_lag_seconds")
        self._iteration = histogram("iteration_tokens_total")
        self._stages = {stage: histogram("step_duration_seconds", stage) for stage in STAGES}
        self._build_parts = {part: histogram("batch_build_seconds", part) for part in BUILD_PARTS}

        self._drafts = counter("spec_decode_num_drafts")
        self._draft_tokens = counter("spec_decode_num_draft_tokens")
        self._accepted = counter("spec_decode_num_accepted_tokens")
        self._accepted_at = [
            counter("spec_decode_num_accepted_tokens_per_pos", str(i)) for i in range(max_speculative_tokens)
        ]
        self._acceptance_length = histogram("spec_decode_acceptance_length")
        self._chosen_k = histogram("spec_decode_num_speculative_tokens")
        self._by_drafter = {
            name: (
                counter("spec_decode_drafter_drafts", name),
                counter("spec_decode_drafter_draft_tokens", name),
                counter("spec_decode_drafter_accepted_tokens", name),
            )
            for name in drafters
        }
        for name, read in (drafter_memory or {}).items():
            self.watch("drafter_memory_bytes", read, name)
        self._speedup = gauge("spec_decode_expected_speedup")
        self._speedup.set(math.nan)  # until something was expected
        self._expected_tokens = counter("spec_decode_expected_tokens")
        self._measured_tokens = counter("spec_decode_measured_tokens")
        self._expected_seconds = counter("spec_decode_expected_step_seconds")
        self._measured_seconds = counter("spec_decode_measured_step_seconds")
        self._draft_seconds = counter("spec_decode_measured_draft_seconds")
        self._plain_seconds = counter("spec_decode_plain_seconds")
        self._rollback = counter("spec_decode_rollback_tokens")

        self._audits = {result: counter("equivalence_audits", result) for result in AUDIT_RESULTS}
        self._audits_enabled: Gauge | None = None  # without audits it is absent, so that 0 is always an alarm
        if audits:
            self._audits_enabled = gauge("equivalence_audits_enabled")
            self._audits_enabled.set(1)
        self._audit_tokens = counter("equivalence_audit_tokens")
        if exactness_level is not None:
            gauge("exactness_level").set(exactness_level)

        self._kv_usage = gauge("kv_cache_usage_perc")
        self._kv_free, self._kv_used, self._kv_cached = (gauge("kv_blocks", s) for s in ("free", "used", "cached"))
        self._fragmentation = gauge("kv_fragmentation_ratio")
        self._slots = {state: counter("kv_slot_steps", state) for state in KV_SLOT_STATES}
        self._preemptions = counter("num_preemptions")
        self._prefix_queries = counter("prefix_cache_queries")
        self._prefix_hits = counter("prefix_cache_hits")
        self._prefix_reuse = gauge("prefix_reuse_ratio")
        self._trimmed = counter("kv_blocks_trimmed")
        self._moved = counter("kv_blocks_moved")
        self._moved_bytes = counter("kv_alignment_bytes_moved")
        if cache_config is not None:
            gauge("cache_config_info", *_in_order("cache_config_info", cache_config)).set(1)

    def watch(self, name: str, read: Callable[[], float], *labels: str) -> None:
        """Ask ``read`` for a counter or gauge of the schema whenever the metrics are read, in the event loop's thread.

        What it raises is logged once, and the value is NaN then.
        """
        self._add(name, labels, Watched(read))

    def watch_engine(
        self,
        *,
        ready: Callable[[], bool],
        healthy: Callable[[], bool],
        step_age: Callable[[], float],
        oldest_arrival: Callable[[], float | None],
    ) -> None:
        """How the engine stands, asked for when the metrics are read: right also while a step hangs.

        ``oldest_arrival``: of who waits, on the clock; None while nobody does.
        """

        def waited() -> float:
            arrival = oldest_arrival()
            return 0.0 if arrival is None else max(0.0, self._clock() - arrival)

        self.watch("ready", ready)
        self.watch("engine_healthy", healthy)
        self.watch("engine_step_age_seconds", step_age)
        self.watch("oldest_waiting_seconds", waited)

    def observe_loop_lag(self, seconds: float) -> None:
        """The event loop came so much later than it should have."""
        self._loop_lag.observe(seconds)

    def observe(self, record: StepRecord) -> None:
        """Take one record: called after every step, so it touches plain numbers only."""
        kv = record.kv
        self._running.set(record.num_running)
        self._waiting.set(record.num_waiting)
        self._kv_usage.set(kv.usage)
        self._kv_free.set(kv.free_blocks)
        self._kv_used.set(kv.used_blocks)
        self._kv_cached.set(kv.cached_blocks)
        self._fragmentation.set(kv.fragmentation_ratio or 0.0)
        self._prompt_tokens.add(record.num_prompt_tokens)
        self._generation_tokens.add(record.num_generation_tokens)
        self._preemptions.add(record.num_preemptions)
        if record.prefix_queries:
            self._prefix_queries.add(record.prefix_queries)
            self._prefix_hits.add(record.prefix_hits)
            self._prefix_reuse.set(self._prefix_hits.value / self._prefix_queries.value)
        for seconds in record.first_token_seconds:
            self._ttft.observe(seconds)
        for seconds in record.inter_token_seconds:
            self._itl.observe(seconds)
        self._audit_tokens.add(record.num_audit_tokens)
        if self._audits_enabled is not None and record.audits_enabled is not None:
            self._audits_enabled.set(record.audits_enabled)
        for finding in record.audits:
            self._audits[finding.result].add()
        for finished in record.finished:
            self._observe_finished(finished)
        self._observe_sequences(record)
        if record.step is not None:
            self._observe_step(record.step)
            self._observe_slots(record.step, kv)

    def count_response(self, status: int) -> None:
        """Count an HTTP answer; 0 if the client left before there was one."""
        counter = self._responses.get(status)
        if counter is None:
            counter = self._responses[status] = self._counter("http_responses", str(status))
        counter.add()

    def count_grammar_check(self, result: str) -> None:
        """One of GRAMMAR_RESULTS."""
        self._grammar_checks[result].add()

    def count_timeout(self) -> None:
        """Count a request that was aborted at its deadline, queued or not."""
        self._timeouts.add()

    def reject(self, reason: str) -> None:
        """Count a request that was refused before it was queued; ``reason`` is one of REJECTIONS."""
        self._rejections[reason].add()

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return render(self.registry)

    def _observe_sequences(self, record: StepRecord) -> None:
        drafts = drafted = accepted = 0
        for sequence in record.sequences:
            self._chosen_k.observe(sequence.num_drafted)
            if sequence.num_drafted == 0:
                continue
            drafts += 1
            drafted += sequence.num_drafted
            accepted += sequence.num_accepted
            counters = self._by_drafter.get(sequence.drafter)
            if counters is not None:
                counters[0].add()
                counters[1].add(sequence.num_drafted)
                counters[2].add(sequence.num_accepted)
            self._acceptance_length.observe(1 + sequence.num_accepted)
            for position in self._accepted_at[: sequence.num_accepted]:
                position.add()
        if drafts:
            self._drafts.add(drafts)
            self._draft_tokens.add(drafted)
            self._accepted.add(accepted)

    def _observe_step(self, step: StepStats) -> None:
        self._iteration.observe(step.num_rows)
        for name, seconds in step.stage_seconds.items():
            if (stage := self._stages.get(name)) is not None:
                stage.observe(seconds)
        for name, seconds in step.build_seconds.items():
            if (part := self._build_parts.get(name)) is not None:
                part.observe(seconds)
        self._observe_expectation(step)
        self._rollback.add(step.rollback_tokens)
        self._trimmed.add(step.blocks_trimmed)
        self._moved.add(step.blocks_moved)
        self._moved_bytes.add(step.alignment_bytes_moved)

    def _observe_slots(self, step: StepStats, kv: KVCacheStats) -> None:
        """Blocks for drafts alone are gone after the step, so they are in no gauge."""
        if kv.used_slots is None or kv.last_block_slots is None:
            return
        self._slots["used"].add(kv.used_slots)
        self._slots["last_block"].add(kv.last_block_slots)
        self._slots["reserved"].add(kv.used_blocks * kv.block_size - kv.used_slots - kv.last_block_slots)
        self._slots["draft"].add(step.blocks_trimmed * kv.block_size)

    def _observe_expectation(self, step: StepStats) -> None:
        """A step that emits nothing only computes prompts: nothing is decided there, and nothing is compared."""
        tokens, seconds, speedup = step.expected_tokens, step.expected_seconds, step.expected_speedup
        if not tokens or not seconds or not speedup or not step.num_emitted:
            return
        drafting = step.stage_seconds.get("draft", 0.0)
        self._speedup.set(speedup)
        self._expected_tokens.add(tokens)
        self._expected_seconds.add(seconds)
        self._measured_tokens.add(step.num_emitted)
        self._measured_seconds.add(sum(step.stage_seconds.values()) - drafting)
        self._draft_seconds.add(drafting)
        self._plain_seconds.add(step.num_emitted * seconds * speedup / tokens)

    def _observe_finished(self, finished: FinishedChoice) -> None:
        timing = finished.timing
        self._success[finished.finish_reason].add()
        self._ended_tokens[finished.finish_reason].add(timing.num_output_tokens)
        if finished.finish_reason not in ("stop", "length"):
            return
        self._e2e.observe(finished.finish_time - timing.arrival_time)
        self._queue.observe(timing.queue_seconds)
        self._prefill.observe(timing.first_token_time - timing.first_scheduled_time)
        self._decode.observe(timing.decode_seconds)
        if timing.seconds_per_token is not None:
            self._tpot.observe(timing.seconds_per_token)

    def _gauge(self, name: str, *labels: str) -> Gauge:
        return self._add(name, labels, Gauge())

    def _counter(self, name: str, *labels: str) -> Counter:
        return self._add(name, labels, Counter())

    def _histogram(self, name: str, *labels: str) -> Histogram:
        return self._add(name, labels, Histogram(SCHEMA[name].bounds(self._max_speculative_tokens)))

    def _add(self, name: str, labels: tuple[str, ...], cell: T) -> T:
        """A series of a metric of the schema; ``labels`` in the schema's order, without the common ones."""
        family = self._families.setdefault(name, Family(SCHEMA[name]))
        values = (*self._common, *labels)
        if len(values) != len(family.metric.label_names):
            raise ValueError(f"{name} has the labels {family.metric.label_names}, got {values}")
        family.series[values] = cell
        return cell


def _in_order(name: str, labels: Mapping[str, object]) -> tuple[str, ...]:
    """Values of all labels of a metric. Raises KeyError if one is missing."""
    return tuple(str(labels[label.name]) for label in SCHEMA[name].labels)
