"""Which kernel object a machine takes."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from model.kernels.build import KernelBuildError, build_kernels, kernel_path

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are written for x86-64")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)


def place(home: Path, compiler: str) -> Path:
    path = kernel_path(home, compiler)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"an object")
    return path


def test_without_a_compiler_an_object_that_another_one_built_is_taken(tmp_path: Path, no_compiler: None) -> None:
    built = place(tmp_path, "some g++ 12")
    assert build_kernels(home=tmp_path) == built


def test_without_a_compiler_and_an_object_the_reason_is_one_line(tmp_path: Path, no_compiler: None) -> None:
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler"):
        build_kernels(home=tmp_path)


def test_an_object_of_other_sources_is_not_taken(tmp_path: Path, no_compiler: None) -> None:
    built = place(tmp_path, "some g++ 12")
    built.parent.rename(built.parent.with_name("0" * 20 + "-00000000"))
    with pytest.raises(KernelBuildError):
        build_kernels(home=tmp_path)


def test_an_object_shipped_with_the_installation_comes_first(
    tmp_path: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    place(tmp_path / "home", "some g++ 12")
    shipped = place(tmp_path / "prefix" / "share" / "truedraft", "some g++ 13")
    assert build_kernels(home=tmp_path / "home") == shipped
