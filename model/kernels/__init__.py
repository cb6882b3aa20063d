"""Compiled CPU kernels: built once, loaded if this processor can run them, absent otherwise."""

from model.kernels.build import INSTRUCTION_SET, KernelBuildError, build_kernels, missing_instructions
from model.kernels.load import KernelsChoice, chosen_kernels, find_kernels, get_kernels
from model.kernels.ops import Kernels

__all__ = [
    "INSTRUCTION_SET",
    "KernelBuildError",
    "Kernels",
    "KernelsChoice",
    "build_kernels",
    "chosen_kernels",
    "find_kernels",
    "get_kernels",
    "missing_instructions",
]
