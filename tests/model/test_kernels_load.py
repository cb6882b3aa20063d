"""When the kernels are used, and the reason when they are not."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from model.kernels import KernelBuildError, build_kernels, chosen_kernels, find_kernels, load
from tests.model.kernel_builders import fused_executor, need_kernels, tiny_model


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_switch_turns_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEDRAFT_KERNELS", "off")
    assert find_kernels() == (None, "switched off (TRUEDRAFT_KERNELS=off)")
    assert chosen_kernels() == "torch"


def test_who_asks_for_the_torch_path_gets_no_kernels_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRUEDRAFT_KERNELS", raising=False)
    assert find_kernels("torch") == (None, "switched off (kernels = torch)")
    assert fused_executor(tiny_model("llama"), kernels=False).kind == "fused/torch"


def test_who_asks_for_the_kernels_gets_them_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = need_kernels()
    monkeypatch.setenv("TRUEDRAFT_KERNELS", "off")
    assert find_kernels("auto")[0] is kernels


def test_processor_without_the_instructions_gets_none_and_the_fused_executor_runs_on_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRUEDRAFT_KERNELS", raising=False)
    monkeypatch.setattr(load, "missing_instructions", lambda: ("avx512_bf16",))
    assert find_kernels() == (None, "this processor lacks avx512_bf16")
    monkeypatch.setattr("tests.model.kernel_builders.need_kernels", lambda: None)
    assert fused_executor(tiny_model("llama"), kernels=True).kind == "fused/torch"


def test_failing_compiler_is_one_line_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        'if [ "$1" = --version ]; then echo "false++ 1.0"; else echo "x.cpp:1: error: no such thing" >&2; exit 1; fi'
    )
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with pytest.raises(KernelBuildError, match=r"\.cpp: x.cpp:1: error: no such thing$"):
        build_kernels(home=tmp_path)
    assert not list(tmp_path.rglob("*.so"))
    assert not list((tmp_path / "kernels").glob("*/tmp*"))


def test_second_build_takes_the_object_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """if [ "$1" = --version ]; then echo "touch++ 1.0"; exit; fi
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo made > "$2"; fi; shift; done"""
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    lines: list[str] = []
    built = build_kernels(home=tmp_path, progress=lines.append)
    assert built.read_text() == "made\n"
    assert "avx512bf16" in built.name
    assert len(lines) == 2
    assert build_kernels(home=tmp_path, progress=lines.append) == built
    assert len(lines) == 2


def test_kernels_are_registered_once_and_shared() -> None:
    assert need_kernels() is need_kernels()
    assert hasattr(torch.ops.truedraft, "decoder_stack")
