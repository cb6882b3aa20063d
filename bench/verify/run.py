"""A whole verification: choose the cases, decode plainly, run and judge each case, run the reference, report."""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.offline import OfflineConfig
from bench.verify.cases import Case, CasePlan, plan_case
from bench.verify.compare import NEAR_TIE_SHARE
from bench.verify.coverage import coverage_of, pairs_missing
from bench.verify.covering import Combination
from bench.verify.draft_model import DraftModel
from bench.verify.drafters import NO_DRAFT_MODEL, find_drafters
from bench.verify.factors import build_design, rows_again, thread_counts
from bench.verify.plain import PlainAnswers, PlainError
from bench.verify.pool import Cell, RequestPool
from bench.verify.progress import Progress, Silent
from bench.verify.reference import (
    RULE,
    Outcome,
    ReferencePrompt,
    compare_with_references,
    generate_references,
)
from bench.verify.report import SCHEMA, case_entry, machine, near_tie_rule
from bench.verify.runner import CaseResult, CaseRunner
from bench.verify.suite import QUICK_POSITIONS, Suite
from model.kernels import get_kernels
from model.loader import ExecutorName, LoadedModel, load_model
from server.ending import Ended
from server.version import VERSION
from specdec.drafters.registry import AUTO, MODEL
from specdec.probe import measured_exactness
from specdec.sampling import Sampler

# Units of work: one token decoded alone. A position of a batch and a row of a prefill cost less.
_POSITION = 0.3
_ROW = 0.08
_REFERENCE_TOKEN = 8.0
_REFERENCE_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Options:
    suite: str = "quick"
    seed: int = 0  # of the requests and of the choice of cases
    drafter: str | None = None  # prove this one; None: all
    no_draft: str = NO_DRAFT_MODEL  # why there is no draft model, if there is none
    cases: tuple[str, ...] = ()  # run only these (ids or lists of values)
    max_positions: int | None = None  # leave cases out so that no more positions are compared; no fill
    reference: Path | None = None  # the checkpoint's folder; None: no reference run
    ledger: bool = False  # check every slot that a forward reads or writes; slower
    command: str = "truedraft verify"  # how to run it again, without --case: for the lines that replay one case
    given: str | None = None  # the command as it was given; None: ``command`` with the cases


def run_suite(
    loaded: LoadedModel,
    options: Options | None = None,
    progress: Progress | None = None,
    *,
    draft: DraftModel | None = None,
) -> dict[str, Any]:
    """Verify ``loaded`` (its executor is re-bound, as is ``draft``'s) and return the report (see bench.verify.report;
    schema 1).

    Raises ValueError, one line, for options that cannot be. An interruption ends the run; the report says so.
    """
    return Verification(loaded, options or Options(), progress or Silent(), draft).run()


