"""Is it up, is it fast, is anybody turned away: the board to open first."""

from __future__ import annotations

from deploy.grafana.boards import limits
from deploy.grafana.boards.board import Board, Row, alerts
from deploy.grafana.boards.panels import (
    GREEN,
    RED,
    TOKENS_A_SECOND,
    YELLOW,
    Heatmap,
    Lines,
    Panel,
    Query,
    Stat,
    Table,
)
from deploy.grafana.boards.queries import (
    PROCESSES,
    SERVICES,
    increase,
    mean,
    metric,
    quantile,
    rate,
    share,
    total,
    worst,
)
from deploy.grafana.boards.speculation import PAYS, speedup

FAILED = rate("request_success_total", where='finished_reason="error"')
FINISHED = rate("request_success_total")
# Refusals for want of room; the others are the client's doing.
WANT_OF_ROOM = "queue_full|queue_tokens|connections|bodies|texts|templates|grammars"
SHED = rate("admission_rejections_total", where=f'reason=~"{WANT_OF_ROOM}"')
PERCENTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


def percentiles(histogram: str) -> list[Query]:
    return [Query(quantile(q, histogram), name) for q, name in PERCENTILES]


NOW = Row(
    "Now",
    [
        Stat(
            "Servers down",
            "Scrape targets that do not answer. Worry from 1 on: the process is gone, restarts, or cannot be reached. "
            "Alert TruedraftDown.",
            [Query(f"count(up{{{PROCESSES}}} == 0) or vector(0)")],
            steps=((None, GREEN), (1, RED)),
            alarm=True,
        ),
        Stat(
            "Alerts that fire",
            "Without those of severity info. What to do about each stands in docs/runbook.md under its name; the list "
            "is at the bottom of this board.",
            [Query(f"count({alerts(severity='warning|critical')}) or vector(0)")],
            steps=((None, GREEN), (1, RED)),
            alarm=True,
        ),
        Stat(
            "Running", "Choices that run now, over all chosen servers.", [Query(total(metric("num_requests_running")))]
        ),
        Stat(
            "Waiting",
            "Choices that wait now, preempted ones among them. A number alone is no fault; see how long the oldest "
            "waits.",
            [Query(total(metric("num_requests_waiting")))],
        ),
        Stat(
            "Output",
            "Committed output tokens a second, over all chosen servers.",
            [Query(rate("generation_tokens_total"))],
            unit=TOKENS_A_SECOND,
            decimals=0,
        ),
        Stat(
            "TTFT p95",
            f"Time from arrival to the first token. The objective: {1 - limits.TTFT_BUDGET:.0%} within "
            f"{limits.TTFT_SECONDS} s. A bucket bound is the finest it can tell.",
            [Query(quantile(0.95, "time_to_first_token_seconds"))],
            unit="s",
            decimals=2,
            steps=((None, GREEN), (limits.TTFT_SECONDS, RED)),
            idle="idle",
        ),
        Stat(
            "ITL p99",
            f"Gap between two chunks of an answer; with speculation a chunk may hold several tokens. The objective: "
            f"{1 - limits.ITL_BUDGET:.0%} within {limits.ITL_SECONDS} s.",
            [Query(quantile(0.99, "inter_token_latency_seconds"))],
            unit="s",
            decimals=2,
            steps=((None, GREEN), (limits.ITL_SECONDS, RED)),
            idle="idle",
        ),
        Stat(
            "Errors",
            "Share of ended choices that ended by the server's fault. Alert TruedraftErrors.",
            [Query(share(FAILED, FINISHED))],
            unit="percentunit",
            decimals=1,
            steps=((None, GREEN), (limits.ERRORS, RED)),
            idle="idle",
        ),
        Stat(
            "Oldest waits",
            "How long the request at the head of a queue has waited, on the worst server. Alert TruedraftQueueOld.",
            [Query(worst("oldest_waiting_seconds"))],
            unit="s",
            decimals=1,
            steps=((None, GREEN), (limits.OLDEST_WAITING_SECONDS / 2, YELLOW), (limits.OLDEST_WAITING_SECONDS, RED)),
        ),
        Stat(
            "Turned away",
            "Share of requests that were refused for want of room (503). Alert TruedraftShedding.",
            [Query(share(SHED, f"({FINISHED} + {SHED})"))],
            unit="percentunit",
            decimals=1,
            steps=((None, GREEN), (limits.SHED, RED)),
            idle="idle",
        ),
        Stat(
            "KV cache used",
            "Blocks that requests hold, on the fullest server. Full is no fault as long as nobody is preempted.",
            [Query(worst("kv_cache_usage_perc"))],
            unit="percentunit",
            decimals=0,
            minimum=0,
            maximum=1,
            steps=((None, GREEN), (0.8, YELLOW), (limits.KV_USED, RED)),
        ),
        Stat(
            "Preemptions",
            "In the board's time range: choices that lost their blocks and were computed again. Each costs its prompt "
            "once more.",
            [Query(increase("num_preemptions_total"))],
            decimals=0,
            steps=((None, GREEN), (1, YELLOW)),
        ),
        Stat(
            "Speed-up",
            "Tokens a second over what plain decoding would have given, drafting included, by the server's cost model. "
            "Below 1 speculation costs more than it brings. Alert TruedraftSpeculationSlower.",
            [Query(speedup())],
            decimals=2,
            steps=PAYS,
            idle="idle",
        ),
        Stat(
            "Exactness",
            "The worst level among the chosen servers. L0: speculation changes no token. Alert TruedraftBelowL0.",
            [Query(worst("exactness_level"))],
            words=((0, "L0", GREEN), (1, "L1", YELLOW), (2, "L2", YELLOW), (3, "L3", RED)),
        ),
        Stat(
            "Mismatches",
            "In the board's time range: audits that found another output than plain decoding gives. Worry from 1 on. "
            "Alert TruedraftOutputMismatch.",
            [Query(increase("equivalence_audits_total", where='result="mismatch"'))],
            decimals=0,
            steps=((None, GREEN), (0.5, RED)),
            alarm=True,
        ),
        Stat(
            "Not ready",
            "Servers that answer but want no new requests: they drain or have failed. Alert TruedraftNotReady.",
            [Query(f"count({metric('ready')} == 0) or vector(0)")],
            steps=((None, GREEN), (1, RED)),
            alarm=True,
        ),
    ],
)

