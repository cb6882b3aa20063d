"""The GPU check: says that there is no GPU, runs its whole table on a CPU, and needs no web package."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from bench import gpu_check
from bench.gpu_check import CHECKS, compare
from bench.offline import Completion
from specdec.plan import TokenLogprobs

SMALL = ["--device", "cpu", "--random", "--layers", "2", "--hidden", "64", "--requests", "5", "--tokens", "5"]

WITHOUT_WEB = """
import sys

class Absent:
    names = {"fastapi", "starlette", "uvicorn", "pydantic", "pydantic_settings", "sse_starlette", "prometheus_client",
             "httpx", "openai"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from bench import gpu_check
import bench.offline, specdec.step, scheduler.scheduler, model.loader
raise SystemExit(gpu_check.main(["--device", "cpu", "--random", "--layers", "1", "--hidden", "64", "--requests", "2",
                                 "--tokens", "2", "--dtypes", "bfloat16", "--executors", "fused"]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out


def test_every_condition_is_a_line_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([*SMALL, "--dtypes", "bfloat16"]) == 0
    out = capsys.readouterr().out
    for check in CHECKS:
        assert out.count(f"| {check.name} | 5 of 5 | 25 of 25 | 0 |") == 2, out  # fused and generic


def test_it_runs_where_the_web_packages_are_missing() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_WEB], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "every answer identical" in done.stdout


def _completion(ids: tuple[int, ...], logprob: float) -> Completion:
    return Completion(ids, tuple(TokenLogprobs(i, logprob, 1, ()) for i in ids), "length")


def test_the_comparison_sees_a_different_id_and_a_different_logprob() -> None:
    same = _completion((1, 2, 3), -1.0)
    assert compare([same], [same]) == (1, 3, 3, 0.0)
    assert compare([same], [_completion((1, 5, 3), -1.0)]) == (0, 3, 1, 0.0)
    assert compare([same], [_completion((1, 2, 3), -1.25)]) == (1, 3, 0, 0.25)
