"""GET from a server that may be anybody's: within a size and a time, and every failure is one line."""

from __future__ import annotations

import asyncio
import ssl

import httpx

from bench.api_key import key_headers
from bench.foreign import shown
from server.commands import CommandError

MAX_BYTES = 16 * 2**20
DEADLINE = 15.0  # seconds, from the connection to the last byte


class Reader:
    """GETs of one server. Not for two threads at once."""

    def __init__(self, url: str, *, deadline: float = DEADLINE, max_bytes: int = MAX_BYTES) -> None:
        self.url = url
        self._deadline = deadline
        self._max_bytes = max_bytes
        # Made once: reading the certificates takes far longer than a scrape.
        self._verify: ssl.SSLContext | bool = ssl.create_default_context() if url.startswith("https://") else False

    def get(self, path: str) -> bytes:
        """The body of a 200. Raises CommandError, one line."""
        try:
            return asyncio.run(self._get(path))
        except TimeoutError as error:
            raise self.error(f"{path} did not arrive within {self._deadline:g} seconds") from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
            reason = shown(" ".join(str(error).split())) or type(error).__name__
            raise self.error(f"{path} cannot be read: {reason}") from error

    def error(self, what: str) -> CommandError:
        return CommandError(f"--url {self.url}: {what}")

    async def _get(self, path: str) -> bytes:
        # No compression: it would hide the size.
        headers = {"Accept-Encoding": "identity", **key_headers()}
        client = httpx.AsyncClient(base_url=self.url, timeout=None, trust_env=False, verify=self._verify)
        async with asyncio.timeout(self._deadline), client, client.stream("GET", path, headers=headers) as response:
            if response.status_code != 200:
                raise self.error(f"{path} answers {response.status_code}")
            if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
                raise self.error(f"{path} is compressed, though it was asked not to be")
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > self._max_bytes:
                    raise self.error(f"{path} is larger than {self._max_bytes:,} bytes")
        return bytes(body)
