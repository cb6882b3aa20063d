"""Metrics of requests, of whether they are welcome, and of the time they take."""

from __future__ import annotations

from server.metrics.kinds import ALWAYS_ONE, Group, Label, Metric
from server.metrics.labels import CODE, FINISHED_REASON, GRAMMAR_RESULT, REASON, TRACE_RESULT

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


def _quantile(name: str, quantile: str = "0.95") -> str:
    return f"histogram_quantile({quantile}, sum by (le) (rate(truedraft_{name}_bucket[5m])))"


REQUESTS = Group(
    "Requests",
    (
        Metric(
            "num_requests_running",
            "gauge",
            "choices",
            "Choices that run.",
            query="sum by (model_name) (truedraft_num_requests_running)",
            worry="It stays at `--max-num-seqs` while others wait: the server is full.",
            more="A request has `n` choices for each of its prompts.",
            vllm=True,
        ),
        Metric(
            "num_requests_waiting",
            "gauge",
            "choices",
            "Choices that wait, preempted ones among them.",
            query="sum by (model_name) (truedraft_num_requests_waiting)",
            worry="It grows for minutes: more comes in than can be done. Add a replica (this is the metric to scale "
            "on), or shed earlier with `--max-waiting`.",
            vllm=True,
        ),
        Metric(
            "oldest_waiting_seconds",
            "gauge",
            "seconds",
            "Since the arrival of the request that has waited longest without having run; 0 while none waits.",
            query="max by (instance) (truedraft_oldest_waiting_seconds)",
            worry="It is above the time to the first token that you promise. Unlike the length of the queue it says "
            "how long people wait. Growing second by second while nothing runs: see `engine_step_age_seconds`.",
            more="Asked for when the metrics are read, so it is right also while a step hangs.",
        ),
        Metric(
            "prompt_tokens",
            "counter",
            "tokens",
            "Prompt tokens, each request's once.",
            query="sum(rate(truedraft_prompt_tokens_total[5m]))",
            worry="Never by itself: together with `generation_tokens_total` it is the load.",
            vllm=True,
        ),
        Metric(
            "generation_tokens",
            "counter",
            "tokens",
            "Committed output tokens.",
            query="sum(rate(truedraft_generation_tokens_total[5m]))",
            worry="It stands still while choices run: see `engine_step_age_seconds`.",
            vllm=True,
        ),
        Metric(
            "request_success",
            "counter",
            "choices",
            "Finished choices.",
            query="sum by (finished_reason) (rate(truedraft_request_success_total[5m]))\n"
            "# share of those that ended in an error\n"
            'sum(rate(truedraft_request_success_total{finished_reason="error"}[5m]))\n'
            "  / sum(rate(truedraft_request_success_total[5m]))",
            worry="`error` at all: the log has the reason under the request's id. Many more `abort` than usual: "
            "clients give up, mostly because they wait too long.",
            labels=(FINISHED_REASON,),
            more="All ends, whatever the name says: it is vLLM's.",
            vllm=True,
        ),
        Metric(
            "ended_generation_tokens",
            "counter",
            "tokens",
            "Output tokens of choices that ended.",
            query="# share of the tokens that were computed for nobody\n"
            'sum(rate(truedraft_ended_generation_tokens_total{finished_reason="abort"}[5m]))\n'
            "  / sum(rate(truedraft_ended_generation_tokens_total[5m]))",
            worry="That share is more than some percent: work is done for clients that have left.",
            labels=(FINISHED_REASON,),
            more="Those that nobody read included: once nothing runs, they add up to `generation_tokens_total`.",
        ),
        Metric(
            "admission_rejections",
            "counter",
            "requests",
            "Requests refused before they were queued.",
            query="sum by (reason) (rate(truedraft_admission_rejections_total[5m]))",
            worry="`queue_full`, `queue_tokens`, `connections`, `bodies`, `texts`, `templates`, `grammars`: load is "
            "shed. `unhealthy`: the engine has failed. `shutting_down` for longer than a drain takes: a pod does not "
            "end. The others are the clients' doing.",
            labels=(REASON,),
            more="The reasons are explained in [limits.md](limits.md).",
        ),
        Metric(
            "request_timeouts",
            "counter",
            "requests",
            "Requests that did not end within their timeout, queued or not.",
            query="sum(rate(truedraft_request_timeouts_total[5m]))",
            worry="It grows: requests wait or run for longer than `--request-timeout`, or than they ask for.",
        ),
        Metric(
            "http_responses",
            "counter",
            "responses",
            "HTTP answers, those to /health, /live, /metrics and /ui left out.",
            query="sum by (code) (rate(truedraft_http_responses_total[5m]))\n"
            "# share of failures, what was shed (503) left out\n"
            'sum(rate(truedraft_http_responses_total{code=~"500|504"}[5m]))\n'
            "  / sum(rate(truedraft_http_responses_total[5m]))",
            worry="`500` at all; `503` and `429`: load is shed; a jump of `400` or `401`: a client is wrong.",
            labels=(CODE,),
            more="A stream that fails after it began was a `200`: its choices end with `error` in "
            "`request_success_total`.",
        ),
        Metric(
            "grammar_checks",
            "counter",
            "grammars",
            "Grammars of requests that were compiled to see if they can be.",
            query="sum by (result) (rate(truedraft_grammar_checks_total[5m]))",
            worry="`timeout` or `crashed`: somebody sends schemas or patterns that are too hard. Others are not "
            "affected.",
            labels=(GRAMMAR_RESULT,),
            more="Schemas, regexes and grammars alike; known ones are not compiled again and not counted.",
        ),
    ),
)

