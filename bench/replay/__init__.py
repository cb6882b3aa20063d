"""Replay: run a recorded request again and see whether the ids are the same."""
