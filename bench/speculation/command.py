"""``python -m bench.speculation`` on the command line (docs/speculation.md)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.speculation.cells import CellRunner, Prompts, Size, plan_cells
from bench.speculation.forwards import ForwardTimes, measure_forwards, shapes_for
from bench.speculation.load_step import LoadStep, examine, load_step_table, run_load_step
from bench.speculation.modes import BLOCK_SIZE, MAX_BATCHED_TOKENS, MODE_NAMES, OFF, EngineMaker, Mode, make_modes
from bench.speculation.pace import Pace
from bench.speculation.prompt_set import WORKLOADS, encode_prompt, load_prompts, prompt_set_hash
from bench.speculation.report import LEGEND, acceptance_lines, cell_objects, table
from bench.speculation.runs import spread_lengths
from bench.verify.report import machine, write_atomically
from model.draft_model import open_draft_model
from model.errors import ModelError
from model.kernels import chosen_kernels, get_kernels
from model.loader import LoadedModel
from model.opening import open_model
from model.source_error import ModelSourceError
from specdec.drafters.registry import AUTO
from specdec.probe import measured_exactness
from specdec.sampling import Sampler

FULL = Size(pairs=7, least_pairs=7, tokens=128, requests_per_seat=4.0)
QUICK = Size(pairs=5, least_pairs=3, tokens=64, requests_per_seat=1.5)
CONCURRENCY = {False: (1, 4, 16, 32), True: (1, 16)}
TEMPERATURES = {False: (0.0, 0.8), True: (0.0,)}
COPY_CONCURRENCY = 8  # the copy workload is measured there, too
QUICK_SECONDS = 13.0 * 60.0
FORWARD_ROUNDS = {False: 9, True: 5}
DEFAULT_K, DEFAULT_MAX_K = 4, 16
BOUND_KS = (1, 2, 4, 8, 16)


@dataclass(slots=True)
class Progress:
    """Lines that stay and, on a terminal, a line that is written over."""

    live: bool = False

    def __call__(self, line: str, stays: bool = True) -> None:
        if stays:
            print(f"{self._wipe()}speculation: {line}", file=sys.stderr, flush=True)
        elif sys.stderr.isatty():
            print(f"{self._wipe()}speculation: {line[:110]}", end="", file=sys.stderr, flush=True)
            self.live = True

    def _wipe(self) -> str:
        wipe, self.live = ("\r\x1b[K" if self.live else ""), False
        return wipe


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speculation",
        description="What each drafter and the controller gain or cost against plain decoding.",
    )
    parser.add_argument("--quick", action="store_true", help="concurrency 1 and 16, greedy, fewer pairs, 15 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells there as a JSON list")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: all")
    parser.add_argument("--concurrency", type=_positive, nargs="+", metavar="C", help="default: 1 4 16 32, copy also 8")
    parser.add_argument("--temperature", type=_degree, nargs="+", metavar="T", help="default: 0 and 0.8")
    parser.add_argument(
        "--mode", nargs="+", choices=MODE_NAMES, default=list(MODE_NAMES), help="default: all there are"
    )
    parser.add_argument("--pairs", type=_positive, metavar="N", help="pairs of a cell (7; quick: 3 to 5 by the clock)")
    parser.add_argument(
        "--tokens", type=_tokens, metavar="N", help="output tokens of a request, in the mean (128; quick: 64)"
    )
    parser.add_argument("--k", type=_positive, default=DEFAULT_K, help=f"draft length of the fixed modes ({DEFAULT_K})")
    parser.add_argument(
        "--max-k", type=_positive, default=DEFAULT_MAX_K, help=f"longest draft of auto ({DEFAULT_MAX_K})"
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="leave out what does not fit into the time (quick: 13)"
    )
    parser.add_argument("--load-step", action="store_true", help="only: what auto drafts as 1 request becomes 32 and 1")
    parser.add_argument("--model", help="as for serve (default: the default model)")
    parser.add_argument("--draft-model", metavar="MODEL", help="the drafts of mode model come from it")
    parser.add_argument("--exit-layers", type=_positive, metavar="E", help="layers that mode exit runs")
    parser.add_argument("--kernels", choices=("auto", "torch"), default=None, help="as for serve")
    parser.add_argument("--threads", type=_positive, metavar="N", help="as serve --num-threads")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if an output differed, nothing was measured or something was wrong with the call; 130 after Ctrl-C."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.minutes is not None and not 0 < arguments.minutes <= 10_000:
        parser.error(f"--minutes must be above 0 and at most 10000, got {arguments.minutes:g}")
    if arguments.json is not None and not arguments.json.resolve().parent.is_dir():
        parser.error(f"--json {arguments.json}: there is no such folder")
    try:
        return _Benchmark(arguments).run()
    except (ModelError, ModelSourceError, ValueError) as error:
        print(f"speculation: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nspeculation: interrupted before anything was measured", file=sys.stderr)
        return 130


class _Benchmark:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        quick = arguments.quick
        seconds = QUICK_SECONDS if quick else None
        self.pace = Pace(seconds if arguments.minutes is None else 60.0 * arguments.minutes)
        base = QUICK if quick else FULL
        self.size = Size(
            pairs=arguments.pairs or base.pairs,
            least_pairs=arguments.pairs or base.least_pairs,
            tokens=arguments.tokens or base.tokens,
            requests_per_seat=base.requests_per_seat,
        )
        self.workloads = list(dict.fromkeys(arguments.workload))
        self.temperatures = list(dict.fromkeys(arguments.temperature or TEMPERATURES[quick]))
        self.progress = Progress()
        self.left_out: dict[str, str] = {}

    def run(self) -> int:
        arguments = self.arguments
        loaded = self._load()
        prompts = self._encode(loaded)
        maker = EngineMaker(loaded, self._load_draft(loaded), arguments.exit_layers)
        modes = self._modes(maker)
        common = self._common(loaded, maker)
        print(
            f"{common['model']}, {common['dtype']}, {common['executor']}, {common['exactness']}, "
            f"{common['threads']} threads; prompt set {common['prompt_set']}"
        )
        for name, reason in self.left_out.items():
            print(f"mode {name} left out: {reason}")
        if not modes:
            print("speculation: error: no mode is left to compare with off", file=sys.stderr)
            return 1
        if arguments.load_step:
            return self._load_step(maker, modes, prompts)
        forwards = self._forwards(loaded, modes)
        runner = CellRunner(maker, prompts, self.size, forwards, self.pace, self.progress)
        interrupted = False
        try:
            runner.run(plan_cells(self.workloads, self._concurrencies, self.temperatures, modes))
        except KeyboardInterrupt:
            interrupted = True
            self.progress("interrupted; what there is follows")
        return self._report(runner, forwards, common, interrupted)

    def _report(self, runner: CellRunner, forwards: ForwardTimes, common: dict[str, Any], interrupted: bool) -> int:
        objects = cell_objects(runner.results, forwards, self.size, common)
        if objects:
            print("\n" + table(objects) + "\n\n" + "\n".join(LEGEND))
            lines = acceptance_lines(objects)
            if lines:
                print("\naccepted up to draft position 1, 2, ..\n" + "\n".join(lines))
        print()
        for cell in runner.left_out:
            print(f"left out, no time: {cell}")
        for result in runner.results:
            if result.note:
                print(f"{result.cell}: {result.note}")
            if result.held is False:
                print(f"{result.cell}: MISSES THE BAR (median at least 0.97, lower end at least 0.94)")
        outputs = runner.outputs
        different = len(outputs.differences)
        print(
            f"outputs equal to those without speculation: {outputs.num_compared - different} of {outputs.num_compared}"
        )
        for difference in outputs.differences[:20]:
            print(f"DIFFERENT: {difference}")
        if different > 20:
            print(f"and {different - 20} more")
        print(f"took {self.pace.elapsed / 60:.1f} minutes{', interrupted' if interrupted else ''}")
        self._write(objects)
        if interrupted:
            return 130
        return 1 if different or not objects else 0

    def _load_step(self, maker: EngineMaker, modes: list[Mode], prompts: dict[str, Prompts]) -> int:
        mode = modes[0]
        load = LoadStep()
        name = "copy" if "copy" in prompts else next(iter(prompts))
        self.progress(f"load step 1, {load.seats}, 1: {name}, greedy, {mode.name}, then off")
        run = run_load_step(maker, mode, prompts[name].token_ids, load)
        plain = run_load_step(maker, Mode(OFF, 0), prompts[name].token_ids, load)
        print(load_step_table(run, examine(run, load)))
        different = sum(a != b for a, b in zip(run.outputs, plain.outputs, strict=True))
        print(f"outputs equal to those without speculation: {len(run.outputs) - different} of {len(run.outputs)}")
        rows = [
            {
                "step": i,
                "phase": "one" if i < run.rise else str(load.seats) if i < run.fall else "one again",
                "decoding": step.num_decoding,
                "prefill_rows": step.num_prefill_rows,
                "drafts": list(step.drafts),
                "emitted": step.num_emitted,
                "ms": round(1e3 * step.seconds, 3),
            }
            for i, step in enumerate(run.steps)
        ]
        self._write(rows)
        return 1 if different else 0

    def _load(self) -> LoadedModel:
        loaded, _ = open_model(
            self.arguments.model,
            self.progress,
            dtype="auto",
            device="cpu",
            executor="auto",
            kernels=chosen_kernels(self.arguments.kernels),
            num_threads=self.arguments.threads,
            max_batched_tokens=MAX_BATCHED_TOKENS,
        )
        return loaded

    def _load_draft(self, target: LoadedModel) -> LoadedModel | None:
        if self.arguments.draft_model is None:
            return None
        return open_draft_model(
            self.arguments.draft_model,
            target,
            self.progress,
            dtype="auto",
            executor="auto",
            kernels=target.kernels,
            num_threads=self.arguments.threads,
            max_batched_tokens=MAX_BATCHED_TOKENS,
        )

    def _encode(self, loaded: LoadedModel) -> dict[str, Prompts]:
        tokenizer = loaded.tokenizer
        found = {}
        for workload in self.workloads:
            prompts = load_prompts(workload)
            ids = tuple(encode_prompt(prompt, tokenizer) for prompt in prompts)
            lengths = spread_lengths(len(ids), self.size.tokens)
            longest = max(len(prompt) + length for prompt, length in zip(ids, lengths, strict=True))
            if longest > loaded.info.max_model_len:
                raise ValueError(
                    f"--tokens {self.size.tokens}: a {workload} prompt and its output have {longest} tokens, and "
                    f"{loaded.info.name} has room for {loaded.info.max_model_len}"
                )
            found[workload] = Prompts(tuple(prompt.name for prompt in prompts), ids)
        return found

    def _modes(self, maker: EngineMaker) -> list[Mode]:
        names = [AUTO] if self.arguments.load_step else self.arguments.mode
        modes = []
        for mode in make_modes(names, k=self.arguments.k, max_k=self.arguments.max_k):
            reason = maker.reason_against(mode)
            if reason:
                self.left_out[mode.name] = reason
            else:
                modes.append(mode)
        return modes

    def _concurrencies(self, workload: str) -> list[int]:
        if self.arguments.concurrency:
            return sorted(set(self.arguments.concurrency))
        found = set(CONCURRENCY[self.arguments.quick])
        return sorted(found | {COPY_CONCURRENCY} if workload == "copy" else found)

    def _forwards(self, loaded: LoadedModel, modes: list[Mode]) -> ForwardTimes:
        self.progress("measuring forward times")
        batches = {c for workload in self.workloads for c in self._concurrencies(workload)}
        largest = max(mode.k for mode in modes)
        ks = {k for k in BOUND_KS if k <= largest} | {mode.k for mode in modes}
        shapes = shapes_for(batches, ks, max_rows=MAX_BATCHED_TOKENS)
        rounds = FORWARD_ROUNDS[self.arguments.quick]
        return measure_forwards(loaded.executor, shapes, block_size=BLOCK_SIZE, rounds=rounds)

    def _common(self, loaded: LoadedModel, maker: EngineMaker) -> dict[str, Any]:
        sampler = Sampler(get_kernels(choice=loaded.kernels))
        return {
            "model": loaded.info.name,
            "dtype": loaded.info.dtype,
            "executor": loaded.executor.kind,
            "exactness": measured_exactness(loaded, sampler).level,
            "threads": torch.get_num_threads(),
            "draft_model": None if maker.draft is None else maker.draft.info.name,
            "exit_layers": maker.exit_layers,
            "fingerprint": loaded.fingerprint,
            "prompt_set": prompt_set_hash(),
            "machine": machine(),
        }

    def _write(self, objects: list[dict[str, Any]]) -> None:
        path = self.arguments.json
        if path is None:
            return
        try:
            write_atomically(path, json.dumps(objects, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise ValueError(f"--json {path}: {error.strerror or error}") from error


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _tokens(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, got {value}")
    return value


def _degree(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 2.0:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2, got {value:g}")
    return value
