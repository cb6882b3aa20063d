"""Is the output the target model's own: the level, and what audits found."""

from __future__ import annotations

from deploy.grafana.boards import limits
from deploy.grafana.boards.board import Board, Row
from deploy.grafana.boards.panels import GREEN, RED, YELLOW, Lines, Query, Stat, States, Table
from deploy.grafana.boards.queries import increase, metric, rate, share, worst

AUDITS = "equivalence_audits_total"
MISMATCH, NEAR_TIE, DROPPED = (f'result="{result}"' for result in ("mismatch", "near_tie", "dropped"))
LEVELS = ((0, "L0", GREEN), (1, "L1", YELLOW), (2, "L2", YELLOW), (3, "L3", RED))
ENABLED = ((0, "off", RED), (1, "on", GREEN))
WHOLE = 'finished_reason=~"stop|length"'

NOW = Row(
    "Is the output right?",
    [
        Stat(
            "Level",
            "The worst among the chosen servers. L0: speculation, batches and the cache change no token. L2: near ties "
            "may differ. Measured at the start; GET /v1/server_info says which check failed. Alert TruedraftBelowL0.",
            [Query(worst("exactness_level"))],
            width=4,
            words=LEVELS,
            alarm=True,
        ),
        Stat(
            "Mismatches",
            "In the board's time range: audits whose plain run gave another output. Any is serious: docs/exactness.md, "
            '"When an audit reports a mismatch". Alert TruedraftOutputMismatch.',
            [Query(increase(AUDITS, where=MISMATCH))],
            width=4,
            decimals=0,
            steps=((None, GREEN), (0.5, RED)),
            alarm=True,
        ),
        Stat(
            "Audits",
            "off: a fault switched them off on at least one server, and nothing is compared there until its next start "
            "(alert TruedraftAuditsOff). not set up: no server was started with --audit-rate.",
            [Query(f"min ({metric('equivalence_audits_enabled')})")],
            width=4,
            words=ENABLED,
            idle="not set up",
            alarm=True,
        ),
        Stat(
            "Compared",
            "Audits that ended in the board's time range, dropped ones apart. A clean record of few says little.",
            [Query(increase(AUDITS, where='result!="dropped"'))],
            width=4,
            decimals=0,
        ),
        Stat(
            "Dropped",
            "Share of audits that never finished: the server is too busy for its --audit-rate, or requests are too "
            "large. Alert TruedraftAuditsDropped.",
            [Query(share(increase(AUDITS, where=DROPPED), increase(AUDITS)))],
            width=4,
            unit="percentunit",
            decimals=0,
            steps=((None, GREEN), (limits.DROPPED, RED)),
            idle="no audits",
        ),
        Stat(
            "Near ties",
            "In the board's time range: audits that differed where two candidates nearly tie. Only below L0, where "
            "that is what the level promises.",
            [Query(increase(AUDITS, where=NEAR_TIE))],
            width=4,
            decimals=0,
        ),
    ],
)

OVER_TIME = Row(
    "Over time",
    [
        Lines(
            "Audits, by result",
            "That ended, a second. mismatch must not appear.",
            [Query(rate(AUDITS, "result"), "{{result}}")],
            width=12,
            unit="ops",
            minimum=0,
            stacked=True,
        ),
        Lines(
            "Mismatches, by server",
            "Since each server's start. One server alone: its machine. All at once: a change of the software or the "
            "model.",
            [Query(f"max by (instance) ({metric(AUDITS, MISMATCH)})", "{{instance}}")],
            width=12,
            minimum=0,
            steps=((None, GREEN), (1, RED)),
        ),
        Lines(
            "Whole answers that were compared",
            "Audits that ended, dropped ones apart, over answers that ended by stop or length. It should come near "
            "--audit-rate; an audit ends some time after its answer.",
            [
                Query(
                    share(rate(AUDITS, where='result!="dropped"'), rate("request_success_total", where=WHOLE)),
                    "compared",
                )
            ],
            unit="percentunit",
            minimum=0,
        ),
        Lines(
            "Dropped",
            "Of the audits that ended. Audits take only rows that nobody else wanted, so they starve first under load.",
            [Query(share(rate(AUDITS, where=DROPPED), rate(AUDITS)), "dropped")],
            unit="percentunit",
            minimum=0,
            maximum=1,
            steps=((None, GREEN), (limits.DROPPED, RED)),
        ),
        Lines(
            "What audits cost",
            "Their rows over all rows of steps, by server. --audit-share bounds it.",
            [
                Query(
                    share(
                        rate("equivalence_audit_tokens_total", "instance"),
                        rate("iteration_tokens_total_sum", "instance"),
                    ),
                    "{{instance}}",
                )
            ],
            unit="percentunit",
            minimum=0,
            maximum=1,
        ),
    ],
)

BY_SERVER = Row(
    "By server",
    [
        States(
            "Level",
            "A level that changes at a restart: the machine, its libraries or the kernels have changed.",
            [Query(worst("exactness_level", "instance"), "{{instance}}")],
            width=12,
            words=LEVELS,
        ),
        States(
            "Audits",
            "off until the server's next start, once a fault of the audits or failed steps switched them off.",
            [Query(worst("equivalence_audits_enabled", "instance"), "{{instance}}")],
            width=12,
            words=ENABLED,
        ),
        Table(
            "Since each server's start",
            "What each server has found. The columns count audits.",
            [
                Query(f"sum by (instance, model_name) ({metric(AUDITS, which)})")
                for which in ('result="match"', NEAR_TIE, MISMATCH, DROPPED)
            ],
            width=24,
            columns=(
                ("instance", "server"),
                ("model_name", "model"),
                ("Value #A", "match"),
                ("Value #B", "near tie"),
                ("Value #C", "mismatch"),
                ("Value #D", "dropped"),
            ),
        ),
        Table(
            "What runs where",
            "Answers carry the fingerprint: the same request and seed give the same tokens wherever it is the same. "
            "Several for one model: alert TruedraftFingerprintsDiffer.",
            [Query(metric("build_info"))],
            width=24,
            columns=(
                ("instance", "server"),
                ("model_name", "model"),
                ("exactness", "level"),
                ("system_fingerprint", "fingerprint"),
                ("version", "version"),
                ("executor", "executor"),
            ),
        ),
    ],
)

EQUIVALENCE = Board(
    "equivalence",
    "Equivalence",
    "Is the output the target model's own: the exactness level, and what audits found.",
    (NOW, OVER_TIME, BY_SERVER),
    refresh="30s",
)
