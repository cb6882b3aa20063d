"""Building the C++ kernels, and keeping the result.

::

    <home>/kernels/<key>-<compiler>/truedraft_kernels.avx512bf16.so
    <sys.prefix>/share/truedraft/kernels/...    the same, shipped with an installation (a container image)

The key covers everything the object depends on: sources, flags, torch and processor architecture. A machine without
a compiler takes an object that any compiler built from the same key. The name carries the instruction set;
:func:`missing_instructions` says at run time whether this processor has it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from filelock import FileLock

from model.children import Children, ChildrenEnded
from model.model_cache import default_home

Report = Callable[[str], None]  # takes one line of progress for people

INSTRUCTION_SET = "avx512bf16"
# As /proc/cpuinfo spells them. Whoever has bf16 has vnni.
_CPU_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma")
_FLAGS = (
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-fast-math",
    "-ffp-contract=off",
    "-mfma",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512bf16",
    "-mavx512vnni",
    "-w",
)
OBJECT = f"truedraft_kernels.{INSTRUCTION_SET}.so"
_SOURCES = Path(__file__).parent / "csrc"
_BUILD_SECONDS = 600.0


class KernelBuildError(Exception):
    """The kernels cannot be built here. One line: what was tried and why it failed."""


def missing_instructions() -> tuple[str, ...]:
    """What this machine lacks to run the kernels: empty if it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return (f"an x86-64 Linux machine (this is {platform.machine()} {sys.platform})",)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ("a readable /proc/cpuinfo",)
    flags = next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
    return tuple(flag for flag in _CPU_FLAGS if flag not in flags)


def kernel_path(home: Path, compiler_version: str) -> Path:
    """Where the object for these sources, this torch and this compiler belongs, whether it exists or not."""
    compiler = hashlib.sha256(compiler_version.encode()).hexdigest()[:8]
    return home / "kernels" / f"{_key()}-{compiler}" / OBJECT


def _key() -> str:
    digest = hashlib.sha256()
    for part in (INSTRUCTION_SET, " ".join(_FLAGS), torch.__version__, platform.machine()):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def find_built(home: Path) -> Path | None:
    """An object for these sources and this torch under ``home``, whichever compiler made it."""
    return min((home / "kernels").glob(f"{_key()}-*/{OBJECT}"), default=None)


def find_compiler() -> tuple[str, str]:
    """Command and version line of the C++ compiler (``CXX``, else g++, c++, clang++). Raises KernelBuildError."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++", "clang++"):
        command = shutil.which(name)
        if command is None:
            continue
        done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
        if done.returncode == 0 and done.stdout:
            return command, done.stdout.splitlines()[0]
    raise KernelBuildError(f"no C++ compiler ({f'CXX={wanted}' if wanted else 'g++, c++, clang++'} not found)")


def build_kernels(*, home: Path | None = None, progress: Report | None = None) -> Path:
    """Build the kernels unless they lie in the cache already, and return the object's path.

    Needs a compiler but not the instructions, so that an image can be built on any x86-64 machine. ``progress``
    gets a line before and after a build. Raises KernelBuildError.
    """
    say = progress or (lambda line: None)
    if platform.machine() not in ("x86_64", "AMD64"):
        raise KernelBuildError(f"the kernels are written for x86-64, this is {platform.machine()}")
    home = home or default_home()
    shipped = find_built(Path(sys.prefix) / "share" / "truedraft")
    if shipped is not None:
        return shipped
    try:
        compiler, version = find_compiler()
    except KernelBuildError:
        built = find_built(home)
        if built is None:
            raise
        return built
    target = kernel_path(home, version)
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent.with_suffix(".lock")):
            if target.is_file():  # another process built it meanwhile
                return target
            say(f"building the CPU kernels for {INSTRUCTION_SET} with {version} (once, about half a minute)")
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                built = _compile(compiler, Path(scratch))
                built.replace(target)
    except OSError as error:
        raise KernelBuildError(f"cannot write the kernel cache {target.parent}: {error}") from error
    say(f"built {target}")
    return target


def _compile(compiler: str, scratch: Path) -> Path:
    root = Path(torch.__file__).parent
    includes = [f"-I{root / 'include'}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    sources = sorted(_SOURCES.glob("*.cpp"))
    objects = [scratch / f"{source.stem}.o" for source in sources]

    library = scratch / "kernels.so"
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    link = [compiler, "-shared", "-fopenmp", *map(str, objects), *libraries, "-o", str(library)]
    with Children() as children:
        compilations = [
            partial(_run, children, [compiler, *_FLAGS, *includes, "-c", str(source), "-o", str(made)], source.name)
            for source, made in zip(sources, objects, strict=True)
        ]
        children.run_all(compilations, at_once=min(len(sources), os.cpu_count() or 1))
        children.run_all([partial(_run, children, link, "linking")])
    return library


def _run(children: Children, command: list[str], what: str) -> None:
    """Raises KernelBuildError if the compiler fails, is ended or takes too long."""
    try:
        done = children.run(command, timeout=_BUILD_SECONDS)
    except ChildrenEnded as error:
        raise KernelBuildError(f"{what}: not compiled any more") from error
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"{what}: the compiler took more than {_BUILD_SECONDS:.0f} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise KernelBuildError(f"{what}: {first}")
