"""Metrics of steps: what speculation brings, what the batch costs, and whether the output is right."""

from __future__ import annotations

from server.metrics.kinds import Group, Metric
from server.metrics.labels import AUDIT_RESULT, DRAFTER, PART, POSITION, STAGE

STEP_BUCKETS = (
    0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10,
)  # fmt: skip
BUILD_BUCKETS = (
    0.000001, 0.0000025, 0.000005, 0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.01, 0.1,
)  # fmt: skip
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def _acceptance_lengths(max_speculative_tokens: int) -> tuple[float, ...]:
    return tuple(range(1, max_speculative_tokens + 2))


def _draft_lengths(max_speculative_tokens: int) -> tuple[float, ...]:
    return tuple(range(max_speculative_tokens + 1))


STEPS = Group(
    "Steps",
    (
        Metric(
            "iteration_tokens_total",
            "histogram",
            "rows",
            "Rows of a step, drafts included.",
            query="rate(truedraft_iteration_tokens_total_sum[5m]) / rate(truedraft_iteration_tokens_total_count[5m])",
            worry="Never by itself. Near `--max-num-batched-tokens` all the time: steps are full of prompts.",
            buckets=TOKEN_BUCKETS,
            more="A histogram in spite of its name, which is vLLM's.",
            vllm=True,
        ),
        Metric(
            "step_duration_seconds",
            "histogram",
            "seconds",
            "Stages of a speculative step.",
            query="sum by (stage) (rate(truedraft_step_duration_seconds_sum[5m]))\n"
            "# a step as a whole\n"
            "sum(rate(truedraft_step_duration_seconds_sum[5m]))\n"
            '  / sum(rate(truedraft_step_duration_seconds_count{stage="verify"}[5m]))',
            worry="`verify` takes less than nine tenths of the sum: something beside the model costs too much. "
            "`verify` is longer at the same number of rows: another program is on the machine.",
            labels=(STAGE,),
            buckets=STEP_BUCKETS,
            more="`draft` proposes, `build` packs the rows, `verify` is the target's forward, `accept` samples and "
            "compares, `rollback` commits and gives blocks back, `sync` tells the drafters.",
        ),
        Metric(
            "batch_build_seconds",
            "histogram",
            "seconds",
            "Parts of building a step's batch: positions, slots, block tables, attention masks.",
            query="sum by (part) (rate(truedraft_batch_build_seconds_sum[5m]))\n"
            "  / sum by (part) (rate(truedraft_batch_build_seconds_count[5m]))",
            worry="`positions`, `slots` and `block_tables` together are more than a percent of a step. They are made "
            "anew in every step, so that a rollback has nothing to realign: this is what that costs.",
            labels=(PART,),
            buckets=BUILD_BUCKETS,
            more="The first three are parts of the stage `build`. `mask` is a part of `verify`: the masks of "
            "attention on torch operations. The compiled kernels need none, so it is 0 there.",
        ),
    ),
)

