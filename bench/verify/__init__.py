"""``truedraft verify``: plain and speculative decoding of the same engine, compared bit for bit."""
