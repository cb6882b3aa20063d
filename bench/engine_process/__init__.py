"""What the engine in a process of its own brings: see bench.engine_process.__main__."""
