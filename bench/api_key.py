"""The API key of whoever looks at a server that asks for one."""

from __future__ import annotations

import os

KEY_VARIABLE = "TRUEDRAFT_API_KEY"


def key_headers() -> dict[str, str]:
    """The header of a request; empty if the environment holds no key."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}
