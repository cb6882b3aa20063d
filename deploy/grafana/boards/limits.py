"""Where a board turns yellow or red. The same numbers stand in the rules of deploy/prometheus; a test compares them."""

from __future__ import annotations

TTFT_SECONDS = 2.5  # a bucket bound of the histogram: the objective counts what lies below it
TTFT_BUDGET = 0.05  # the share of requests that may take longer
ITL_SECONDS = 0.3
ITL_BUDGET = 0.01
FAST_BURN = 14.4  # times the budget of a month: it is gone in two days
OLDEST_WAITING_SECONDS = 30
STALLED_SECONDS = 30
ERRORS = 0.01  # of the requests that ended
SHED = 0.05  # of the requests that came
TIMEOUTS = 0.05
PREEMPTIONS = 0.1  # for each request that ended
KV_USED = 0.95
SPEEDUP = 0.95
DROPPED = 0.5  # of the audits that ended
