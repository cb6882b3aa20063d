"""Reports of ``truedraft verify`` as its runner writes them: passed, failed, interrupted, from a hostile tokenizer."""

from __future__ import annotations

import random
from typing import Any

FACTORS: dict[str, tuple[str, ...]] = {
    "batch": ("1", "2", "4", "8", "16"),
    "sampling": ("greedy", "temperature", "penalties", "bias", "top-k and min-p", "min tokens"),
    "prompts": ("short", "long", "multi-turn", "code", "tools", "mixed", "random ids", "repeated"),
    "length": ("1", "16", "128", "512"),
    "condition": ("none", "preempt", "tight pool"),
    "drafter": ("ngram", "random", "oracle", "wrong", "none"),
    "k": ("0", "1", "2", "3", "4", "5", "6", "7", "8"),
    "block_size": ("1", "4", "16", "64"),
    "chunk": ("5", "16", "33", "128", "512"),
    "threads": ("1", "2"),
    "cache": ("cold", "warm"),
    "arrival": ("in order", "shuffled"),
    "aborts": ("no", "yes"),
}
HOSTILE = (
    "</script><b>",
    "<img src=x onerror=alert(1)>",
    "\"'&",
    " \n\t\r",
    "\x00\x1b[31m",
    "\u202eevil",
    "\ud800",
    "\u0301",
)


def build_report(*, num_cases: int = 60, seed: int = 1) -> dict[str, Any]:
    """A report in which everything passed."""
    rng = random.Random(seed)
    cases = [_case(i, rng) for i in range(num_cases)]
    factors = {
        name: {value: sum(case["factors"][name] == value for case in cases) for value in values}
        for name, values in FACTORS.items()
    }
    positions = sum(case["positions"] for case in cases)
    return {
        "schema": 1,
        "tool": "truedraft verify",
        "version": "0.1.0",
        "suite": "quick",
        "started": "2026-03-01T10:00:00Z",
        "seconds": 301.2,
        "command": "truedraft verify --model default --suite quick",
        "passed": True,
        "interrupted": False,
        "model": {
            "name": "SmolLM2-135M-Instruct",
            "dtype": "bfloat16",
            "executor": "fused/cpu-avx512bf16",
            "kernels": "avx512bf16",
            "device": "cpu",
            "num_threads": 2,
            "exactness_level": "L0",
            "exactness_detail": "every check passed",
            "fingerprint": "fp_0123456789abcdef",
        },
        "coverage": {
            "cases_planned": num_cases,
            "cases_run": num_cases,
            "positions": positions,
            "positions_planned": positions,
            "pairs_total": 1180,
            "pairs_covered": 1180,
            "factors": factors,
        },
        "cases": cases,
        "reference": {
            "what": "transformers generate, float32, batch 1",
            "prompts": 32,
            "positions": 512,
            "near_ties": 1,
            "near_tie_rule": "top two logits within 1e-3; at most 1 % of positions",
            "status": "passed",
            "mismatches": [],
        },
    }


def failed_report(tokens: tuple[str, ...] = HOSTILE) -> dict[str, Any]:
    """One case with another token at output index 35, one that could not be compared, a reference mismatch."""
    report = build_report()
    report["passed"] = False
    shared = [11, 12]
    report["cases"][17] |= {
        "status": "failed",
        "reason": "request 3 emits another token at output index 35",
        "divergence": {
            "request": 3,
            "output_index": 35,
            "kind": "token",
            "window_start": 33,
            "expected": [*shared, 7001, 14, 15],
            "got": [*shared, 7002, 16],
            "expected_tokens": [*tokens[:2], tokens[2], tokens[3], tokens[4]],
            "got_tokens": [*tokens[:2], tokens[5], tokens[-1]],
            "expected_top": [[7001, 21.25, tokens[2]], [7002, 21.2499981, tokens[5]]],
            "got_top": [[7002, 21.2500019, tokens[5]], [7001, 21.25, tokens[2]]],
            "step_batch": [
                {"request": 2, "num_computed": 64, "num_tokens": 33, "drafts": [], "accepted": 0},
                {"request": 3, "num_computed": 90, "num_tokens": 1, "drafts": [11, 12, 7002, 16], "accepted": 3},
            ],
            "replay": "truedraft verify --model default --case q017 --suite quick",
        },
    }
    report["cases"][20] |= {"status": "error", "reason": "RuntimeError: the pool ran out of blocks", "positions": 0}
    report["reference"] |= {
        "status": "failed",
        "mismatches": [{"prompt": 3, "kind": "code", "output_index": 7, "expected": [5, 6], "got": [5, 9], "gap": 0.3}],
    }
    return report


def interrupted_report() -> dict[str, Any]:
    """Ctrl-C after 25 of 60 cases; the others are listed as not run."""
    report = build_report()
    report |= {"passed": False, "interrupted": True, "reference": None, "seconds": 92.0}
    for case in report["cases"][25:]:
        case |= {"status": "not run", "positions": 0, "drafted": 0, "accepted": 0, "seconds": 0.0}
    report["coverage"] |= {
        "cases_run": 25,
        "positions": sum(case["positions"] for case in report["cases"]),
        "pairs_covered": 700,
    }
    return report


def _case(i: int, rng: random.Random) -> dict[str, Any]:
    factors = {name: values[i % len(values)] if name == "k" else rng.choice(values) for name, values in FACTORS.items()}
    requests = int(factors["batch"])
    positions = requests * int(factors["length"])
    drafted = 0 if factors["k"] == "0" or factors["drafter"] == "none" else positions // 2
    return {
        "id": f"q{i:03d}",
        "factors": factors,
        "requests": requests,
        "positions": positions,
        "drafted": drafted,
        "accepted": drafted // 3,
        "seconds": positions / 200,
        "status": "passed",
        "near_ties": 0,
        "reason": "",
        "divergence": None,
    }
