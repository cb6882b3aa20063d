"""The one error of finding a model."""

from __future__ import annotations

from model.errors import ModelError


class ModelSourceError(ModelError):
    """A model could not be found, fetched, converted or accepted. The message is one clear line for people."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
