"""``python -m bench.quantize``: int8 weights against the model's own precision, as tables in Markdown."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.quantize.quality import TEXT, greedy_answers, on_answers, on_text
from bench.quantize.speed import interleaved_forwards
from bench.speculation.prompt_set import WORKLOADS, encode_prompt, load_prompts
from model.errors import ModelError
from model.fused import FusedExecutor
from model.int8 import Quantize
from model.loader import LoadedModel
from model.opening import open_model
from model.source_error import ModelSourceError


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    try:
        plain, folder = _open(arguments, "none", arguments.model)
        quantized, _ = _open(arguments, "int8", str(folder))
    except (ModelError, ModelSourceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{plain.info.name}: {plain.executor.kind} against {quantized.executor.kind}\n")
    if "quality" in arguments.what:
        print("\n".join(quality_table(plain, quantized, arguments.tokens, arguments.prompts)), flush=True)
    if "speed" in arguments.what:
        print("\n".join(speed_table(plain, quantized, arguments.rounds)), flush=True)
    return 0


def quality_table(plain: LoadedModel, quantized: LoadedModel, tokens: int, prompts: int) -> list[str]:
    """Of greedy answers of ``tokens`` tokens to the first ``prompts`` prompts of each workload, and the text."""
    ids = plain.tokenizer.encode(TEXT.read_text("utf-8"), add_special_tokens=False)
    text = on_text(quantized.executor, plain.executor, ids)
    dtype = plain.info.dtype
    lines = [
        "| measured on | tokens | figure | " + dtype + " | int8 |",
        "|---|---|---|---|---|",
        *_size_line(plain, quantized),
        f"| text | {text.tokens} | perplexity | {text.reference_perplexity:.2f} | {text.perplexity:.2f} |",
        f"| text | {text.tokens} | same most likely token | | {text.same_best:.1%} |",
        f"| text | {text.tokens} | KL divergence, nats a token | | {text.divergence:.4f} |",
    ]
    longest = plain.info.max_model_len - tokens
    for workload in WORKLOADS:
        chosen = [encode_prompt(prompt, plain.tokenizer)[:longest] for prompt in load_prompts(workload)[:prompts]]
        found = on_answers(quantized.executor, greedy_answers(plain.executor, chosen, tokens))
        where = f"{workload}, {found.prompts} answers | {found.prompts * found.tokens}"
        lines += [
            f"| {where} | same token after the same tokens | | {found.same_best:.1%} |",
            f"| {where} | share of an answer before its first difference | | {found.same_prefix:.1%} |",
            f"| {where} | answers without a difference | | {found.same_answers:.1%} |",
        ]
    return [*lines, ""]


def _size_line(plain: LoadedModel, quantized: LoadedModel) -> list[str]:
    if not (isinstance(plain.executor, FusedExecutor) and isinstance(quantized.executor, FusedExecutor)):
        return []
    own, less = plain.executor.weight_bytes / 1e6, quantized.executor.weight_bytes / 1e6
    return [f"| weights of the products | | MB | {own:.0f} | {less:.0f} |"]


def speed_table(plain: LoadedModel, quantized: LoadedModel, rounds: int) -> list[str]:
    """Median milliseconds of forwards, both models in turn."""
    lines = [f"| rows | {plain.info.dtype}, ms | int8, ms | times as fast |", "|---|---|---|---|"]
    for pair in interleaved_forwards(plain.executor, quantized.executor, rounds=rounds):
        lines.append(f"| {pair.rows} | {1e3 * pair.plain:.2f} | {1e3 * pair.quantized:.2f} | {pair.ratio:.2f} |")
    return [*lines, ""]


def _open(arguments: argparse.Namespace, quantize: Quantize, model: str | None) -> tuple[LoadedModel, Path]:
    return open_model(
        model,
        lambda line: print(line, file=sys.stderr, flush=True),
        dtype=arguments.dtype,
        device="cpu",
        executor="fused",
        kernels=arguments.kernels,
        num_threads=arguments.num_threads,
        quantize=quantize,
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.quantize", description=__doc__)
    parser.add_argument("what", nargs="*", default=["quality", "speed"], help="quality, speed or both (both)")
    parser.add_argument("--model", default="default", help="as for serve (default)")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="as for serve (auto)")
    parser.add_argument("--kernels", choices=("auto", "torch"), default="auto", help="as for serve (auto)")
    parser.add_argument("--num-threads", type=int, default=None, metavar="N", help="as for serve")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each greedy answer (64)")
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="of each workload (8)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="forwards of each kind (15)")
    arguments = parser.parse_args(argv)
    for name in ("tokens", "prompts", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    for what in arguments.what:
        if what not in ("quality", "speed"):
            parser.error(f"what must be quality or speed, got {what!r}")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
