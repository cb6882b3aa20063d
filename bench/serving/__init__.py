"""``truedraft bench``: a server measured over HTTP, with all that speculation costs and brings (docs/bench.md)."""
