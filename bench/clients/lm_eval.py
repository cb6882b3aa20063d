"""lm-evaluation-harness against two servers, with speculation and without: the same answers and scores, to the bit.

::

    python -m bench.clients.lm_eval --program VENV/bin/lm_eval
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.clients.programs import (
    NAME,
    ClientFailed,
    accepted_drafts,
    fail,
    options,
    run_client,
    server_flags,
    tokenizer_folder,
)
from bench.process import server_process

TASKS = Path(__file__).parent / "task"
DATA = "DATA_FILE"  # stands in a task for the file of questions


def main() -> int:
    parser = options(__doc__.splitlines()[0], "lm_eval")
    chosen = parser.parse_args()
    out: Path = chosen.out
    tasks = out / "tasks"
    tasks.mkdir(parents=True, exist_ok=True)
    for task in sorted(TASKS.glob("*.yaml")):
        text = task.read_text("utf-8").replace(DATA, str((TASKS / "questions.jsonl").resolve()))
        (tasks / task.name).write_text(text, "utf-8")
    names = sorted(task.stem for task in TASKS.glob("*.yaml"))
    found: dict[str, dict[str, Any]] = {}
    try:
        for kind, flags in (("on", ["--draft-length", "fixed"]), ("off", ["--num-speculative-tokens", "0"])):
            with server_process([*server_flags(chosen.model), *flags], out / f"server-{kind}.log") as url:
                given = {
                    "model": NAME,
                    "base_url": f"{url}/v1/completions",
                    "tokenizer": tokenizer_folder(chosen.model),
                    "tokenizer_backend": "huggingface",
                    "num_concurrent": "2",
                    "max_length": "2048",
                }
                arguments = ["run", "--model", "local-completions", "--tasks", ",".join(names)]
                arguments += ["--model_args", ",".join(f"{name}={value}" for name, value in given.items())]
                arguments += ["--include_path", str(tasks), "--output_path", str(out / kind), "--log_samples"]
                log = out / f"lm_eval-{kind}.log"
                print(f"speculation {kind}:", flush=True)
                print(_table(run_client(chosen.program, arguments, log, timeout=chosen.timeout)), flush=True)
                accepted = accepted_drafts(url)
                print(f"{accepted} draft tokens were accepted\n", flush=True)
            found[kind] = _results(out / kind)
            if (accepted > 0) is not (kind == "on"):
                raise ClientFailed(
                    f"{accepted} draft tokens were accepted with speculation {kind}: nothing is compared"
                )
        if found["on"] != found["off"]:
            raise ClientFailed(f"the results differ with speculation and without; see {out}")
    except ClientFailed as error:
        return fail(error)
    print(f"{sum(len(samples) for samples in found['on']['samples'].values())} samples: answers and scores are equal")
    return 0


def _table(printed: str) -> str:
    """The scores, which are the last table of what it printed."""
    return "\n".join(line for line in printed.splitlines() if line.startswith("|"))


def _results(folder: Path) -> dict[str, Any]:
    """The scores, and each sample's answers as the server gave them."""
    newest = max(folder.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    stamp = newest.stem.removeprefix("results_")
    samples = {
        path.name.removesuffix(f"_{stamp}.jsonl"): [
            {name: sample[name] for name in ("doc_id", "resps", "filtered_resps")}
            for sample in map(json.loads, path.read_text("utf-8").splitlines())
        ]
        for path in sorted(newest.parent.glob(f"samples_*_{stamp}.jsonl"))
    }
    if not samples:
        raise ClientFailed(f"lm_eval left no samples in {folder}")
    return {"scores": json.loads(newest.read_text("utf-8"))["results"], "samples": samples}


if __name__ == "__main__":
    sys.exit(main())
