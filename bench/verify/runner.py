"""Running a case and judging it: every request's answer against its plain answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from bench.offline import Completion, OfflineConfig, OfflineEngine, Submission, in_order
from bench.verify.capture import Moment, Row, capture
from bench.verify.cases import Case, CasePlan, answers_by_seq, plan_case
from bench.verify.compare import Difference, first_difference, near_tie, tie_tolerance
from bench.verify.drafters import make_case_drafter
from bench.verify.plain import PlainAnswers, shortened
from bench.verify.pool import Cell, RequestPool
from model.loader import LoadedModel
from specdec.drafters.base import Drafter

_DRAFT_SEED = 5


@dataclass(frozen=True, slots=True)
class Failure:
    """The first difference of a case, with both sides."""

    request: int  # index of the submission
    cell: Cell
    warm_up: bool  # in the run that fills the cache
    difference: Difference
    expected: Completion
    got: Completion
    expected_moment: Moment | None  # from running both sides once more; None: that token was not emitted
    got_moment: Moment | None
    note: str | None  # what the second run showed otherwise
    request_of: Mapping[int, int]  # index of the submission by seq_id


@dataclass(frozen=True, slots=True)
class CaseResult:
    requests: int = 0
    positions: int = 0  # compared and equal, up to the first difference
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
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

    index: int
    warm_up: bool
    seq_id: int
    submission: Submission
    expected: Completion
    got: Completion


class CaseRunner:
    """Runs cases on one model. ``exact``: bit for bit (L0), else with the near-tie rule."""

    def __init__(self, model: LoadedModel, pool: RequestPool, plain: PlainAnswers, *, exact: bool) -> None:
        self._model = model
        self._pool = pool
        self._plain = plain
        self._exact = exact
        self._vocab_size = min(model.info.vocab_size, model.info.embedding_rows)

    def run(self, case: Case) -> CaseResult:
        """Run and judge ``case``; its plain answers must be known. Only what the machine does to us is raised."""
        started = time.perf_counter()
        threads = torch.get_num_threads()
        torch.set_num_threads(int(case.values["threads"]))
        try:
            result = self._run(case, plan_case(case, self._pool))
        except Exception as error:  # whatever the engine raises is the case's finding
            result = CaseResult(error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
        finally:
            torch.set_num_threads(threads)
        return dataclasses.replace(result, seconds=time.perf_counter() - started)

    def _run(self, case: Case, plan: CasePlan) -> CaseResult:
        engine = OfflineEngine(
            self._model.executor, self._config(plan), num_blocks=plan.num_blocks, drafter=self._drafter(case, plan)
        )
        answers: list[list[Completion]] = [engine.run(run) if run else [] for run in (plan.warm_up, plan.submissions)]
        result = CaseResult(
            requests=plan.num_compared,
            drafted=sum(step.num_drafted for step in engine.steps),
            accepted=sum(step.num_accepted for step in engine.steps),
            preemptions=engine.num_preemptions,
        )
        result = self._judge(case, plan, list(self._answered(plan, answers)), result)
        return dataclasses.replace(result, problem=self._problem(case, engine, result))

    def _problem(self, case: Case, engine: OfflineEngine, result: CaseResult) -> str | None:
        """What is wrong although every answer is right."""
        try:
            engine.check_clean()
        except AssertionError as error:
            return f"something was left behind: {' '.join(str(error).split()) or 'blocks or sequences'}"[:500]
        if engine.step.num_drafter_failures:
            return f"the drafter failed {engine.step.num_drafter_failures} times"
        if case.values["drafter"] == "perfect" and self._exact and result.accepted != result.drafted:
            return f"of {result.drafted} drafts from the known answers only {result.accepted} were accepted"
        return None

    def _config(self, plan: CasePlan) -> OfflineConfig:
        # The sampler's kernels and the ledger are the run's, not the case's.
        return dataclasses.replace(plan.config, kernels=self._plain.config.kernels, ledger=self._plain.config.ledger)

    def _drafter(self, case: Case, plan: CasePlan) -> Drafter:
        known = answers_by_seq(plan, self._plain.token_ids())
        return make_case_drafter(case.values["drafter"], self._vocab_size, known, _DRAFT_SEED)

    def _answered(self, plan: CasePlan, answers: list[list[Completion]]) -> Iterator[_Answered]:
        needs = plan.needs
        first_id = 0
        for run, submissions in enumerate((plan.warm_up, plan.submissions)):
            for place, index in enumerate(in_order(submissions)):
                if index < plan.num_compared:
                    submission = submissions[index]
                    expected = self._plain.answer(plan.cells[index], needs[plan.cells[index]])
                    yield _Answered(
                        index=index,
                        warm_up=run == 0,
                        seq_id=first_id + place,
                        submission=submission,
                        expected=shortened(expected, submission.params.max_tokens),
                        got=answers[run][index],
                    )
            first_id += len(submissions)

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
            drafter=None,
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
            [plan.warm_up, plan.submissions],
            num_blocks=plan.num_blocks,
            drafter=self._drafter(case, plan),
            seq_id=one.seq_id,
            output_index=min(at, len(one.got.token_ids) - 1),
        )
        expected_moment, again = self._plain_again(one.submission, min(at, len(one.expected.token_ids) - 1))
        note = None
        if again != one.expected:
            note = "plain decoding gave another answer the second time"
        elif answers[0 if one.warm_up else 1][one.index] != one.got:
            note = "the case gave another answer the second time"
        return Failure(
            request=one.index,
            cell=plan.cells[one.index],
            warm_up=one.warm_up,
            difference=difference,
            expected=one.expected,
            got=one.got,
            expected_moment=expected_moment,
            got_moment=got_moment,
            note=note,
            request_of=_requests_by_seq(plan),
        )


def _requests_by_seq(plan: CasePlan) -> dict[int, int]:
    order = [index for run in (plan.warm_up, plan.submissions) for index in in_order(run)]
    return dict(enumerate(order))
