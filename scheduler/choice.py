"""A request and its choices as the scheduler tracks them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum

from scheduler.audit import Trail
from scheduler.prediction import PredictionIndex, PredictionTally
from scheduler.request import ChoiceTiming, EngineRequest, TextFilter
from specdec.plan import SequenceOutput, TokenLogprobs
from specdec.sequence import Sequence


class ChoiceState(Enum):
    HELD = "held"  # waits for the first choice of its request to compute the prompt
    WAITING = "waiting"  # in the waiting queue, new or preempted; holds no blocks
    RUNNING = "running"  # has a seat and blocks
    FINISHED = "finished"  # its last event was made


class RequestGroup:
    """One request: its choices share the prompt's blocks, so one of them goes first.

    ``held`` are the choices that wait for that. The group is ready once any choice has computed the prompt;
    if the one that went first ends before that, the next goes first.
    """

    __slots__ = (
        "arrival",
        "choices",
        "held",
        "num_open",
        "prediction",
        "prompt_counted",
        "ready",
        "request",
        "started",
    )

    def __init__(self, request: EngineRequest, arrival: int) -> None:
        self.request = request
        self.arrival = arrival  # place in the order of arrival
        self.choices: list[Choice] = []
        self.held: list[Choice] = []
        self.num_open = 0  # unfinished choices
        self.ready = False
        self.started = False  # some choice has run
        self.prompt_counted = False
        self.prediction: PredictionIndex | None = None  # made with the first output, if the request has a prediction


class Choice:
    """One choice: the service's view (events, text, timing) of one sequence."""

    __slots__ = (
        "_accepted_histogram",
        "_per_step_accepted",
        "_per_step_drafted",
        "emitted_since_admission",
        "first_scheduled_time",
        "first_token_time",
        "group",
        "index",
        "last_drafted",
        "last_token_time",
        "max_drafts",
        "num_accepted",
        "num_cached_tokens",
        "num_committed",
        "num_drafted",
        "num_preemptions",
        "prediction",
        "prompt_logprobs",
        "rank",
        "sequence",
        "state",
        "text_filter",
        "trail",
    )

    def __init__(
        self, group: RequestGroup, index: int, sequence: Sequence, text_filter: TextFilter, max_drafts: int
    ) -> None:
        self.group = group
        self.index = index
        self.sequence = sequence
        self.text_filter = text_filter
        self.max_drafts = max_drafts  # k of this choice
        # Lower is better: a running choice can only be preempted for one of a better rank.
        self.rank = (group.request.priority, group.arrival, index)
        self.state = ChoiceState.HELD
        self.num_committed = 0  # output tokens the reader was told of
        self.num_preemptions = 0
        self.emitted_since_admission = False
        self.num_cached_tokens: int | None = None  # prefix hit of the first admission
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.last_drafted = max_drafts  # drafts that its latest step verified
        self.num_drafted = 0
        self.num_accepted = 0
        self._accepted_histogram = [0] * (max_drafts + 1)
        self._per_step_drafted: list[int] = []
        self._per_step_accepted: list[int] = []
        self.prediction: PredictionTally | None = None
        self.trail: Trail | None = None  # kept only for a choice that will be audited
        # Prompt tokens 1.., collected over the chunks; None: not asked for, or handed over already.
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if sequence.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * (sequence.num_prompt_tokens - 1)

    @property
    def may_read_prefix(self) -> bool:
        """Rows that a cached prefix would skip are needed while prompt logprobs are still being collected."""
        return self.group.request.read_prefix_cache and self.prompt_logprobs is None

    def add_prompt_logprobs(self, output: SequenceOutput) -> None:
        """Keep a chunk's entries by position: after a preemption the same ones come again."""
        if self.prompt_logprobs is None or not output.prompt_logprobs:
            return
        for i, entry in enumerate(output.prompt_logprobs, start=output.prompt_start - 1):
            self.prompt_logprobs[i] = entry

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """All of them, once. Raises ValueError if one is missing."""
        if self.prompt_logprobs is None:
            return None
        entries = tuple(entry for entry in self.prompt_logprobs if entry is not None)
        if len(entries) != len(self.prompt_logprobs):
            raise ValueError(f"{len(self.prompt_logprobs) - len(entries)} prompt logprobs are missing")
        self.prompt_logprobs = None
        return entries

    def count_tokens(self, num_tokens: int, now: float) -> float | None:
        """Note ``num_tokens`` >= 1 committed tokens; returns the gap to the ones before, None for the first."""
        gap = None if self.last_token_time is None else now - self.last_token_time
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now
        self.num_committed += num_tokens
        self.emitted_since_admission = True
        return gap

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Note a step that verified ``drafted`` >= 1 drafts."""
        self.num_drafted += drafted
        self.num_accepted += accepted
        self._accepted_histogram[min(accepted, self.max_drafts)] += 1
        self._per_step_drafted.append(drafted)
        self._per_step_accepted.append(accepted)

    def count_predicted(self, token_ids: Seq[int], accepted: int) -> None:
        """Note committed tokens of which the first ``accepted`` were drafts."""
        request = self.group.request
        if not request.prediction_token_ids:
            return
        if self.prediction is None:
            if self.group.prediction is None:
                self.group.prediction = PredictionIndex(request.prompt_token_ids[-1], request.prediction_token_ids)
            self.prediction = PredictionTally(self.group.prediction)
        self.prediction.take(token_ids, accepted)

    def timing(self, now: float) -> ChoiceTiming:
        """What never happened (it was aborted before) gets the time ``now``."""
        return ChoiceTiming(
            arrival_time=self.group.request.arrival_time,
            first_scheduled_time=now if self.first_scheduled_time is None else self.first_scheduled_time,
            first_token_time=now if self.first_token_time is None else self.first_token_time,
            last_token_time=now if self.last_token_time is None else self.last_token_time,
            num_prompt_tokens=self.sequence.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_output_tokens=self.num_committed,
            num_preemptions=self.num_preemptions,
            num_spec_steps=len(self._per_step_drafted),
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            acceptance_histogram=tuple(self._accepted_histogram),
            num_accepted_prediction=0 if self.prediction is None else self.prediction.num_accepted,
            per_step_drafted=tuple(self._per_step_drafted),
            per_step_accepted=tuple(self._per_step_accepted),
        )
