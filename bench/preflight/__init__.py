"""``truedraft preflight``: is a workload fit for speculation, and a server ready for it? See docs/preflight.md."""