TRAFFIC = Row(
    "Traffic",
    [
        Lines(
            "Choices that ended",
            "A second, by how: stop and length are whole answers, abort is a client that left or a timeout, error is "
            "the server's fault. Worry about any error.",
            [Query(rate("request_success_total", "finished_reason"), "{{finished_reason}}")],
            unit="reqps",
            width=12,
            stacked=True,
        ),
        Lines(
            "Tokens",
            "Prompt tokens are counted when they are first computed, output tokens when they are committed.",
            [Query(rate("generation_tokens_total"), "output"), Query(rate("prompt_tokens_total"), "prompt")],
            unit=TOKENS_A_SECOND,
            width=12,
        ),
        Lines(
            "Refused, by reason",
            "Requests a second that were refused before they were queued, and those that ran into their timeout. "
            "Reasons: docs/limits.md. queue_full and queue_tokens: too much load; invalid_api_key, "
            "rate_limit_requests and context_length: a client.",
            [
                Query(f"{rate('admission_rejections_total', 'reason')} > 0", "{{reason}}"),
                Query(rate("request_timeouts_total"), "timeout"),
            ],
            unit="reqps",
            width=12,
        ),
        Lines(
            "HTTP answers",
            "A second, by status; 0 is a client that left before there was one. A stream that fails after it began "
            "was a 200: its error is in the first panel.",
            [Query(f"{rate('http_responses_total', 'code')} > 0", "{{code}}")],
            unit="reqps",
            width=12,
            stacked=True,
        ),
    ],
)

LATENCY = Row(
    "Latency",
    [
        Lines(
            "Time to first token",
            "From arrival, before tokenizing. If it grows while ITL does not, requests wait: see the queue below.",
            percentiles("time_to_first_token_seconds"),
            unit="s",
            minimum=0,
            steps=((None, GREEN), (limits.TTFT_SECONDS, RED)),
        ),
        Lines(
            "Gap between chunks (ITL)",
            "What a reader sees as stuttering. It grows with the number of sequences in a step, with long prompts that "
            "come in beside them, and with a machine that is busy otherwise.",
            percentiles("inter_token_latency_seconds"),
            unit="s",
            minimum=0,
            steps=((None, GREEN), (limits.ITL_SECONDS, RED)),
        ),
        Lines(
            "Whole answer",
            "From arrival to the end, of answers that ended by stop or length. It depends on their lengths.",
            percentiles("e2e_request_latency_seconds"),
            unit="s",
            minimum=0,
        ),
        Lines(
            "Where an answer's time goes",
            "Means: waiting for a seat, computing the prompt, writing. The parts add up to the whole but for the last "
            "token's way out.",
            [Query(mean(f"request_{part}_time_seconds"), part) for part in ("queue", "prefill", "decode")],
            unit="s",
            minimum=0,
            stacked=True,
        ),
        Lines(
            "Time a token (TPOT)",
            "(Last - first token) / (tokens - 1) of each answer: what speculation makes smaller. Independent of how "
            "tokens are bundled into chunks.",
            percentiles("request_time_per_output_token_seconds"),
            unit="s",
            minimum=0,
        ),
        Heatmap(
            "Time to first token, all requests",
            "How many requests fell into which bucket. Two bands are two kinds of requests, for example with and "
            "without a prefix hit.",
            [Query(rate("time_to_first_token_seconds_bucket", "le"), "{{le}}")],
            unit="s",
        ),
    ],
)

