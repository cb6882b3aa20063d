"""Why a model cannot be served."""

from __future__ import annotations


class ModelError(Exception):
    """A model that cannot be served. The message is one line for the user: what was tried and why it failed."""
