"""Does speculation pay, what is accepted, and where a step's time goes."""

from __future__ import annotations

from deploy.grafana.boards import limits
from deploy.grafana.boards.board import Board, Row
from deploy.grafana.boards.panels import GREEN, RED, TOKENS_A_SECOND, YELLOW, Bars, Heatmap, Lines, Query, Stat
from deploy.grafana.boards.queries import mean, metric, quantile, rate, share, share_of_one

DRAFTS = "spec_decode_num_drafts_total"
DRAFTED = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
BY_POSITION = share_of_one(rate("spec_decode_num_accepted_tokens_per_pos_total", "position"), rate(DRAFTS))
STEPS = rate("iteration_tokens_total_count")
PAYS = ((None, RED), (limits.SPEEDUP, YELLOW), (1, GREEN))


def speedup(*by: str) -> str:
    """What the tokens would have taken without drafts, over what they took."""
    steps, drafting = (rate(f"spec_decode_measured_{part}_seconds_total", *by) for part in ("step", "draft"))
    return share(rate("spec_decode_plain_seconds_total", *by), f"({steps} + {drafting})")


def measured_over_expected(what: str) -> str:
    return share(rate(f"spec_decode_measured_{what}_total"), rate(f"spec_decode_expected_{what}_total"))


PAYING = Row(
    "Does it pay?",
    [
        Stat(
            "Speed-up, measured",
            "Tokens a second over what plain decoding would have given, drafting included, by the server's cost model "
            "(which follows the steps that run). Below 0.95 for a quarter of an hour: alert "
            "TruedraftSpeculationSlower.",
            [Query(speedup())],
            width=4,
            decimals=2,
            steps=PAYS,
            idle="nothing decoded",
        ),
        Stat(
            "Speed-up, expected",
            "What the controller expected of the last step, drafting apart; the mean over servers with an expectation. "
            "Without a value nothing is expected: --draft-length fixed, or no step yet.",
            [Query(f"avg ({metric('spec_decode_expected_speedup')} > 0)")],  # NaN is above nothing
            width=4,
            decimals=2,
            steps=PAYS,
        ),
        Stat(
            "Acceptance rate",
            "Draft tokens accepted over draft tokens verified. Low is no fault while the speed-up is above 1; a sudden "
            "fall with the same traffic is one (alert TruedraftAcceptanceCollapsed).",
            [Query(share(rate(ACCEPTED), rate(DRAFTED)))],
            width=4,
            unit="percentunit",
            decimals=0,
            idle="no drafts",
        ),
        Stat(
            "Acceptance length",
            "Tokens that a verified draft brings, the target's own one included: 1 means nothing was accepted.",
            [Query(f"1 + {share(rate(ACCEPTED), rate(DRAFTS))}")],
            width=4,
            decimals=2,
            idle="no drafts",
        ),
        Stat(
            "Draft length",
            "Mean number of draft tokens verified for a sequence in a step, 0 for plain decoding. Near 0 under load is "
            "the controller's right choice.",
            [Query(mean("spec_decode_num_speculative_tokens"))],
            width=4,
            decimals=2,
            idle="idle",
        ),
        Stat(
            "Output that was drafted",
            "Accepted draft tokens over output tokens: what speculation saved the target.",
            [Query(share(rate(ACCEPTED), rate("generation_tokens_total")))],
            width=4,
            unit="percentunit",
            decimals=0,
            idle="idle",
        ),
        Lines(
            "Speed-up by server",
            "Measured, over the same steps without drafts. A line below 1 for minutes costs time; the output is right "
            "all the same. First remedy: --draft-length auto, or --num-speculative-tokens 0.",
            [Query(speedup("instance"), "{{instance}}")],
            width=12,
            decimals=2,
            steps=((None, RED), (1, GREEN)),
        ),
        Lines(
            "Is the controller right?",
            "Measured over expected, of the same steps. Tokens far below 1: drafts come true less often than was "
            "learnt (new traffic; it follows within some hundred steps). Seconds far above 1: steps take longer than "
            "they did (another program on the machine, longer contexts, too many threads).",
            [
                Query(measured_over_expected("tokens"), "tokens"),
                Query(measured_over_expected("step_seconds"), "seconds"),
            ],
            width=12,
            decimals=2,
        ),
    ],
)