HEALTH = Group(
    "Health",
    (
        Metric(
            "ready",
            "gauge",
            "0 or 1",
            "1 while /health answers 200: new requests are welcome.",
            query="min by (instance) (truedraft_ready)",
            worry="0 for longer than a drain takes. `/health` says why.",
            more="A server that cannot be scraped has no value here: ask `up` too.",
        ),
        Metric(
            "engine_healthy",
            "gauge",
            "0 or 1",
            "1, or 0 once the engine has failed: then only a new start helps.",
            query="min by (instance) (truedraft_engine_healthy)",
            worry="0. The server ends by itself within seconds, and whatever runs it starts it again; the log says "
            "what failed ([failures.md](failures.md)).",
        ),
        Metric(
            "engine_step_age_seconds",
            "gauge",
            "seconds",
            "Since the engine's last step ended, while it has work; 0 while idle.",
            query="max by (instance) (truedraft_engine_step_age_seconds)",
            worry="It is many times the longest step (`step_duration_seconds`): the engine is stuck. At "
            "`--stall-timeout` the server ends itself.",
            more="What `/health` and `/live` look at. Of an engine in a process of its own it includes the time since "
            "that process was heard last.",
        ),
        Metric(
            "event_loop_lag_seconds",
            "histogram",
            "seconds",
            "How late the event loop came to a task that wants to run every 50 milliseconds.",
            query="histogram_quantile(0.99, sum by (instance, le) (rate(truedraft_event_loop_lag_seconds_bucket[5m])))",
            worry="It is a good part of a step, and streams stutter: something holds up the loop that reads requests "
            "and writes answers, or the machine has too few cores for the threads that run "
            "([event_loop.md](event_loop.md)).",
            buckets=LAG_BUCKETS,
            more="Looked at 20 times a second, so a short pause is often missed, a long one never.",
        ),
        Metric(
            "start_time_seconds",
            "gauge",
            "unix time",
            "When this server started.",
            query="# starts within the hour, of a server that still answers\n"
            "changes(truedraft_start_time_seconds[1h])\n"
            "# how long it has run\n"
            "time() - truedraft_start_time_seconds",
            worry="It changes again and again: the server ends and is started again, also if no step of it ever ended.",
        ),
        Metric(
            "build_info",
            "gauge",
            ALWAYS_ONE,
            "What runs, as labels.",
            query="count by (version, system_fingerprint) (truedraft_build_info)",
            worry="Servers behind one name have several fingerprints: the same request and seed may give other tokens "
            "there, and answers can only be replayed on a server with the same one.",
            labels=(
                Label("version", "of the server"),
                Label("executor", "how the forward runs"),
                Label("exactness", "the measured level, as `L0`"),
                Label("system_fingerprint", "as answers carry it"),
            ),
        ),
    ),
)

