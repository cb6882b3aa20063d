"""Other servers beside ours: installed, given the same weights, and loaded in one interleaved run (docs/peers.md)."""
