"""The one adapter that knows Prometheus: plain step records in, the text format out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from scheduler.audit import AUDIT_RESULTS
from scheduler.stats import FinishedChoice, StepRecord
from specdec.plan import StepStats

PREFIX = "truedraft_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
STAGES = ("draft", "build", "verify", "accept", "rollback", "sync")
FINISH_REASONS = ("stop", "length", "abort", "error")
# Every reason that scheduler/errors.py has, and the server's own.
GRAMMAR_RESULTS = ("accepted", "refused", "timeout", "crashed")
REJECTIONS = (
    "queue_full", "queue_tokens", "context_length", "kv_capacity", "shutting_down", "unhealthy",
    "connections", "bodies", "texts", "templates", "grammars",
    "invalid_api_key", "rate_limit_requests", "rate_limit_tokens", "rate_limit_size",
)  # fmt: skip

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_BUCKETS = (
    0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10,
)  # fmt: skip
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """Every metric of docs/metrics.md. ``observe`` takes each step record once; nothing else feeds it.

    Labels hold the model's name and the engine's number, and fixed words; nothing that a request sent. ``drafters``
    are the names of those that draft; ``drafter_memory`` is asked when somebody reads the metrics, so its functions
    must be quick and safe in any thread.
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
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._parents: dict[str, Any] = {}
        self._fixed = {"model_name": model_name, "engine": engine}
        gauge, counter, histogram = self._gauge, self._counter, self._histogram

        self._running = gauge("num_requests_running", "Choices that run.")
        self._waiting = gauge("num_requests_waiting", "Choices that wait, preempted ones among them.")
        self._kv_usage = gauge("kv_cache_usage_perc", "Referenced KV blocks / all, 0 to 1.")
        self._kv_blocks = {
            state: gauge("kv_blocks", "KV blocks by state.", state=state) for state in ("free", "used", "cached")
        }
        self._fragmentation = gauge("kv_fragmentation_ratio", "1 - used slots / slots of allocated blocks.")
        if cache_config:
            info = gauge(
                "cache_config_info", "How the KV cache is set up.", **{k: str(v) for k, v in cache_config.items()}
            )
            info.set(1)
        if exactness_level is not None:
            gauge("exactness_level", "0 is L0: pathwise exact.").set(exactness_level)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens, each request's once.")
        self._generation_tokens = counter("generation_tokens", "Committed output tokens.")
        self._success = {
            reason: counter("request_success", "Finished choices.", finished_reason=reason) for reason in FINISH_REASONS
        }
        self._ended_tokens = {
            reason: counter("ended_generation_tokens", "Output tokens of choices that ended.", finished_reason=reason)
            for reason in FINISH_REASONS
        }
        self._preemptions = counter("num_preemptions", "Choices that lost their blocks and were computed again.")
        self._rejections = {
            reason: counter("admission_rejections", "Requests refused before they were queued.", reason=reason)
            for reason in REJECTIONS
        }
        self._grammar_checks = {
            result: counter(
                "grammar_checks", "Grammars of requests that were compiled to see if they can be.", result=result
            )
            for result in GRAMMAR_RESULTS
        }
        self._timeouts = counter("request_timeouts", "Requests that did not end within their timeout.")
        self._prefix_queries = counter("prefix_cache_queries", "Tokens that the prefix cache was asked for.")
        self._prefix_hits = counter("prefix_cache_hits", "Tokens that it had.")
        self._prefix_reuse = gauge("prefix_reuse_ratio", "Hits / queries since the start.")

        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self._itl = histogram("inter_token_latency_seconds", "Gap between two chunks of tokens.", ITL_BUCKETS)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "(last - first token) / (output tokens - 1).", ITL_BUCKETS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", LATENCY_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "Arrival to first scheduled.", LATENCY_BUCKETS)
        self._prefill = histogram("request_prefill_time_seconds", "First scheduled to first token.", LATENCY_BUCKETS)
        self._decode = histogram("request_decode_time_seconds", "First to last token.", LATENCY_BUCKETS)
        self._iteration = histogram("iteration_tokens_total", "Rows of a step, drafts included.", TOKEN_BUCKETS)
        self._stages = {
            stage: histogram("step_duration_seconds", "Stages of a speculative step.", STEP_BUCKETS, stage=stage)
            for stage in STAGES
        }

        self._drafts = counter(
            "spec_decode_num_drafts", "Drafts verified: one for each sequence and step that had one."
        )
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Tokens of these drafts.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self._accepted_at = [
            counter("spec_decode_num_accepted_tokens_per_pos", "Accepted, by place in the draft.", position=str(i))
            for i in range(max_speculative_tokens)
        ]
        lengths = tuple(range(1, max_speculative_tokens + 2))
        self._acceptance_length = histogram("spec_decode_acceptance_length", "1 + accepted, for each draft.", lengths)
        self._chosen_k = histogram(
            "spec_decode_num_speculative_tokens",
            "Draft length chosen for a sequence in a step: draft tokens verified, 0 for plain decoding.",
            (0, *lengths[:-1]),
        )
        self._by_drafter = {
            name: tuple(
                counter(f"spec_decode_drafter_{what}", f"{help_text} By who drafted them.", drafter=name)
                for what, help_text in (
                    ("drafts", "Drafts verified."),
                    ("draft_tokens", "Tokens of these drafts."),
                    ("accepted_tokens", "Draft tokens that were accepted."),
                )
            )
            for name in drafters
        }
        for name, read in (drafter_memory or {}).items():
            gauge("drafter_memory_bytes", "What a drafter holds of past texts.", drafter=name).set_function(read)
        self._speedup = gauge(
            "spec_decode_expected_speedup", "Tokens a second expected of the last step / the same without drafts."
        )
        self._speedup.set(math.nan)  # until something was expected
        self._expected_tokens = counter("spec_decode_expected_tokens", "Tokens that steps were expected to emit.")
        self._expected_seconds = counter(
            "spec_decode_expected_step_seconds", "Seconds that these steps were expected to take, drafting apart."
        )
        self._measured_tokens = counter("spec_decode_measured_tokens", "Tokens that these steps did emit.")
        self._measured_seconds = counter(
            "spec_decode_measured_step_seconds", "Seconds that these steps did take, drafting apart."
        )
        self._draft_seconds = counter("spec_decode_measured_draft_seconds", "Seconds of drafting in these steps.")
        self._plain_seconds = counter(
            "spec_decode_plain_seconds",
            "Seconds that the tokens of these steps would have taken without drafts, by the cost model.",
        )
        self._rollback = counter("spec_decode_rollback_tokens", "Rejected drafts whose slots had been written.")
        self._trimmed = counter("kv_blocks_trimmed", "Blocks given back after a rejection.")
        self._moved = counter("kv_blocks_moved", "KV blocks copied to align sequences; 0 by design.")
        self._moved_bytes = counter("kv_alignment_bytes_moved", "KV bytes copied to align sequences; 0 by design.")
        self._audits = {
            result: counter("equivalence_audits", "Choices run again without speculation.", result=result)
            for result in AUDIT_RESULTS
        }
        self._audits_enabled: Gauge | None = None  # without audits it is absent, so that 0 is always an alarm
        if audits:
            self._audits_enabled = gauge("equivalence_audits_enabled", "1, or 0 once audits were switched off.")
            self._audits_enabled.set(1)
        self._audit_tokens = counter("equivalence_audit_tokens", "Rows that audits ran.")
        self._num_queries = 0
        self._num_hits = 0

    def count_grammar_check(self, result: str) -> None:
        """One of GRAMMAR_RESULTS."""
        self._grammar_checks[result].inc()

    def observe(self, record: StepRecord) -> None:
        """Take one record. Called on the event loop; touches plain numbers only."""
        self._running.set(record.num_running)
        self._waiting.set(record.num_waiting)
        self._kv_usage.set(record.kv.usage)
        self._kv_blocks["free"].set(record.kv.free_blocks)
        self._kv_blocks["used"].set(record.kv.used_blocks)
        self._kv_blocks["cached"].set(record.kv.cached_blocks)
        self._fragmentation.set(record.kv.fragmentation_ratio or 0.0)
        _add(self._prompt_tokens, record.num_prompt_tokens)
        _add(self._generation_tokens, record.num_generation_tokens)
        _add(self._preemptions, record.num_preemptions)
        if record.prefix_queries:
            self._num_queries += record.prefix_queries
            self._num_hits += record.prefix_hits
            _add(self._prefix_queries, record.prefix_queries)
            _add(self._prefix_hits, record.prefix_hits)
            self._prefix_reuse.set(self._num_hits / self._num_queries)
        for seconds in record.first_token_seconds:
            self._ttft.observe(seconds)
        for seconds in record.inter_token_seconds:
            self._itl.observe(seconds)
        _add(self._audit_tokens, record.num_audit_tokens)
        if self._audits_enabled is not None and record.audits_enabled is not None:
            self._audits_enabled.set(record.audits_enabled)
        for finding in record.audits:
            self._audits[finding.result].inc()
        for finished in record.finished:
            self._observe_finished(finished)
        self._observe_step(record)

    def _observe_step(self, record: StepRecord) -> None:
        for sequence in record.sequences:
            self._chosen_k.observe(sequence.num_drafted)
            if sequence.num_drafted == 0:
                continue
            if sequence.drafter in self._by_drafter:
                drafts, tokens, accepted = self._by_drafter[sequence.drafter]
                drafts.inc()
                tokens.inc(sequence.num_drafted)
                _add(accepted, sequence.num_accepted)
            self._drafts.inc()
            self._draft_tokens.inc(sequence.num_drafted)
            _add(self._accepted, sequence.num_accepted)
            self._acceptance_length.observe(1 + sequence.num_accepted)
            for child in self._accepted_at[: sequence.num_accepted]:
                child.inc()
        step = record.step
        if step is None:
            return
        self._iteration.observe(step.num_rows)
        for name, seconds in step.stage_seconds.items():
            stage = self._stages.get(name)
            if stage is not None:
                stage.observe(seconds)
        self._observe_expectation(step)
        _add(self._rollback, step.rollback_tokens)
        _add(self._trimmed, step.blocks_trimmed)
        _add(self._moved, step.blocks_moved)
        _add(self._moved_bytes, step.alignment_bytes_moved)

    def _observe_expectation(self, step: StepStats) -> None:
        """A step that emits nothing only computes prompts: nothing is decided there, and nothing is compared."""
        tokens, seconds, speedup = step.expected_tokens, step.expected_seconds, step.expected_speedup
        if not tokens or not seconds or not speedup or not step.num_emitted:
            return
        drafting = step.stage_seconds.get("draft", 0.0)
        self._speedup.set(speedup)
        self._expected_tokens.inc(tokens)
        self._expected_seconds.inc(seconds)
        self._measured_tokens.inc(step.num_emitted)
        self._measured_seconds.inc(sum(step.stage_seconds.values()) - drafting)
        self._draft_seconds.inc(drafting)
        self._plain_seconds.inc(step.num_emitted * seconds * speedup / tokens)

    def _observe_finished(self, finished: FinishedChoice) -> None:
        timing = finished.timing
        self._success[finished.finish_reason].inc()
        _add(self._ended_tokens[finished.finish_reason], timing.num_output_tokens)
        if finished.finish_reason not in ("stop", "length"):
            return
        self._e2e.observe(finished.finish_time - timing.arrival_time)
        self._queue.observe(timing.first_scheduled_time - timing.arrival_time)
        self._prefill.observe(timing.first_token_time - timing.first_scheduled_time)
        self._decode.observe(timing.last_token_time - timing.first_token_time)
        if timing.num_output_tokens > 1:
            self._tpot.observe((timing.last_token_time - timing.first_token_time) / (timing.num_output_tokens - 1))

    def count_timeout(self) -> None:
        """Count a request that was aborted at its deadline, queued or not."""
        self._timeouts.inc()

    def reject(self, reason: str) -> None:
        """Count a request that was refused before it was queued; ``reason`` is one of REJECTIONS."""
        self._rejections[reason].inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _gauge(self, name: str, help_text: str, **labels: str) -> Gauge:
        return self._child(Gauge, name, help_text, labels)  # type: ignore[no-any-return]

    def _counter(self, name: str, help_text: str, **labels: str) -> Counter:
        return self._child(Counter, name, help_text, labels)  # type: ignore[no-any-return]

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...], **labels: str) -> Histogram:
        return self._child(Histogram, name, help_text, labels, buckets=buckets)  # type: ignore[no-any-return]

    def _child(self, kind: type, name: str, help_text: str, labels: dict[str, str], **options: Any) -> Any:
        """A metric's child with its labels bound once, so that a step costs no look-up by label."""
        if name not in self._parents:
            names = (*LABELS, *labels)
            self._parents[name] = kind(PREFIX + name, help_text, names, registry=self.registry, **options)
        return self._parents[name].labels(**self._fixed, **labels)


def _add(counter: Counter, amount: int) -> None:
    if amount:
        counter.inc(amount)
