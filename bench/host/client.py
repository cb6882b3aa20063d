"""Streams from a process of its own, whose work does not count as the server's: ``URL MODEL STREAMS SECONDS``.

Says ``ready``, waits for a line, and asks for completions on every stream, one after the other, for so long.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from urllib.parse import urlsplit

TOKENS = 256  # of an answer: long, so that most steps have every stream
PROMPT = "Once upon a time there was a lighthouse keeper who wrote down everything that the sea brought him. {}:"


def stream(url: str, model: str, number: int, end: float) -> None:
    """One stream after the other until ``end`` (monotonic seconds). Raises RuntimeError for another status than 200."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    while time.monotonic() < end:
        body = {
            "model": model,
            "prompt": PROMPT.format(number),
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {response.read(500)!r}")
            while time.monotonic() < end and response.read1(65536):
                pass
        if response.length != 0 and time.monotonic() >= end:
            return connection.close()
        number += 1000


def main(arguments: list[str]) -> None:
    url, model, streams, seconds = arguments[0], arguments[1], int(arguments[2]), float(arguments[3])
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=stream, args=(url, model, number, end)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
