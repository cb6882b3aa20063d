"""The child that renders chats."""

from bench.faults.children.suffering import suffer
from server.chat.render import render

__all__ = ["render", "suffer"]