QUEUE = Row(
    "Queue and engine",
    [
        Lines(
            "Running and waiting",
            "Choices. Waiting above 0 while running is below --max-num-seqs means that the KV cache or the token "
            "budget is the bound, not the seats.",
            [
                Query(total(metric("num_requests_running")), "running"),
                Query(total(metric("num_requests_waiting")), "waiting"),
            ],
            minimum=0,
        ),
        Lines(
            "Oldest waiting request",
            "How long the head of the queue has waited, by server. One server alone: the load balancer, or a server "
            "that is stuck.",
            [Query(worst("oldest_waiting_seconds", "instance"), "{{instance}}")],
            unit="s",
            minimum=0,
            steps=((None, GREEN), (limits.OLDEST_WAITING_SECONDS, RED)),
        ),
        Lines(
            "Time in the queue",
            "From arrival to the first step, of answers that ended.",
            percentiles("request_queue_time_seconds"),
            unit="s",
            minimum=0,
        ),
        Lines(
            "Since the last step ended",
            "Seconds, by server; 0 while idle. It is as long as a step in normal work. Climbing in a straight line: "
            "the engine hangs, and at --stall-timeout the server exits. Alert TruedraftEngineStalled.",
            [Query(worst("engine_step_age_seconds", "instance"), "{{instance}}")],
            unit="s",
            minimum=0,
            width=6,
            steps=((None, GREEN), (limits.STALLED_SECONDS, RED)),
        ),
        Lines(
            "Event loop, late by",
            "99 of 100 times less than this, by server. A good part of a step or more: streams stutter, because "
            "something holds up the loop or the machine has too few cores.",
            [Query(quantile(0.99, "event_loop_lag_seconds", "instance"), "{{instance}}")],
            unit="s",
            minimum=0,
            width=6,
        ),
        Lines(
            "Steps",
            "Steps a second, by server. Fewer steps with more rows each is what load looks like.",
            [Query(rate("iteration_tokens_total_count", "instance"), "{{instance}}")],
            unit="ops",
            minimum=0,
            width=6,
        ),
        Lines(
            "Rows of a step",
            "Mean, by server: prompt tokens, last tokens and drafts together. At --max-num-batched-tokens prompts are "
            "what fills the steps.",
            [Query(mean("iteration_tokens_total", "instance"), "{{instance}}")],
            minimum=0,
            width=6,
        ),
    ],
)


def burn(which: str, budget: float) -> list[Query]:
    return [
        Query(f"truedraft:{which}_bad:ratio_rate{window}{{{SERVICES}}} / {budget}", f"{{{{model_name}}}}, {window}")
        for window in ("1h", "6h", "3d")
    ]


def burning(title: str, what: str, which: str, budget: float) -> Panel:
    return Lines(
        title,
        f"{what} 1 is what the objective allows for a month; above {limits.FAST_BURN} a month's allowance is gone in "
        "two days, and somebody is woken. From the rules in truedraft.slo.rules.yml.",
        burn(which, budget),
        minimum=0,
        steps=((None, GREEN), (1, YELLOW), (limits.FAST_BURN, RED)),
    )


OBJECTIVES = Row(
    "Objectives and alerts",
    [
        burning(
            "TTFT: how fast the allowance burns",
            f"Share of requests whose first token took more than {limits.TTFT_SECONDS} s, over the "
            f"{limits.TTFT_BUDGET:.0%} that may.",
            "ttft",
            limits.TTFT_BUDGET,
        ),
        burning(
            "ITL: how fast the allowance burns",
            f"Share of gaps that took more than {limits.ITL_SECONDS} s, over the {limits.ITL_BUDGET:.0%} that may.",
            "itl",
            limits.ITL_BUDGET,
        ),
        Table(
            "Alerts that fire",
            "docs/runbook.md has a section for each.",
            [Query(alerts())],
            columns=(
                ("alertname", "alert"),
                ("severity", "severity"),
                ("instance", "server"),
                ("model_name", "model"),
            ),
        ),
    ],
)  # fmt: skip

SERVICE = Board(
    "service",
    "Service",
    "Is it up, is it fast, is anybody turned away. Open this one first; docs/monitoring.md says how to read it.",
    (NOW, TRAFFIC, LATENCY, QUEUE, OBJECTIVES),
)
