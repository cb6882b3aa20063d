"""GuideLLM against a server.

::

    python -m bench.clients.guidellm --program VENV/bin/guidellm
"""

from __future__ import annotations

import json
import sys

from bench.clients.programs import NAME, ClientFailed, fail, options, run_client, server_flags, tokenizer_folder
from bench.process import server_process


def main() -> int:
    parser = options(__doc__.splitlines()[0], "guidellm")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=2)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    with server_process(server_flags(chosen.model), chosen.out / "server.log") as url:
        data = json.dumps({"prompt_tokens": 100, "output_tokens": 50})
        arguments = ["benchmark", "run", "--target", url, "--model", NAME, "--request-type", "text_completions"]
        arguments += ["--processor", tokenizer_folder(chosen.model), "--data", data]
        arguments += ["--profile", "concurrent", "--rate", str(chosen.concurrency)]
        arguments += ["--max-requests", str(chosen.requests), "--output-dir", str(chosen.out), "--outputs", "json"]
        try:
            print(run_client(chosen.program, arguments, chosen.out / "guidellm.log"))
        except ClientFailed as error:
            return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
