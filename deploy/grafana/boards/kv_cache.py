"""Is there room, is the prefix cache worth it, and does rolling back stay free."""

from __future__ import annotations

from deploy.grafana.boards import limits
from deploy.grafana.boards.board import Board, Row
from deploy.grafana.boards.panels import GREEN, RED, TOKENS_A_SECOND, YELLOW, Lines, Query, Stat, Table
from deploy.grafana.boards.queries import increase, metric, rate, share, share_of_one, total, worst

USED = ((None, GREEN), (0.8, YELLOW), (limits.KV_USED, RED))
HITS = share(rate("prefix_cache_hits_total"), rate("prefix_cache_queries_total"))
BY_SERVER = "{{instance}}"
SLOTS = "kv_slot_steps_total"
GIVABLE = 'state=~"free|cached"'

NOW = Row(
    "Now",
    [
        Stat(
            "Used",
            "Blocks that requests hold over all blocks, on the fullest server. Full is no fault by itself: look "
            "whether anybody waits or is preempted. Alert TruedraftKvPressure.",
            [Query(worst("kv_cache_usage_perc"))],
            width=4,
            unit="percentunit",
            decimals=0,
            steps=USED,
        ),
        Stat(
            "Free or cached",
            "Blocks that a new request could get at once, on the fullest server: free ones, and cached ones, which are "
            "given up for it.",
            [Query(f"min (sum by (instance) ({metric('kv_blocks', GIVABLE)}))")],
            width=4,
        ),
        Stat(
            "Fragmentation",
            "Empty slots of the allocated blocks, on the worst server. Above a quarter: try a smaller --block-size.",
            [Query(worst("kv_fragmentation_ratio"))],
            width=4,
            unit="percentunit",
            decimals=0,
            steps=((None, GREEN), (0.25, YELLOW), (0.5, RED)),
        ),
        Stat(
            "Prefix hits",
            "Prompt tokens that the prefix cache had, over those it was asked for.",
            [Query(HITS)],
            width=4,
            unit="percentunit",
            decimals=0,
            idle="no prompts",
        ),
        Stat(
            "Preemptions",
            "In the board's time range: choices that lost their blocks and were computed again.",
            [Query(increase("num_preemptions_total"))],
            width=4,
            decimals=0,
            steps=((None, GREEN), (1, YELLOW)),
        ),
        Stat(
            "Bytes moved",
            "KV bytes that were copied to line sequences up, since the start. 0 by design; anything else is a bug.",
            [Query(total(metric("kv_alignment_bytes_moved_total")))],
            width=4,
            unit="bytes",
            steps=((None, GREEN), (1, RED)),
        ),
    ],
)

PRESSURE = Row(
    "Pressure",
    [
        Lines(
            "Used, by server",
            "At the top with requests waiting: the KV cache is the bound. More --kv-cache-memory, a smaller "
            "--max-model-len, or more servers.",
            [Query(worst("kv_cache_usage_perc", "instance"), BY_SERVER)],
            width=12,
            unit="percentunit",
            minimum=0,
            maximum=1,
            steps=((None, GREEN), (limits.KV_USED, RED)),
        ),
        Lines(
            "Blocks",
            "used: requests hold them. cached: nobody holds them, but a prompt that begins alike finds them; they are "
            "given up when room is needed. free: empty.",
            [Query(total(metric("kv_blocks"), "state"), "{{state}}")],
            width=12,
            minimum=0,
            stacked=True,
        ),
        Lines(
            "Preemptions",
            "A second, by server. Now and then is normal at the edge; more than one for ten answers wastes time. Alert "
            "TruedraftPreempting.",
            [Query(rate("num_preemptions_total", "instance"), BY_SERVER)],
            width=12,
            unit="ops",
            minimum=0,
        ),
        Lines(
            "Waiting",
            "Choices that wait, preempted ones among them.",
            [Query(total(metric("num_requests_waiting"), "instance"), BY_SERVER)],
            width=12,
            minimum=0,
        ),
        Lines(
            "Fragmentation",
            "1 - used slots / slots of allocated blocks: the last block of each sequence is partly empty. High with "
            "many short sequences.",
            [Query(worst("kv_fragmentation_ratio", "instance"), BY_SERVER)],
            width=12,
            unit="percentunit",
            minimum=0,
            maximum=1,
        ),
        Lines(
            "What is empty, and why",
            "Empty slots of allocated blocks over all of them, added up over the steps. last_block: in blocks that are "
            "partly filled; a smaller --block-size saves them. draft: in blocks that only drafts needed; shorter "
            "drafts save them. reserved: for prompts that are being computed.",
            [Query(share_of_one(rate(SLOTS, "state", where='state!="used"'), rate(SLOTS)), "{{state}}")],
            width=12,
            unit="percentunit",
            minimum=0,
            stacked=True,
        ),
    ],
)

PREFIXES = Row(
    "Prefix cache",
    [
        Lines(
            "Hits over queries",
            "Falls when prompts stop to share a beginning, when they change early (a date in the system prompt), or "
            "when cached blocks are given up for want of room.",
            [Query(HITS, "all")],
            unit="percentunit",
            minimum=0,
            maximum=1,
        ),
        Lines(
            "Tokens asked for and found",
            "Prompt tokens a second. Found ones are not computed.",
            [Query(rate("prefix_cache_queries_total"), "asked"), Query(rate("prefix_cache_hits_total"), "found")],
            unit=TOKENS_A_SECOND,
            minimum=0,
        ),
        Lines(
            "Since the start, by server",
            "Hits over queries since each server's start. Servers far apart: route requests that begin alike to the "
            "same server.",
            [Query(worst("prefix_reuse_ratio", "instance"), BY_SERVER)],
            unit="percentunit",
            minimum=0,
            maximum=1,
        ),
    ],
)

ROLLBACK = Row(
    "Rolling back",
    [
        Lines(
            "Blocks trimmed",
            "Whole blocks given back after a rejection, a second.",
            [Query(rate("kv_blocks_trimmed_total", "instance"), BY_SERVER)],
            unit="ops",
            width=12,
            minimum=0,
        ),
        Lines(
            "Blocks moved",
            "0 by design: rejected slots are overwritten later, nothing is copied.",
            [Query(rate("kv_blocks_moved_total", "instance"), BY_SERVER)],
            unit="ops",
            width=12,
            minimum=0,
        ),
        Table(
            "How the cache is set up",
            "By server. Two servers of one service with different lines were started differently.",
            [Query(metric("cache_config_info"))],
            width=24,
            height=6,
            columns=(
                ("instance", "server"),
                ("model_name", "model"),
                ("block_size", "block size"),
                ("num_blocks", "blocks"),
                ("cache_dtype", "type"),
                ("enable_prefix_cache", "prefix cache"),
            ),
        ),
    ],
)

KV_CACHE = Board(
    "kv-cache",
    "KV cache",
    "Is there room, is the prefix cache worth it, and does rolling back stay free.",
    (NOW, PRESSURE, PREFIXES, ROLLBACK),
)
