"""Tests of the page at /docs."""
