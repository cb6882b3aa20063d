"""Running a case and judging it: every request's answer against its plain answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from bench.offline import Completion, OfflineConfig, Speculate, Submission
from bench.verify.capture import Moment, Row, capture
from bench.verify.cases import STRANGER, Case, CasePlan
from bench.verify.compare import Difference, first_difference, near_tie, tie_tolerance
from bench.verify.counting import CountingEngine, Counts
from bench.verify.drafters import Drafters
from bench.verify.plain import PlainAnswers, PlainError
from bench.verify.pool import Cell, RequestPool
from model.loader import LoadedModel
from specdec.drafters.registry import MODEL


@dataclass(frozen=True, slots=True)
class Failure:
    """The first difference of a case, with both sides."""

    request: int  # index in its run
    cell: Cell
    warm_up: bool  # in a run that fills the cache for a later one
    difference: Difference
    expected: Completion
    got: Completion
    expected_moment: Moment | None  # from running both sides once more; None: that token was not emitted
    got_moment: Moment | None
    note: str | None  # what the second run showed otherwise
    request_of: Mapping[int, int]  # index in its run, by seq_id


@dataclass(frozen=True, slots=True)
class CaseResult:
    requests: int = 0
    positions: int = 0  # compared and equal, up to the first difference
    counts: Counts = field(default_factory=Counts)
    near_ties: int = 0
    seconds: float = 0.0
    error: str | None = None  # it could not be run to its end
    problem: str | None = None  # something was left behind
    failure: Failure | None = None

    @property
    def passed(self) -> bool:
        return self.error is None and self.problem is None and self.failure is None


@dataclass(frozen=True, slots=True)
class _Answered:
    """One submission's answer beside the plain one."""

    run: int
    index: int
    cell: Cell
    seq_id: int
    submission: Submission
    expected: Completion
    got: Completion


