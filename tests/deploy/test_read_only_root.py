"""The server runs as deploy/ lets it: on a read-only root, without capabilities, with the settings of a pod.

A mount namespace stands for the container. The user is the test's, since another could not read this checkout.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from bench.process import free_port, wait_ready
from tests.deploy import image
from tests.deploy.rendered import environment_of, needs_kubectl, overlay, server_of
from tests.server.chat_builders import HELLO, save_chat_model

ROOT = Path(__file__).parents[2]
IN_A_NAMESPACE = ["unshare", "--mount", sys.executable, str(Path(__file__).with_name("read_only.py"))]


pytestmark = [
    needs_kubectl,
    pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare, which makes namespaces"),
]


@dataclass
class Container:
    popen: subprocess.Popen[bytes]
    url: str
    log: Path


@pytest.fixture(scope="module")
def container(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=60, check=False)
    if tried.returncode != 0:
        pytest.skip("this machine lets nobody make a mount namespace")
    folder = tmp_path_factory.mktemp("container")
    model = save_chat_model(tiny_model, folder / "model")
    home, tmp, log, port = folder / "home", folder / "tmp", folder / "log", free_port()
    for place in (home, tmp):
        place.mkdir()
    objects = overlay("cpu")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TRUEDRAFT_")}
    variables |= {name: value for name, value in image.environment().items() if name != "PATH"}
    variables |= environment_of(server_of(objects), objects)
    places = {"TRUEDRAFT_HOME": str(home), "HF_HOME": str(home / "huggingface"), "TMPDIR": str(tmp), "HOME": "/nowhere"}
    variables |= places | {"TRUEDRAFT_MODEL": str(model), "TRUEDRAFT_HOST": "127.0.0.1", "TRUEDRAFT_PORT": str(port)}
    # Sizes of this machine, and no kernels: the image brings its own, this checkout would build them.
    variables |= {"TRUEDRAFT_NUM_THREADS": "1", "TRUEDRAFT_KV_CACHE_MEMORY": "8MiB", "TRUEDRAFT_KERNELS": "torch"}
    variables |= {"TRUEDRAFT_EXECUTOR": "generic", "TRUEDRAFT_MAX_NUM_BATCHED_TOKENS": "64"}  # the probe takes less
    command = [*IN_A_NAMESPACE, str(home), str(tmp), "--", sys.executable, "-m", "server", "serve"]
    with log.open("wb") as out:
        popen = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=variables)
    try:
        wait_ready(popen, f"http://127.0.0.1:{port}", log, timeout=240)
        yield Container(popen, f"http://127.0.0.1:{port}", log)
    finally:
        popen.kill()
        popen.wait(30)


def test_nothing_else_can_be_written(container: Container) -> None:
    # /proc shows the files as that process sees them.
    for folder, mode in ((Path.cwd(), "ro"), (container.log.parent / "home", "rw")):
        inside = Path(f"/proc/{container.popen.pid}/mounts").read_text("utf-8").splitlines()
        mounts = {line.split()[1]: line.split()[3].split(",") for line in inside}
        target = max((target for target in mounts if folder.is_relative_to(target)), key=len)
        assert mode in mounts[target], target


def test_it_has_no_capability(container: Container) -> None:
    status = Path(f"/proc/{container.popen.pid}/status").read_text("utf-8")
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status


def test_it_answers_with_every_part_that_starts_a_process(container: Container) -> None:
    with httpx.Client(base_url=container.url, timeout=60, trust_env=False) as http:
        chat = {"model": "model", "messages": HELLO, "max_tokens": 4, "structured_outputs": {"choice": ["a", "b"]}}
        answer = http.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] in ("a", "b")
        assert http.get("/metrics").status_code == 200


def test_it_ends_in_order(container: Container) -> None:
    container.popen.send_signal(signal.SIGTERM)
    assert container.popen.wait(60) == 0, container.log.read_text("utf-8")
    assert "Traceback" not in container.log.read_text("utf-8")
