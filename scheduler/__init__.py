"""Who runs: requests, the waiting queue, admission, preemption and the asyncio engine."""