SPECULATION = Group(
    "Speculation",
    (
        Metric(
            "spec_decode_num_drafts",
            "counter",
            "drafts",
            "Drafts verified: one for each sequence and step that had one.",
            query="# acceptance length\n"
            "1 + rate(truedraft_spec_decode_num_accepted_tokens_total[5m])\n"
            "  / rate(truedraft_spec_decode_num_drafts_total[5m])",
            worry="It stands still under load: the controller has turned drafts off. See "
            "`spec_decode_expected_speedup`.",
            vllm=True,
        ),
        Metric(
            "spec_decode_num_draft_tokens",
            "counter",
            "tokens",
            "Tokens of these drafts.",
            query="# acceptance rate\n"
            "rate(truedraft_spec_decode_num_accepted_tokens_total[5m])\n"
            "  / rate(truedraft_spec_decode_num_draft_tokens_total[5m])",
            worry="Never by itself.",
            vllm=True,
        ),
        Metric(
            "spec_decode_num_accepted_tokens",
            "counter",
            "tokens",
            "Draft tokens that were accepted.",
            query="# share of the output that came from drafts\n"
            "rate(truedraft_spec_decode_num_accepted_tokens_total[5m]) / rate(truedraft_generation_tokens_total[5m])",
            worry="The acceptance rate is less than half of what it was for days, and the traffic is the same: a "
            "drafter does not work as it did. The output is right all the same.",
            vllm=True,
        ),
        Metric(
            "spec_decode_num_accepted_tokens_per_pos",
            "counter",
            "tokens",
            "Accepted, by place in the draft.",
            query="# chance that the draft token at a position is reached and accepted\n"
            "sum by (position) (rate(truedraft_spec_decode_num_accepted_tokens_per_pos_total[5m]))\n"
            "  / on () group_left () sum(rate(truedraft_spec_decode_num_drafts_total[5m]))",
            worry="Never by itself. Where it is near 0, longer drafts are for nothing: `--num-speculative-tokens` may "
            "be lower.",
            labels=(POSITION,),
            absent="with `--num-speculative-tokens 0`",
            vllm=True,
        ),
        Metric(
            "spec_decode_acceptance_length",
            "histogram",
            "tokens",
            "1 + accepted, for each draft.",
            query="rate(truedraft_spec_decode_acceptance_length_sum[5m])\n"
            "  / rate(truedraft_spec_decode_acceptance_length_count[5m])",
            worry="It is near 1: drafts are refused at their first token.",
            buckets=_acceptance_lengths,
            more="Buckets: 1 to one more than the most draft tokens.",
        ),
        Metric(
            "spec_decode_num_speculative_tokens",
            "histogram",
            "tokens",
            "Draft length chosen for a sequence in a step: draft tokens verified, 0 for plain decoding.",
            query="# mean\n"
            "rate(truedraft_spec_decode_num_speculative_tokens_sum[5m])\n"
            "  / rate(truedraft_spec_decode_num_speculative_tokens_count[5m])\n"
            "# share of plain decoding\n"
            'rate(truedraft_spec_decode_num_speculative_tokens_bucket{le="0.0"}[5m])\n'
            "  / ignoring (le) rate(truedraft_spec_decode_num_speculative_tokens_count[5m])",
            worry="Never by itself: near 0 under load is as it should be.",
            buckets=_draft_lengths,
            more="One observation for each sequence and step that emitted. Buckets: 0 to the most draft tokens.",
        ),
        Metric(
            "spec_decode_drafter_drafts",
            "counter",
            "drafts",
            "Drafts verified, by who drafted them.",
            query="sum by (drafter) (rate(truedraft_spec_decode_drafter_drafts_total[5m]))",
            worry="Never by itself.",
            labels=(DRAFTER,),
            more="`grammar` is what a request's schema, regex or grammar forces.",
            absent="with `--num-speculative-tokens 0`",
        ),
        Metric(
            "spec_decode_drafter_draft_tokens",
            "counter",
            "tokens",
            "Tokens of these drafts, by who drafted them.",
            query="# acceptance rate of each drafter\n"
            "rate(truedraft_spec_decode_drafter_accepted_tokens_total[5m])\n"
            "  / rate(truedraft_spec_decode_drafter_draft_tokens_total[5m])",
            worry="Never by itself.",
            labels=(DRAFTER,),
            absent="with `--num-speculative-tokens 0`",
        ),
        Metric(
            "spec_decode_drafter_accepted_tokens",
            "counter",
            "tokens",
            "Draft tokens that were accepted, by who drafted them.",
            query="sum by (drafter) (rate(truedraft_spec_decode_drafter_accepted_tokens_total[5m]))",
            worry="One drafter's acceptance is far below the others': it does not suit the traffic. Name another one "
            "with `--drafter`.",
            labels=(DRAFTER,),
            absent="with `--num-speculative-tokens 0`",
        ),
        Metric(
            "drafter_memory_bytes",
            "gauge",
            "bytes",
            "What a drafter holds of past texts.",
            query="sum by (drafter) (truedraft_drafter_memory_bytes)",
            worry="Never: at its bound (`/v1/server_info` has it) the oldest are forgotten.",
            labels=(DRAFTER,),
            absent="of drafters that keep none",
        ),
        Metric(
            "spec_decode_expected_speedup",
            "gauge",
            "ratio",
            "Tokens a second expected of the last step / the same without drafts.",
            query="avg_over_time(truedraft_spec_decode_expected_speedup[5m])",
            worry="Never by itself: compare it with the measured gain below.",
            more="Drafting is left out. NaN until something was expected, and with `--draft-length fixed`.",
        ),
        Metric(
            "spec_decode_expected_tokens",
            "counter",
            "tokens",
            "Tokens that steps were expected to emit.",
            query="# is the controller right\n"
            "rate(truedraft_spec_decode_measured_tokens_total[5m])\n"
            "  / rate(truedraft_spec_decode_expected_tokens_total[5m])",
            worry="The ratio is far below 1 for longer than some minutes: drafts come true less often than was learnt.",
        ),
        Metric(
            "spec_decode_measured_tokens",
            "counter",
            "tokens",
            "Tokens that these steps did emit.",
            query="rate(truedraft_spec_decode_measured_tokens_total[5m])",
            worry="Never by itself.",
        ),
        Metric(
            "spec_decode_expected_step_seconds",
            "counter",
            "seconds",
            "Seconds that these steps were expected to take, drafting apart.",
            query="rate(truedraft_spec_decode_measured_step_seconds_total[5m])\n"
            "  / rate(truedraft_spec_decode_expected_step_seconds_total[5m])",
            worry="The ratio is far above 1: steps take longer than was measured (another program on the machine, "
            "longer contexts, too many threads).",
        ),
        Metric(
            "spec_decode_measured_step_seconds",
            "counter",
            "seconds",
            "Seconds that these steps did take, drafting apart.",
            query="rate(truedraft_spec_decode_measured_step_seconds_total[5m])",
            worry="Never by itself.",
        ),
        Metric(
            "spec_decode_measured_draft_seconds",
            "counter",
            "seconds",
            "Seconds of drafting in these steps.",
            query="# share of the time that goes into drafting\n"
            "rate(truedraft_spec_decode_measured_draft_seconds_total[5m])\n"
            "  / (rate(truedraft_spec_decode_measured_step_seconds_total[5m])\n"
            "  + rate(truedraft_spec_decode_measured_draft_seconds_total[5m]))",
            worry="The share is more than a few percent and the measured gain is below 1: name a cheaper `--drafter`.",
        ),
        Metric(
            "spec_decode_plain_seconds",
            "counter",
            "seconds",
            "Seconds that the tokens of these steps would have taken without drafts, by the cost model.",
            query="# measured gain: tokens a second over what plain decoding would have given, drafting included\n"
            "rate(truedraft_spec_decode_plain_seconds_total[5m])\n"
            "  / (rate(truedraft_spec_decode_measured_step_seconds_total[5m])\n"
            "  + rate(truedraft_spec_decode_measured_draft_seconds_total[5m]))",
            worry="The gain is below 1 for minutes: speculation costs more than it brings. See [When speculation does "
            "not pay](#when-speculation-does-not-pay).",
            more="The cost model follows the steps that run.",
        ),
        Metric(
            "spec_decode_rollback_tokens",
            "counter",
            "tokens",
            "Rejected drafts whose slots had been written.",
            query="rate(truedraft_spec_decode_rollback_tokens_total[5m])\n"
            "  / rate(truedraft_iteration_tokens_total_sum[5m])",
            worry="Never by itself: rolling back is arithmetic. As a share of all rows it is the work that was for "
            "nothing.",
        ),
    ),
)

