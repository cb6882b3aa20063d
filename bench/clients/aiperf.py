"""NVIDIA AIPerf against a server: it must read our speculative-decoding numbers.

::

    python -m bench.clients.aiperf --program VENV/bin/aiperf
"""

from __future__ import annotations

import sys

from bench.clients.programs import NAME, ClientFailed, fail, options, run_client, server_flags, tokenizer_folder
from bench.process import server_process

SECTION = "LLM Metrics: Spec Decode"


def main() -> int:
    parser = options(__doc__.splitlines()[0], "aiperf")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=2)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    with server_process(server_flags(chosen.model), chosen.out / "server.log") as url:
        arguments = ["profile", "--model", NAME, "--url", url, "--endpoint-type", "completions", "--streaming"]
        arguments += ["--tokenizer", tokenizer_folder(chosen.model), "--ui", "none"]
        arguments += ["--synthetic-input-tokens-mean", "100", "--output-tokens-mean", "50"]
        arguments += ["--request-count", str(chosen.requests), "--concurrency", str(chosen.concurrency)]
        arguments += ["--artifact-dir", str(chosen.out)]
        try:
            # Not with HF_HUB_OFFLINE: it then looks for the folder in the hub's cache. It fetches nothing either way.
            log = chosen.out / "aiperf.log"
            printed = run_client(chosen.program, arguments, log, timeout=chosen.timeout, offline=False)
            if SECTION not in printed:
                raise ClientFailed(f"aiperf printed no section {SECTION!r}")
        except ClientFailed as error:
            return fail(error)
    print(printed[printed.index(SECTION) :])
    return 0


if __name__ == "__main__":
    sys.exit(main())
