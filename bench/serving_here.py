"""A server in the process that measures it, on a real port."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Generator, Sequence

import uvicorn

from server.app import create_app
from server.cli import build_parser
from server.heap import settle
from server.service import Service
from server.settings import Settings, load_settings


def settings_of(flags: Sequence[str]) -> Settings:
    """Those of ``truedraft serve`` with ``flags``. Raises SettingsError."""
    arguments = vars(build_parser().parse_args(["serve", *flags]))
    del arguments["command"]
    return load_settings(arguments, arguments.pop("config"))


class _Server(uvicorn.Server):
    """Leaves the signals to asyncio: an interrupt ends the measurement."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def serving(service: Service) -> AsyncIterator[str]:
    """Serve ``service`` on a free port from the running event loop; yields the URL."""
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(service), http="h11", ws="none", lifespan="on", log_config=None, access_log=False
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([sock]))
    try:
        while not server.started:
            await asyncio.sleep(0.01)
            if serving.done():
                serving.result()
        settle()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        gc.unfreeze()  # this process may go on to other things