EQUIVALENCE = Group(
    "Equivalence",
    (
        Metric(
            "equivalence_audits",
            "counter",
            "choices",
            "Choices run again without speculation.",
            query='sum by (instance) (increase(truedraft_equivalence_audits_total{result="mismatch"}[1h])) > 0\n'
            "# share that was never finished\n"
            'sum(rate(truedraft_equivalence_audits_total{result="dropped"}[1h]))\n'
            "  / sum(rate(truedraft_equivalence_audits_total[1h]))",
            worry="`mismatch` is not 0: an answer was not that of plain decoding. Keep the record (`--audit-store`) "
            "and see [exactness.md](exactness.md#when-an-audit-reports-a-mismatch). Many `dropped`: audits are behind.",
            labels=(AUDIT_RESULT,),
            more="`near_tie` only below L0. `dropped`: never finished (queue full, too large, shutdown, a failed "
            "step, audits off). They add up to the chosen choices that ended.",
        ),
        Metric(
            "equivalence_audits_enabled",
            "gauge",
            "0 or 1",
            "1, or 0 once audits were switched off.",
            query="truedraft_equivalence_audits_enabled == 0",
            worry="0: a fault of the audits, failed steps or a shutdown switched them off, until the next start. "
            "Nobody checks the output any more.",
            absent="without `--audit-rate`, so that 0 is always worth an alert",
        ),
        Metric(
            "equivalence_audit_tokens",
            "counter",
            "rows",
            "Rows that audits ran.",
            query="# share of all rows\n"
            "rate(truedraft_equivalence_audit_tokens_total[5m]) / rate(truedraft_iteration_tokens_total_sum[5m])",
            worry="The share is more than you want to spend: lower `--audit-rate` or `--audit-share`.",
            more="No other counter has them but `iteration_tokens_total` and `step_duration_seconds`.",
        ),
        Metric(
            "exactness_level",
            "gauge",
            "level",
            "0 is L0: pathwise exact.",
            query="max by (instance) (truedraft_exactness_level)",
            worry="It is above 0 where L0 was expected: the machine, its libraries or the kernels have changed. "
            "`/v1/server_info` says which check failed; see [design.md](design.md#1-what-lossless-means).",
        ),
    ),
)
