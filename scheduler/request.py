"""A request as the service sees it, and what it hears back. Frozen and picklable: no tensor, no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec.errors import ErrorType
from specdec.params import SamplingParams
from specdec.plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TextDecision:
    """What a text filter decided about a run of new tokens."""

    num_kept: int  # tokens committed: num_kept < offered only if a stop string ended the choice
    text: str  # text that became final with these tokens (may be "" or lag behind; see finish)
    token_texts: tuple[str, ...] = ()
    stopped: bool = False
    stop_reason: str | None = None  # the stop string that ended it


class TextFilterFactory(Protocol):
    """Makes the filter of one choice; ``index`` is the choice's index in the answer."""

    def __call__(self, request: EngineRequest, index: int) -> TextFilter: ...


class TextFilter(Protocol):
    """Incremental text and stop strings of one choice: decides what is committed. Supplied by server/."""

    def push(self, token_ids: Sequence[int], is_last: bool) -> TextDecision:
        """Offer tokens in order. ``is_last``: the step ended the choice (stop token or length), so flush held text."""


@dataclass(frozen=True, slots=True)
class ChoiceSpec:
    """One choice of a request: its parameters (its own seed among them)."""

    index: int  # prompt_index * n + j in the answer
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt with n choices. A prompt list becomes one EngineRequest per prompt (each as if sent alone)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[ChoiceSpec, ...]
    arrival_time: float  # time.monotonic() at arrival, before tokenizing
    priority: int = 0  # lower first
    cache_salt: str = ""
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: frozenset[int] = frozenset()  # special tokens that stay in the text all the same
    read_prefix_cache: bool = True  # False for echo with logprobs and prompt_logprobs
    prediction_token_ids: tuple[int, ...] = ()  # what the outputs should be like: a hint for drafters, no more


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Where the tokens of one step come from: drafts that were accepted first, then at most one of the target's own."""

    draft_token_ids: tuple[int, ...]  # that were verified
    num_accepted: int  # of the event's tokens
    drafter: str = ""  # whose drafts; empty without


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """New committed tokens of one choice, or its end, or its failure."""

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    token_texts: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # whole prompt but token 0, on the first event
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_reason: int | str | None = None
    error: str | None = None
    error_type: ErrorType = "server"  # with error: whose fault it is
    timing: ChoiceTiming | None = None  # with finish_reason
    trace: StepTrace | None = None  # of the step that the tokens are from, if it was asked for


@dataclass(frozen=True, slots=True)
class ChoiceTiming:
    """Of one finished choice; times are time.monotonic() seconds.

    What never happened (an abort came before, or there is no output token) has the time of the end.
    """

    arrival_time: float
    first_scheduled_time: float
    first_token_time: float
    last_token_time: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int = 0
    num_spec_steps: int = 0  # steps with at least one draft
    num_drafted: int = 0
    num_accepted: int = 0
    acceptance_histogram: tuple[int, ...] = ()  # [i]: spec steps that accepted i drafts; k + 1 entries
    num_accepted_prediction: int = 0  # predicted tokens that came as accepted drafts, see scheduler.prediction
    per_step_drafted: tuple[int, ...] = field(default=())
    per_step_accepted: tuple[int, ...] = field(default=())

    @property
    def queue_seconds(self) -> float:
        """From arrival until it was first scheduled."""
        return self.first_scheduled_time - self.arrival_time

    @property
    def seconds_to_first_token(self) -> float:
        """TTFT."""
        return self.first_token_time - self.arrival_time

    @property
    def decode_seconds(self) -> float:
        """From the first output token to the last."""
        return self.last_token_time - self.first_token_time

    @property
    def seconds_per_token(self) -> float | None:
        """TPOT: of each output token behind the first; None if there is none."""
        gaps = self.num_output_tokens - 1
        return self.decode_seconds / gaps if gaps > 0 else None