TELLING = Group(
    "Logs and traces",
    (
        Metric(
            "log_lines_dropped",
            "counter",
            "lines",
            "Log lines that found the log's queue full.",
            query="sum(increase(truedraft_log_lines_dropped_total[1h]))",
            worry="It is not 0: whatever takes the server's stderr does not keep up, and what is missing cannot be "
            "found again ([logs.md](logs.md)). No request waited for it.",
            more="Of an engine in a process of its own, that process counts for itself and says so in its log alone.",
        ),
        Metric(
            "traces",
            "counter",
            "traces",
            "Traces by what became of them.",
            query="sum by (result) (rate(truedraft_traces_total[5m]))",
            worry="`queue_full` or `export_failed`: the receiver is gone or too slow ([tracing.md](tracing.md)). No "
            "request waited for it.",
            labels=(TRACE_RESULT,),
            absent="without `--otlp-endpoint`",
        ),
    ),
)

LATENCY = Group(
    "Latency",
    (
        Metric(
            "time_to_first_token_seconds",
            "histogram",
            "seconds",
            "TTFT: arrival to first token.",
            query=_quantile("time_to_first_token_seconds"),
            worry="It is above what you promise. Compare `request_queue_time_seconds` (too much load) with "
            "`request_prefill_time_seconds` (long prompts, or prompts that others' steps slow down).",
            buckets=TTFT_BUCKETS,
            more="From arrival, before tokenizing. Choices that were aborted later are in it.",
            vllm=True,
        ),
        Metric(
            "inter_token_latency_seconds",
            "histogram",
            "seconds",
            "ITL: gap between two chunks of tokens.",
            query=_quantile("inter_token_latency_seconds"),
            worry="It is above what you promise: too many choices run at once (`--max-num-seqs`), or long prompts "
            "take the steps (`--max-num-batched-tokens`).",
            buckets=ITL_BUCKETS,
            more="One observation for each gap, as vLLM counts it. With speculation a chunk may hold several tokens, "
            "so compare servers by `request_time_per_output_token_seconds`.",
            vllm=True,
        ),
        Metric(
            "request_time_per_output_token_seconds",
            "histogram",
            "seconds",
            "TPOT: (last - first token) / (output tokens - 1).",
            query=_quantile("request_time_per_output_token_seconds"),
            worry="It rises at the same load: see `step_duration_seconds` and whether speculation still pays.",
            buckets=ITL_BUCKETS,
            more="One observation for each choice that ended by itself and has two tokens or more.",
            vllm=True,
        ),
        Metric(
            "e2e_request_latency_seconds",
            "histogram",
            "seconds",
            "Arrival to end.",
            query=_quantile("e2e_request_latency_seconds"),
            worry="Never by itself: it depends on how much clients ask for. Its three parts tell more.",
            buckets=LATENCY_BUCKETS,
            more="Of choices that ended by themselves, as its parts below.",
            vllm=True,
        ),
        Metric(
            "request_queue_time_seconds",
            "histogram",
            "seconds",
            "Arrival to first scheduled.",
            query=_quantile("request_queue_time_seconds"),
            worry="It is a notable part of the time to the first token: add a replica.",
            buckets=LATENCY_BUCKETS,
            more="Only of choices that have run; those that still wait are in `oldest_waiting_seconds`.",
            vllm=True,
        ),
        Metric(
            "request_prefill_time_seconds",
            "histogram",
            "seconds",
            "First scheduled to first token.",
            query=_quantile("request_prefill_time_seconds"),
            worry="It rises while prompts are as long as before: fewer prefix-cache hits, or steps that are full.",
            buckets=LATENCY_BUCKETS,
            vllm=True,
        ),
        Metric(
            "request_decode_time_seconds",
            "histogram",
            "seconds",
            "First to last token.",
            query=_quantile("request_decode_time_seconds"),
            worry="Never by itself: it grows with the length of the answers.",
            buckets=LATENCY_BUCKETS,
            vllm=True,
        ),
    ),
)
