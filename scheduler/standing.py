"""Whether an engine takes requests: what is the same for one in this process and for one in another."""

from __future__ import annotations

from scheduler.errors import EngineUnhealthy, ShuttingDown


class Standing:
    """A part of scheduler.interface.EngineInterface. Healthy and open at first; neither comes back."""

    def __init__(self) -> None:
        self._closing = False
        self._unhealthy_reason: str | None = None

    @property
    def healthy(self) -> bool:
        return self._unhealthy_reason is None

    @property
    def unhealthy_reason(self) -> str | None:
        """One sentence, fit for a health answer; None while healthy."""
        return self._unhealthy_reason

    @property
    def accepting(self) -> bool:
        """``submit`` would not refuse for the engine's own state."""
        return self.healthy and not self._closing

    def check_accepting(self) -> None:
        """Raises EngineUnhealthy or ShuttingDown if the engine takes no requests."""
        if self._unhealthy_reason is not None:
            raise EngineUnhealthy(self._unhealthy_reason)
        if self._closing:
            raise ShuttingDown("the server is shutting down")
