"""Tool calls: how a model writes them, how its text becomes deltas, and the grammar that holds it to them."""
