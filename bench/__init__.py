"""Proof and measurement."""
