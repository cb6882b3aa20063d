"""The one error of finding a model."""

from __future__ import annotations


class ModelSourceError(Exception):
    """A model could not be found, fetched, converted or accepted. The message is one clear line for people."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
