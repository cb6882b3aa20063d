"""The fixtures that a file with a server of its own needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest

from tests.server.builders import running


def server_fixtures(
    scope: Literal["module", "session"], *, service: str = "service", base: str = "base"
) -> tuple[Any, Any]:
    """The URL of a running server, and a client of it, for the service that fixture ``service`` gives::

        base, http = server_fixtures("module")

    ``base`` is the name that the first of them gets.
    """

    @pytest.fixture(scope=scope)
    def url(request: pytest.FixtureRequest) -> Iterator[str]:
        with running(request.getfixturevalue(service)) as found:
            yield found

    @pytest.fixture(scope=scope)
    def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
        with httpx.Client(base_url=request.getfixturevalue(base), timeout=60, trust_env=False) as found:
            yield found

    return url, client
