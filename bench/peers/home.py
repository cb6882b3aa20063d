"""Where peers and their copies of the weights lie, and which programs start them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.source import default_home


@dataclass(frozen=True, slots=True)
class PeersHome:
    """One folder for each peer with its own virtual environment, and ``weights``."""

    folder: Path

    @classmethod
    def default(cls) -> PeersHome:
        """``peers`` in TRUEDRAFT_HOME."""
        return cls(default_home() / "peers")

    def of(self, peer: str) -> Path:
        return self.folder / peer

    def python(self, peer: str) -> str:
        """The peer's interpreter; that of this program for a peer that is part of it."""
        return sys.executable if peer in OF_OUR_OWN else str(self.of(peer) / "bin" / "python")

    @property
    def weights(self) -> Path:
        return self.folder / "weights"

    def installed(self, peer: str) -> dict[str, Any] | None:
        """What was installed; None if it is not, or only in part."""
        if peer in OF_OUR_OWN:
            return {"peer": peer}
        try:
            found = json.loads((self.of(peer) / MARK).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


OF_OUR_OWN = ("transformers", "truedraft")  # in the environment that this program runs in
MARK = "installed.json"
