"""GuideLLM against a server.

::

    python -m bench.clients.guidellm --program VENV/bin/guidellm
"""

from __future__ import annotations

import json
import sys

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


def main() -> int:
    parser = options(__doc__.splitlines()[0], "guidellm")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=2)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    report = chosen.out / "guidellm.json"
    with server_process(server_flags(chosen.model), chosen.out / "server.log") as url:
        arguments = ["run", "--backend", f"kind=openai_http,target={url},model={NAME},request_format=/v1/completions"]
        arguments += ["--tokenizer", f"kind=hf_auto,model={tokenizer_folder(chosen.model)}"]
        arguments += ["--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=50"]
        arguments += ["--profile", f"kind=concurrent,streams={chosen.concurrency}"]
        arguments += ["--constraint", f"kind=max_requests,count={chosen.requests}"]
        arguments += ["--output", f"kind=json,path={report}", "--output", "kind=console", "--disable-progress"]
        try:
            print(run_client(chosen.program, arguments, chosen.out / "guidellm.log", timeout=chosen.timeout))
            (benchmark,) = json.loads(report.read_text("utf-8"))["benchmarks"]
            totals = benchmark["metrics"]["request_totals"]
            if totals["successful"] < chosen.requests or totals["errored"]:
                raise ClientFailed(f"not every request succeeded: {totals}")
            print(f"{accepted_drafts(url)} draft tokens were accepted")
        except ClientFailed as error:
            return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
