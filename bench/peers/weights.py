"""The same weights for each peer, in the format that it reads; made once for each checkpoint."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers.gguf_file import GgufError, write_gguf
from bench.peers.home import PeersHome
from model.model_cache import file_sha256
from server.commands import CommandError

PRECISIONS = ("bf16", "fp32", "int8")
LAST_LINES = 8


@dataclass(frozen=True, slots=True)
class Weights:
    """Copies of the checkpoint in ``folder``."""

    folder: Path
    home: PeersHome
    say: Callable[[str], None]

    def gguf(self, precision: str) -> Path:
        """Raises CommandError if the checkpoint cannot be written so."""
        path = self._copy(f"{precision}.gguf")
        if not path.exists():
            self.say(f"writing {path}")
            part = path.with_suffix(".part")
            try:
                write_gguf(self.folder, part, precision)
            except GgufError as error:
                part.unlink(missing_ok=True)
                raise CommandError(f"llama.cpp: {error}") from error
            part.rename(path)
        return path

    def openvino(self, precision: str) -> Path:
        """bf16 runs from the fp32 file: the processor's plugin rounds weights that came from bf16 back to them.

        Raises CommandError with the exporter's last lines.
        """
        kind = "int8" if precision == "int8" else "fp32"
        path = self._copy(f"openvino-{kind}")
        if path.is_dir():
            return path
        self.say(f"exporting {path}")
        part = path.with_name(f"{path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        command = [self.home.python("openvino"), "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        command += ["--model", str(self.folder), "--task", "text-generation-with-past", "--weight-format", kind]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "no"}
        ended = subprocess.run(
            [*command, str(part)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            text=True,
            check=False,
        )
        if ended.returncode or not (part / "openvino_model.xml").exists():
            tail = "\n".join(ended.stdout.splitlines()[-LAST_LINES:])
            raise CommandError(f"openvino: the export ended with exit code {ended.returncode}:\n{tail}")
        part.rename(path)
        return path

    def _copy(self, kind: str) -> Path:
        """Named by the content that decides it."""
        digests = [file_sha256(file) for file in sorted(self.folder.glob("*.safetensors"))]
        digests += [file_sha256(self.folder / name) for name in ("config.json", "tokenizer.json")]
        key = f"{self.folder.name[:40]}-{'-'.join(digest[:6] for digest in digests)}"
        self.home.weights.mkdir(parents=True, exist_ok=True)
        return self.home.weights / f"{key}.{kind}"
