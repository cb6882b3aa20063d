"""Metrics of the KV cache."""

from __future__ import annotations

from server.metrics.kinds import ALWAYS_ONE, Group, Label, Metric
from server.metrics.labels import KV_SLOT_STATE, KV_STATE

MEMORY = Group(
    "KV cache",
    (
        Metric(
            "kv_cache_usage_perc",
            "gauge",
            "ratio",
            "Referenced KV blocks / all, 0 to 1.",
            query="max by (instance) (truedraft_kv_cache_usage_perc)",
            worry="It stays above 0.9: choices will be preempted and computed again. Give it more memory "
            "(`--kv-cache-memory`) or let fewer run (`--max-num-seqs`).",
            more="A ratio in spite of its name, which is vLLM's. Blocks kept for the prefix cache alone count as free.",
            vllm=True,
        ),
        Metric(
            "kv_blocks",
            "gauge",
            "blocks",
            "KV blocks by state.",
            query="sum by (state) (truedraft_kv_blocks)",
            worry="Never by itself. `cached` blocks are taken when no other is `free`: none free is no fault.",
            labels=(KV_STATE,),
            more="`used`: some sequence holds it. `cached`: nobody does, its content is kept for the prefix cache.",
        ),
        Metric(
            "kv_fragmentation_ratio",
            "gauge",
            "ratio",
            "1 - used slots / slots of allocated blocks.",
            query="avg_over_time(truedraft_kv_fragmentation_ratio[5m])",
            worry="It is above 0.3 while memory is short: many short sequences in large blocks. A smaller "
            "`--block-size` wastes less.",
        ),
        Metric(
            "kv_slot_steps",
            "counter",
            "slots times steps",
            "Slots of allocated blocks, added up over the steps, by what they are for.",
            query="# shares of the allocated slots over time\n"
            "sum by (state) (rate(truedraft_kv_slot_steps_total[5m]))\n"
            "  / ignoring (state) group_left () sum(rate(truedraft_kv_slot_steps_total[5m]))",
            worry="Never by itself. `last_block` is what a smaller `--block-size` saves; `draft` is what shorter "
            "drafts save (`--num-speculative-tokens`); `reserved` goes away as prompts are computed.",
            labels=(KV_SLOT_STATE,),
            more="`used`: it holds keys and values. `last_block`: empty, in a block that is partly filled. `reserved`: "
            "in an empty block for tokens that are known and not computed yet. `draft`: in a block that only drafts "
            "needed, given back after the step.",
        ),
        Metric(
            "num_preemptions",
            "counter",
            "choices",
            "Choices that lost their blocks and were computed again.",
            query="sum(rate(truedraft_num_preemptions_total[5m]))",
            worry="It grows all the time: work is done twice because the KV cache is too small for what runs.",
            vllm=True,
        ),
        Metric(
            "prefix_cache_queries",
            "counter",
            "tokens",
            "Tokens that the prefix cache was asked for.",
            query="# hit rate\n"
            "rate(truedraft_prefix_cache_hits_total[5m]) / rate(truedraft_prefix_cache_queries_total[5m])",
            worry="Never by itself.",
            vllm=True,
        ),
        Metric(
            "prefix_cache_hits",
            "counter",
            "tokens",
            "Tokens that it had.",
            query="sum(rate(truedraft_prefix_cache_hits_total[5m]))",
            worry="The hit rate falls where prompts begin alike: they changed at the front, or the cache is too small.",
            vllm=True,
        ),
        Metric(
            "prefix_reuse_ratio",
            "gauge",
            "ratio",
            "Hits / queries since the start.",
            query="truedraft_prefix_reuse_ratio",
            worry="Never by itself: for what happens now take the hit rate above.",
        ),
        Metric(
            "kv_blocks_trimmed",
            "counter",
            "blocks",
            "Blocks given back after a rejection.",
            query="rate(truedraft_kv_blocks_trimmed_total[5m])",
            worry="Never by itself: it is what long drafts that are refused cost in blocks.",
        ),
        Metric(
            "kv_blocks_moved",
            "counter",
            "blocks",
            "KV blocks copied to align sequences; 0 by design.",
            query="truedraft_kv_blocks_moved_total",
            worry="It is not 0: that would be a fault of the server.",
        ),
        Metric(
            "kv_alignment_bytes_moved",
            "counter",
            "bytes",
            "KV bytes copied to align sequences; 0 by design.",
            query="truedraft_kv_alignment_bytes_moved_total",
            worry="It is not 0: that would be a fault of the server.",
        ),
        Metric(
            "cache_config_info",
            "gauge",
            ALWAYS_ONE,
            "How the KV cache is set up.",
            query="truedraft_cache_config_info",
            worry="Never.",
            labels=(
                Label("block_size", "slots of a block"),
                Label("num_blocks", "blocks in all"),
                Label("enable_prefix_cache", "`True` or `False`"),
                Label("cache_dtype", "type of keys and values"),
            ),
            more="Under vLLM's name it has vLLM's labels: see [below](#vllms-names).",
            vllm=True,
        ),
    ),
)
