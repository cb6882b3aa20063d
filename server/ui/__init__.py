"""The page at /ui and what feeds it: a ring buffer of steps, the state of now, and the live feed."""