class CaseRunner:
    """Runs cases on one model. ``exact``: bit for bit (L0), else with the near-tie rule."""

    def __init__(
        self, model: LoadedModel, pool: RequestPool, plain: PlainAnswers, drafters: Drafters, *, exact: bool
    ) -> None:
        self._model = model
        self._pool = pool
        self._plain = plain
        self._drafters = drafters
        self._exact = exact

    def run(self, case: Case, plan: CasePlan) -> CaseResult:
        """Run and judge ``case``, whose requests are ``plan``; its plain answers must have been computed.

        Raises only what ends the process.
        """
        started = time.perf_counter()
        threads = torch.get_num_threads()
        torch.set_num_threads(int(case.values["threads"]))
        try:
            result = self._run(case, plan)
        except PlainError as error:
            result = CaseResult(error=str(error)[:500])
        except Exception as error:  # whatever the engine raises is the case's finding
            result = CaseResult(error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
        finally:
            torch.set_num_threads(threads)
        return dataclasses.replace(result, seconds=time.perf_counter() - started)

    def _run(self, case: Case, plan: CasePlan) -> CaseResult:
        submissions, by_seq = plan.submissions(self._plain), plan.by_seq()
        compared = {seq_id for seq_id, (run, index) in enumerate(by_seq) if plan.runs[run][index].compared}
        engine = CountingEngine(
            self._model.executor,
            self._config(plan),
            num_blocks=plan.num_blocks,
            draft=self._drafters.draft_executor(case.values["drafter"]),
            speculate=self._speculate(case, plan),
            compared=compared,
        )
        answers = [engine.run(run) for run in submissions]
        counts = engine.counts
        counts.preemptions = engine.num_preemptions
        for ask, answer in zip(plan.asks, (answer for run in answers for answer in run), strict=True):
            counts.cached_tokens += answer.num_cached_tokens if ask.compared else 0
            counts.aborted += answer.finish_reason == "abort"
        answered = [
            _Answered(
                run=run,
                index=index,
                cell=plan.runs[run][index].cell,
                seq_id=seq_id,
                submission=submissions[run][index],
                expected=self._plain.answer(plan.runs[run][index].cell, plan.runs[run][index].max_tokens),
                got=answers[run][index],
            )
            for seq_id, (run, index) in enumerate(by_seq)
            if seq_id in compared
        ]
        result = self._judge(case, plan, answered, CaseResult(requests=int(case.values["batch"]), counts=counts))
        return dataclasses.replace(result, problem=self._problem(case, engine, result, answered))

    def _problem(
        self, case: Case, engine: CountingEngine, result: CaseResult, answered: Sequence[_Answered]
    ) -> str | None:
        """What is wrong although every answer is right."""
        try:
            engine.check_clean()
        except AssertionError as error:
            return f"something was left behind: {' '.join(str(error).split()) or 'blocks or sequences'}"[:500]
        if engine.step.num_drafter_failures:
            return f"the drafter failed {engine.step.num_drafter_failures} times"
        for one in answered:
            if one.submission.salt == STRANGER and one.got.num_cached_tokens:
                return f"another cache salt, and yet {one.got.num_cached_tokens} tokens came from the prefix cache"
        counts = result.counts
        if case.values["drafter"] == "perfect" and self._exact and counts.accepted != counts.drafted:
            return f"of {counts.drafted} drafts from the known answers only {counts.accepted} were accepted"
        draft = self._drafters.draft
        its_own = case.values["drafter"] == MODEL and draft is not None and draft.is_target
        if its_own and self._exact and counts.accepted != counts.drafted:
            return f"of {counts.drafted} drafts of the target itself only {counts.accepted} were accepted"
        return None

    def _config(self, plan: CasePlan) -> OfflineConfig:
        # The sampler's kernels and the ledger are the run's, not the case's.
        return dataclasses.replace(plan.config, kernels=self._plain.config.kernels, ledger=self._plain.config.ledger)

    def _speculate(self, case: Case, plan: CasePlan) -> Speculate:
        known: dict[int, Sequence[int]] = {}
        if plan.oracle:
            for seq_id, (run, index) in enumerate(plan.by_seq()):
                ask = plan.runs[run][index]
                known[seq_id] = self._plain.answer(ask.cell, ask.max_tokens).token_ids
        return self._drafters.speculate(
            case.values["drafter"], case.spec, known, max_rows=plan.config.max_num_batched_tokens
        )

    def _judge(self, case: Case, plan: CasePlan, answered: list[_Answered], result: CaseResult) -> CaseResult:
        positions = ties = 0
        worst: tuple[Difference, _Answered] | None = None
        for one in answered:
            difference = first_difference(one.expected, one.got)
            if difference is not None and not self._exact:
                difference = self._tolerated(one)
                if difference is not None and difference.kind == "token" and self._nearly_tied(one, difference):
                    positions += difference.output_index
                    ties += 1
                    continue
            if difference is None:
                positions += len(one.got.token_ids)
                continue
            positions += difference.output_index
            if worst is None or difference.output_index < worst[0].output_index:
                worst = difference, one
        failure = None if worst is None else self._examine(case, plan, *worst)
        return dataclasses.replace(result, positions=positions, near_ties=ties, failure=failure)

    def _tolerated(self, one: _Answered) -> Difference | None:
        """The first difference that rounding does not explain: logprobs may be a little off."""
        row = self._plain_row(one, 0)
        return first_difference(one.expected, one.got, logprob_tolerance=2 * tie_tolerance(row, self._model.info.dtype))

    def _nearly_tied(self, one: _Answered, difference: Difference) -> bool:
        at = difference.output_index
        row = self._plain_row(one, at)
        tokens = [*one.submission.prompt, *one.expected.token_ids[:at]]
        return near_tie(
            row,
            one.submission.params,
            tokens,
            len(one.submission.prompt),
            one.got.token_ids[at],
            tie_tolerance(row, self._model.info.dtype),
        )

    def _plain_row(self, one: _Answered, output_index: int) -> Row:
        """The logits row that decides an output index, computed alone."""
        prompt = (*one.submission.prompt, *one.expected.token_ids[:output_index])
        single = Submission(prompt, dataclasses.replace(one.submission.params, max_tokens=1))
        moment, _ = self._plain_again(single, 0)
        assert moment is not None
        return moment.row

    def _plain_again(self, submission: Submission, output_index: int) -> tuple[Moment | None, Completion]:
        config = self._plain.config
        moment, ((answer,),) = capture(
            self._model.executor,
            config,
            [[Submission(submission.prompt, submission.params)]],
            num_blocks=-(-(len(submission.prompt) + submission.params.max_tokens) // config.block_size),
            seq_id=0,
            output_index=output_index,
        )
        return moment, answer

    def _examine(self, case: Case, plan: CasePlan, difference: Difference, one: _Answered) -> Failure:
        """Run both sides again and look at the step that emitted the first differing token."""
        at = difference.output_index
        got_moment, answers = capture(
            self._model.executor,
            self._config(plan),
            plan.submissions(self._plain),
            num_blocks=plan.num_blocks,
            draft=self._drafters.draft_executor(case.values["drafter"]),
            speculate=self._speculate(case, plan),
            seq_id=one.seq_id,
            output_index=min(at, len(one.got.token_ids) - 1),
        )
        expected_moment, again = self._plain_again(one.submission, min(at, len(one.expected.token_ids) - 1))
        note = None
        if again != one.expected:
            note = "plain decoding gave another answer the second time"
        elif answers[one.run][one.index] != one.got:
            note = "the case gave another answer the second time"
        return Failure(
            request=one.index,
            cell=one.cell,
            warm_up=one.run < len(plan.runs) - 1,
            difference=difference,
            expected=one.expected,
            got=one.got,
            expected_moment=expected_moment,
            got_moment=got_moment,
            note=note,
            request_of={seq_id: index for seq_id, (_, index) in enumerate(plan.by_seq())},
        )