ACCEPTANCE = Row(
    "What is accepted",
    [
        Bars(
            "Accepted by position, now",
            "Of all drafts, the share whose token at this place (0 is the first) was accepted. A draft that is shorter "
            "counts as not accepted there.",
            # Never more at a later place than at an earlier one, so this is the order of the places.
            [
                Query(f"sort_desc({BY_POSITION})", "{{position}}"),
            ],
            unit="percentunit",
            decimals=0,
            width=12,
            minimum=0,
            maximum=1,
            steps=((None, RED), (0.2, YELLOW), (0.5, GREEN)),
        ),
        Lines(
            "Accepted by position, over time",
            "The same. All lines falling together: the traffic suits the drafters less. Only the later ones: shorter "
            "drafts.",
            [
                Query(BY_POSITION, "{{position}}"),
            ],
            unit="percentunit",
            width=12,
            minimum=0,
            maximum=1,
        ),
        Lines(
            "Acceptance rate by drafter",
            "A drafter far below the others does not suit the traffic: name another one with --drafter. grammar is "
            "what a request's schema forces, and is nearly always right.",
            [
                Query(
                    share(
                        rate("spec_decode_drafter_accepted_tokens_total", "drafter"),
                        rate("spec_decode_drafter_draft_tokens_total", "drafter"),
                    ),
                    "{{drafter}}",
                )
            ],
            unit="percentunit",
            minimum=0,
            maximum=1,
        ),
        Lines(
            "Draft tokens by drafter",
            "Verified a second: who is asked at all.",
            [Query(rate("spec_decode_drafter_draft_tokens_total", "drafter"), "{{drafter}}")],
            unit=TOKENS_A_SECOND,
            minimum=0,
            stacked=True,
        ),
        Heatmap(
            "Draft length chosen",
            "For each sequence and step; the lowest band is plain decoding. Under load it should move down.",
            [Query(rate("spec_decode_num_speculative_tokens_bucket", "le"), "{{le}}")],
        ),
    ],
)

COST = Row(
    "What a step costs",
    [
        Lines(
            "A step, by stage",
            "Mean seconds of a step: making drafts, building the batch, the target's forward (verify), sampling and "
            "accepting, rolling back, telling the drafters (sync). Verify should be nearly all of it.",
            [Query(share_of_one(rate("step_duration_seconds_sum", "stage"), STEPS), "{{stage}}")],
            unit="s",
            width=12,
            minimum=0,
            stacked=True,
        ),
        Lines(
            "Slow stages (p95)",
            "Which stage the slowest steps spend their time in. draft growing by itself: a drafter that got slow.",
            [Query(quantile(0.95, "step_duration_seconds", "stage"), "{{stage}}")],
            unit="s",
            width=12,
            minimum=0,
        ),
        Lines(
            "Building the batch, by part",
            "Mean seconds a step. Nothing is padded or moved, so this stays far below verify.",
            [Query(mean("batch_build_seconds", "part"), "{{part}}")],
            unit="s",
            minimum=0,
            stacked=True,
        ),
        Lines(
            "Rolled back",
            "Rejected draft tokens whose slots had been written, and blocks that were given back. Rolling back is "
            "arithmetic: no bytes are moved.",
            [
                Query(rate("spec_decode_rollback_tokens_total"), "tokens"),
                Query(rate("kv_blocks_trimmed_total"), "blocks"),
            ],
            unit="ops",
            minimum=0,
        ),
        Lines(
            "Memory of drafters",
            "What drafters hold of past texts. At its bound (GET /v1/server_info) the oldest are forgotten; no fault.",
            [Query(f"max by (instance, drafter) ({metric('drafter_memory_bytes')})", "{{instance}} {{drafter}}")],
            unit="bytes",
            minimum=0,
        ),
    ],
)

SPECULATION = Board(
    "speculation",
    "Speculation",
    "Does speculation pay, what is accepted, and where a step's time goes. The output is right whatever it shows.",
    (PAYING, ACCEPTANCE, COST),
)
