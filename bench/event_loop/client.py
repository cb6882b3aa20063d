"""Sends one load from a process of its own, whose work does not count as the server's.

``python -m bench.event_loop.client URL MODEL CASE SECONDS WORKERS STREAMS`` says ``ready``, waits for a line, sends,
and says how often each status came, as JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import httpx

from bench.event_loop.loads import Load, loads_of, stream

TIMEOUT = 300.0  # seconds: long answers on a slow machine; nobody waits for ever


def send(url: str, model: str, loads: list[tuple[Load, ...]], seconds: float) -> Counter[str]:
    """One thread for each of ``loads``, which sends its requests in turn for so long, but at least one."""
    statuses: Counter[str] = Counter()
    numbers = itertools.count()
    end = time.monotonic() + seconds

    def work(mine: Iterator[Load]) -> None:
        with httpx.Client(base_url=url, timeout=TIMEOUT, trust_env=False) as client:
            for sent in itertools.count():
                if sent > 0 and time.monotonic() >= end:
                    return
                path, body = next(mine)(next(numbers))
                try:
                    statuses[str(client.post(path, json={"model": model, **body}).status_code)] += 1
                except httpx.HTTPError as error:
                    statuses[type(error).__name__] += 1

    threads = [
        # Each begins at another place, so that they do not all ask for the same.
        threading.Thread(target=work, args=(itertools.cycle(each[k % len(each) :] + each[: k % len(each)]),))
        for k, each in enumerate(loads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def main(arguments: list[str]) -> None:
    url, model, case = arguments[:3]
    seconds, workers, streams = float(arguments[3]), int(arguments[4]), int(arguments[5])
    print("ready", flush=True)
    sys.stdin.readline()
    loads = loads_of(case)
    sent = [loads] * workers if loads else []
    print(json.dumps(send(url, model, sent + [(stream,)] * streams, seconds)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
