"""Whatever changes the bits that the libraries compute is in the facts by which results are kept."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from model.environment import environment, library_settings

COMPUTE = [
    *(f"{family}_{name}" for family in ("DNNL", "ONEDNN") for name in ("MAX_CPU_ISA", "CPU_ISA_HINTS")),
    *(f"{family}_DEFAULT_FPMATH_MODE" for family in ("DNNL", "ONEDNN")),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "MKL_DYNAMIC", "MKL_DOMAIN_NUM_THREADS"),
    *("ATEN_CPU_CAPABILITY", "FBGEMM_ENABLE_INSTRUCTIONS", "TORCH_MKLDNN_MATMUL_MIN_DIM", "TORCH_LINEAR_FLATTEN_3D"),
    *("NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "OPENBLAS_CORETYPE"),
    *("GLIBC_TUNABLES", "LD_PRELOAD", "OMP_DYNAMIC", "OMP_THREAD_LIMIT"),
]
CUDA = ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"]
HARMLESS = [
    *("ONEDNN_VERBOSE", "DNNL_VERBOSE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "MKL_VERBOSE", "OPENBLAS_NUM_THREADS"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "PATH", "TRUEDRAFT_PORT", "HOME", "HF_HOME"),
]


@pytest.mark.parametrize("name", COMPUTE)
def test_a_variable_that_changes_what_libraries_compute_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    facts = [environment("cpu")]
    for value in ("1", "2"):
        monkeypatch.setenv(name, value)
        facts.append(environment("cpu"))
    assert facts[0] != facts[1] != facts[2] != facts[0]


@pytest.mark.parametrize("name", HARMLESS)
def test_a_variable_that_changes_no_bits_does_not_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment("cpu")
    monkeypatch.setenv(name, "3")
    assert environment("cpu") == before


def test_an_empty_variable_is_none() -> None:
    assert library_settings(dict.fromkeys(COMPUTE, ""), "cpu") == {}


@pytest.mark.parametrize("name", CUDA)
def test_variables_of_cuda_count_on_cuda_only(name: str) -> None:
    assert library_settings({name: "1"}, "cuda:0") == {name: "1"}
    assert library_settings({name: "1"}, "cpu") == {}


def test_the_order_of_variables_does_not_count() -> None:
    values = dict.fromkeys(COMPUTE, "1")
    backwards = dict(reversed(values.items()))
    assert list(library_settings(values, "cpu").items()) == list(library_settings(backwards, "cpu").items())


def test_versions_and_torchs_own_switches_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment("cpu")
    try:
        torch._C._set_mkldnn_enabled(False)
        assert environment("cpu") != before
    finally:
        torch._C._set_mkldnn_enabled(True)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert environment("cpu") != before
    finally:
        torch.set_float32_matmul_precision(precision)
    assert environment("cpu") == before
    monkeypatch.setattr(np, "__version__", "0.1")
    assert environment("cpu") != before


def test_this_process_has_the_facts_of_its_own_environment() -> None:
    assert environment("cpu")["settings"] == library_settings(os.environ, "cpu")