class Verification:
    """One run. ``ended`` holds the interruption, if there was one. Raises ValueError for options that cannot be."""

    def __init__(
        self, loaded: LoadedModel, options: Options, progress: Progress, draft: DraftModel | None = None
    ) -> None:
        self._loaded = loaded
        self._options = options
        self._progress = progress
        info = loaded.info
        self.pool = RequestPool(info, loaded.tokenizer_or_none, options.seed)
        self.drafters = find_drafters(
            loaded.executor, draft, only=options.drafter, no_draft=options.no_draft, seed=options.seed
        )
        design = build_design(
            sampling=self.pool.sampling,
            prompts=self.pool.prompts,
            drafters=self.drafters.names,
            max_model_len=info.max_model_len,
            threads=thread_counts(),
        )
        self.suite = Suite(options.suite, design, options.seed)
        self._exactness = measured_exactness(loaded, Sampler(get_kernels(choice=loaded.kernels)))
        self._plain = PlainAnswers(loaded, self.pool, ledger=options.ledger)
        self._runner = CaseRunner(loaded, self.pool, self._plain, self.drafters, exact=self._exactness.level == "L0")
        self._cases = self._chosen()
        self._results: dict[str, CaseResult] = {}
        self._positions_planned = 0
        self._reference: dict[str, Any] | None = None
        self.ended: Ended | KeyboardInterrupt | None = None

    @property
    def cases(self) -> tuple[Case, ...]:
        """So far."""
        return tuple(self._cases)

    def run(self) -> dict[str, Any]:
        """See :func:`run_suite`."""
        started, clock = datetime.now(UTC), time.perf_counter()
        try:
            self._progress.say(
                f"{self._loaded.executor.kind}, {self._loaded.info.dtype}, level {self._exactness.level}; "
                f"suite {self._options.suite}, {len(self._cases)} cases"
            )
            self._run()
        except (Ended, KeyboardInterrupt) as ended:
            self.ended = ended
        finally:
            self._progress.clear()
        return self._report(started, time.perf_counter() - clock)

    def _run(self) -> None:
        with torch.inference_mode():
            for case, plan in self._decode_plainly():
                self._run_case(case, plan)
            if self._whole:
                self._run_more()
        if self._options.reference is not None:
            self._run_reference(self._options.reference)

    @property
    def _whole(self) -> bool:
        """The suite is run, not some cases of it."""
        return not self._options.cases and self._options.max_positions is None

    def _chosen(self) -> list[Case]:
        options = self._options
        if options.cases:
            found = {case.spec: case for case in map(self.suite.find, options.cases)}.values()
            return [replace(case, id=f"c{i:03d}") if case.id == "case" else case for i, case in enumerate(found, 1)]
        if options.max_positions is None:
            return list(self.suite.cases)
        return self.suite.spread(lambda case: _most_positions(plan_case(case, self.pool)), options.max_positions)

    def _decode_plainly(self) -> list[tuple[Case, CasePlan]]:
        """What the chosen cases need; returns them with their plans."""
        plans = [(case, plan_case(case, self.pool)) for case in self._cases]
        needs = _joined(plan.needs for _, plan in plans)
        for case, plan in plans:
            if case.id.startswith("p"):  # a longer answer, so that this one is a true prefix of it
                for cell, length in plan.needs.items():
                    needs[cell] = max(needs[cell], min(length + 16, self.pool.most_tokens))
        prompts = {cell: self.pool.num_prompt(cell) for cell in needs}
        self._progress.plan(sum(length + _ROW * prompts[cell] for cell, length in needs.items()))
        for case, plan in plans:
            self._progress.plan(_units(case, plan))
        if self._options.reference is not None:
            self._progress.plan(_REFERENCE_TOKEN * sum(p.max_tokens for p in self._reference_prompts()))
        if self._whole:
            left = QUICK_POSITIONS - sum(_most_positions(plan) for _, plan in plans)
            self._progress.plan(max(0.0, _POSITION * left))

        def done(cell: Cell, tokens: int) -> None:
            self._progress.advance(tokens + _ROW * prompts[cell], f"decoding plainly: {cell}")

        self._plain.compute(needs, done)
        self._positions_planned = sum(self._positions(plan) for _, plan in plans)
        return plans

    def _run_more(self) -> None:
        """Cases for what did not come about, then for more positions."""

        def missing() -> set[Combination]:
            ran = [(case, self._results[case.id]) for case in self._cases if case.id in self._results]
            return pairs_missing(self.suite.design, ran)

        for case in self.suite.again(missing):
            self._run_another(case)
        for case in self.suite.fill():
            if self._positions_planned >= QUICK_POSITIONS or any(not r.passed for r in self._results.values()):
                break
            self._run_another(case)

    def _run_another(self, case: Case) -> None:
        plan = plan_case(case, self.pool)
        self._plain.compute(plan.needs)
        self._cases.append(case)
        self._positions_planned += self._positions(plan)
        self._run_case(case, plan)

    def _positions(self, plan: CasePlan) -> int:
        """Of a case whose plain answers are known; 0 if there are none because plain decoding failed."""
        try:
            return sum(len(self._plain.answer(ask.cell, ask.max_tokens).token_ids) for ask in plan.asks if ask.compared)
        except PlainError:
            return 0

    def _run_case(self, case: Case, plan: CasePlan) -> None:
        self._plain.compute(plan.needs)  # nothing to do, unless a longer answer failed
        result = self._results[case.id] = self._runner.run(case, plan)
        if not result.passed:
            entry = case_entry(case, result, self._loaded.tokenizer_or_none, self._replay(case))
            self._progress.say(f"case {case.id} {entry['status']}: {entry['reason']}; {entry['replay']}")
        positions = sum(result.positions for result in self._results.values())
        self._progress.advance(
            _units(case, plan),
            f"case {len(self._results)} of {len(self._cases)}, {positions:,} of {self._positions_planned:,} positions",
        )

    def _replay(self, case: Case) -> str:
        return f"{self._options.command} --case {shlex.quote(case.spec)}"

    def _reference_prompts(self) -> list[ReferencePrompt]:
        return [
            ReferencePrompt(kind, prompt, min(_REFERENCE_TOKENS, self.pool.most_tokens))
            for kind, variants in self.pool.variants.items()
            for prompt in variants[:2]
        ]

    def _run_reference(self, folder: Path) -> None:
        loaded, prompts = self._loaded, self._reference_prompts()
        stops = loaded.info.eos_token_ids
        self._reference = {"what": "transformers generate, float32, batch 1", "near_tie_rule": RULE, "status": "error"}

        def done(tokens: int) -> None:
            self._progress.advance(_REFERENCE_TOKEN * tokens, "transformers generate")

        try:
            references = generate_references(folder, prompts, stops, done)
            if loaded.info.dtype != "float32" or loaded.info.quantization != "none":
                executor: ExecutorName = "generic" if loaded.executor.kind.startswith("generic") else "auto"
                loaded = load_model(
                    folder, dtype="float32", device=loaded.info.device, executor=executor, kernels=loaded.kernels
                )
            outcomes = [
                compare_with_references(loaded.executor, references, stops, config, batch=batch)
                for config, batch in (
                    (OfflineConfig(num_speculative_tokens=0, prefix_cache=False, kernels=loaded.kernels), 1),
                    (OfflineConfig(num_speculative_tokens=4, kernels=loaded.kernels), 8),
                )
            ]
        except Exception as error:  # whatever the other program raises about a model
            self._reference["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
            return
        self._reference |= _reference_report(prompts, outcomes)

    def _draft_line(self) -> str | None:
        """The draft model, for people."""
        draft = self.drafters.draft
        return None if draft is None else f"{draft.name}, the target itself" if draft.is_target else draft.name

    def _report(self, started: datetime, seconds: float) -> dict[str, Any]:
        loaded, options = self._loaded, self._options
        results = self._results
        near_ties = sum(result.near_ties for result in results.values())
        positions = sum(result.positions for result in results.values())
        drafted = sum(result.counts.drafted_positions for result in results.values())
        held = all(case.id in results and results[case.id].passed for case in self._cases)
        held &= near_ties <= NEAR_TIE_SHARE * positions
        held &= options.reference is None or (self._reference or {}).get("status") == "passed"
        entries = [
            case_entry(case, results.get(case.id), loaded.tokenizer_or_none, self._replay(case)) for case in self._cases
        ]
        return {
            "schema": SCHEMA,
            "tool": "truedraft verify",
            "version": VERSION,
            "suite": options.suite,
            "seed": options.seed,
            "started": started.isoformat(timespec="seconds").replace("+00:00", "Z"),
            "seconds": round(seconds, 1),
            "command": options.given
            or " ".join([options.command, *(f"--case {shlex.quote(name)}" for name in options.cases)]),
            # Cases that somebody names may be plain ones; a suite that never speculated proves nothing.
            "passed": held and self.ended is None and bool(self._cases) and (drafted > 0 or bool(options.cases)),
            "speculation_compared": drafted > 0,
            "interrupted": self.ended is not None,
            "model": {
                "name": loaded.info.name,
                "architecture": loaded.info.architecture,
                "dtype": loaded.info.dtype,
                "quantization": loaded.info.quantization,
                "executor": loaded.executor.kind,
                "kernels": loaded.kernels,
                "device": loaded.info.device,
                "num_threads": torch.get_num_threads(),
                "exactness_level": self._exactness.level,
                "exactness_detail": self._exactness.detail,
                "fingerprint": loaded.fingerprint,
            },
            "machine": machine(),
            "ledger": self._plain.config.ledger,
            "plain_positions": self._plain.positions,
            "near_ties": near_ties,
            "near_tie_rule": near_tie_rule(self._exactness.level),
            "draft": self._draft_line(),
            "drafters_left_out": dict(self.drafters.left_out),
            "coverage": coverage_of(
                self.suite.design, self._cases, results, self._positions_planned, triples=options.suite == "full"
            ),
            "cases": entries,
            "reference": self._reference,
        }


def _joined(all_needs: Iterable[Mapping[Cell, int]]) -> dict[Cell, int]:
    needs: dict[Cell, int] = {}
    for cell, length in itertools.chain.from_iterable(each.items() for each in all_needs):
        needs[cell] = max(needs.get(cell, 0), length)
    return needs


def _most_positions(plan: CasePlan) -> int:
    return sum(ask.max_tokens for ask in plan.asks if ask.compared)


def _units(case: Case, plan: CasePlan) -> float:
    rows = sum(ask.max_tokens for ask in plan.asks)  # about as many as the prompts'
    if case.values["condition"] == "preempt":
        rows += rows_again(case.values)
    if case.values["drafter"] in (MODEL, AUTO):
        rows *= 2  # of another model
    return _POSITION * sum(ask.max_tokens for ask in plan.asks) + _ROW * rows


def _reference_report(prompts: list[ReferencePrompt], outcomes: list[Outcome]) -> dict[str, Any]:
    """Of both runs, without speculation and with it."""
    return {
        "prompts": len(prompts),
        "positions": sum(outcome.positions for outcome in outcomes),
        "near_ties": sum(outcome.near_ties for outcome in outcomes),
        "status": "passed" if all(outcome.passed for outcome in outcomes) else "failed",
        "mismatches": [
            {
                "prompt": mismatch.prompt,
                "kind": prompts[mismatch.prompt].kind,
                "speculation": speculation,
                "output_index": mismatch.output_index,
                "expected": mismatch.expected,
                "got": mismatch.got,
                "gap": mismatch.gap,
            }
            for speculation, outcome in zip(("off", "on"), outcomes, strict=True)
            for mismatch in outcome.mismatches
        ],
    }
