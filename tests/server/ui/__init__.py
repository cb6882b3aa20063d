"""Tests of the page at /ui and of what feeds it."""
