"""Why a server does not start."""

from __future__ import annotations


class StartError(Exception):
    """The server cannot start; the message is one line."""
