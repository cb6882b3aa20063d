"""A real Prometheus that scrapes with the committed configuration and rules, only faster."""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.process import free_port
from tests.deploy import rules

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="there is no prometheus (apt-get install prometheus)"
)
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)"
)


def write_config(folder: Path, targets: list[str]) -> Path:
    """The committed files, every second: alerts fire at once, and rules wait for no interval of their own."""
    config = yaml.safe_load((rules.FOLDER / "prometheus.yml").read_text("utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [path.name for path in rules.FILES]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": targets}]
    for path in rules.FILES:
        content = yaml.safe_load(path.read_text("utf-8"))
        for group in content["groups"]:
            group.pop("interval", None)
            for rule in group["rules"]:
                rule.pop("for", None)
        (folder / path.name).write_text(yaml.safe_dump(content), "utf-8")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    return folder / "prometheus.yml"


class Prometheus:
    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=30, trust_env=False)

    def get(self, path: str, **parameters: str | float) -> Any:
        answer = self.http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def samples(self, query: str, *, over_time: bool = False) -> list[float]:
        """Values of now, or of the last seconds; NaN left out."""
        if over_time:
            now = time.time()
            found = self.get("query_range", query=query, start=now - 5, end=now, step=1)["result"]
            values = [value for series in found for _, value in series["values"]]
        else:
            values = [series["value"][1] for series in self.get("query", query=query)["result"]]
        return [number for number in map(float, values) if not math.isnan(number)]

    def eventually(self, query: str, *, over_time: bool = False) -> list[float]:
        """Samples of ``query``, as soon as it has some; none if that takes too long."""
        self.missing({query: over_time})
        return self.samples(query, over_time=over_time)

    def missing(self, queries: Mapping[str, bool], patience: float = 60) -> list[str]:
        """Those that find nothing, however long one waits; each with whether it is asked over time."""
        left, deadline = dict(queries), time.monotonic() + patience
        while True:
            left = {
                query: over_time for query, over_time in left.items() if not self.samples(query, over_time=over_time)
            }
            if not left or time.monotonic() > deadline:
                return list(left)
            time.sleep(0.2)


@contextlib.contextmanager
def prometheus_process(config: Path, log: Path) -> Iterator[Prometheus]:
    """Run ``prometheus`` with that configuration until the block ends."""
    port = free_port()
    prometheus = Prometheus(f"http://127.0.0.1:{port}")
    command = [
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={config.parent / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if prometheus.http.get("/-/ready").status_code == 200:
                        break
                assert process.poll() is None, log.read_text("utf-8")
                assert time.monotonic() < deadline, log.read_text("utf-8")
                time.sleep(0.1)
            yield prometheus
        finally:
            prometheus.http.close()
            process.terminate()
            process.wait(30)
