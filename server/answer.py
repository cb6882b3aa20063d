"""From the engine's events to the choices of a completion: the same pieces make a stream and a whole answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from scheduler.request import ChoiceEvent, ChoiceTiming
from server.detokenize import IncrementalText
from server.logprobs import LogprobsBuilder, prompt_logprobs
from server.resolve import ResolvedCompletion, ResolvedPrompt, Tokenizer
from server.schemas import CompletionRequest
from server.step_trace import traced_steps
from specdec.plan import TokenLogprobs


class Choice(Protocol):
    """One choice of an answer, whatever its endpoint."""

    num_tokens: int  # of its output, so far
    timing: ChoiceTiming | None  # once it has ended

    def take(self, event: ChoiceEvent, *, keep: bool = True) -> list[dict[str, Any]]:
        """The event as streamed choices. ``keep``: remember it for ``whole``."""

    def whole(self) -> dict[str, Any]:
        """All events taken so far, joined."""

    @property
    def mean_logprob(self) -> float:
        """Of the output tokens: what the best choices are chosen by, where more are computed than wanted."""


class ChoiceAnswer:
    """One choice. ``take`` turns an event into a piece of the answer; ``whole`` is all pieces as one."""

    def __init__(self, index: int, prompt: ResolvedPrompt, request: CompletionRequest, tokenizer: Tokenizer) -> None:
        self.index = index
        self.num_tokens = 0
        self.timing: ChoiceTiming | None = None
        self._prompt = prompt
        self._request = request
        self._tokenizer = tokenizer
        self._started = False
        self._logprobs = None if request.logprobs is None else LogprobsBuilder(tokenizer, request.logprobs)
        self._pieces: list[dict[str, Any]] = []
        self._logprob_sum = 0.0

    def take(self, event: ChoiceEvent, *, keep: bool = True) -> list[dict[str, Any]]:
        """The event as one streamed choice. ``keep``: remember it for ``whole``."""
        piece: dict[str, Any] = {
            "index": self.index,
            "text": event.text,
            "logprobs": None,
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
        }
        first, self._started = not self._started, True
        self.num_tokens += len(event.token_ids)
        self._logprob_sum += sum(entry.logprob for entry in event.logprobs or ())
        if self._logprobs is not None:
            piece["logprobs"] = self._logprobs_of(event, first)
        if self._request.return_token_ids:
            piece["token_ids"] = list(event.token_ids)
            if first:
                piece["prompt_token_ids"] = list(self._prompt.token_ids)
        if self._request.traced:
            piece["speculation"] = {"steps": traced_steps(event, self._tokenizer)}
        if first and self._request.echo:
            piece["text"] = self._prompt_text() + event.text
        if first and self._request.prompt_logprobs is not None:
            entries = event.prompt_logprobs or ()
            piece["prompt_logprobs"] = prompt_logprobs(entries, self._request.prompt_logprobs, self._tokenizer)
        if event.timing is not None:
            self.timing = event.timing
        if keep:
            self._pieces.append(piece)
        return [piece]

    def whole(self) -> dict[str, Any]:
        """Every piece taken so far, joined."""
        pieces = self._pieces
        whole = {**pieces[0], "text": "".join(piece["text"] for piece in pieces)}
        for name in ("finish_reason", "stop_reason"):
            whole[name] = pieces[-1][name]
        if whole["logprobs"] is not None:
            whole["logprobs"] = {
                name: [entry for piece in pieces for entry in piece["logprobs"][name]] for name in whole["logprobs"]
            }
        if "token_ids" in whole:
            whole["token_ids"] = [token_id for piece in pieces for token_id in piece["token_ids"]]
        if "speculation" in whole:
            whole["speculation"] = {"steps": [step for piece in pieces for step in piece["speculation"]["steps"]]}
        return whole

    @property
    def mean_logprob(self) -> float:
        """Of the output tokens: what best_of chooses by."""
        return self._logprob_sum / self.num_tokens if self.num_tokens else 0.0

    def _logprobs_of(self, event: ChoiceEvent, first: bool) -> dict[str, Any]:
        assert self._logprobs is not None
        token_ids = list(event.token_ids)
        texts = list(event.token_texts)
        entries: list[TokenLogprobs | None] = list(event.logprobs or ())
        if first and self._request.echo:
            token_ids = [*self._prompt.token_ids, *token_ids]
            texts = [*self._prompt_texts(), *texts]
            entries = [None, *(event.prompt_logprobs or ()), *entries]
        return self._logprobs.build(token_ids, texts, entries)

    def _prompt_text(self) -> str:
        if self._prompt.text is not None:
            return self._prompt.text
        return self._tokenizer.decode(self._prompt.token_ids, self._request.skip_special_tokens)

    def _prompt_texts(self) -> Iterable[str]:
        text = IncrementalText(self._tokenizer, self._request.skip_special_tokens)
        pieces = [text.push(token_id) for token_id in self._prompt.token_ids]
        pieces[-1] += text.flush()
        return pieces


def build_choices(
    resolved: ResolvedCompletion, request: CompletionRequest, tokenizer: Tokenizer
) -> dict[int, ChoiceAnswer]:
    """By the index that the engine uses: ``prompt_index * num_sampled + j``."""
    return {
        spec.index: ChoiceAnswer(spec.index, prompt, request, tokenizer)
        for prompt, engine_request in zip(resolved.prompts, resolved.engine_requests, strict=True)
        for spec in engine_request.choices
    }


def choose_best(choices: Mapping[int, Choice], num_sampled: int, n: int) -> list[dict[str, Any]]:
    """The ``n`` choices of each prompt with the best mean logprob, best first, with the answer's indices."""
    best: list[dict[str, Any]] = []
    for start in range(0, len(choices), num_sampled):
        group = [choices[start + j] for j in range(num_sampled)]
        if num_sampled > n:
            group.sort(key=lambda choice: -choice.mean_logprob)
        for choice in group[:n]:
            best.append({**choice.whole(), "index": len(best)})
    return best


def usage(resolved: ResolvedCompletion, choices: Mapping[int, Choice]) -> dict[str, Any]:
    """Each prompt counts once; every computed output token counts, also those of choices that best_of left out.

    A prediction counts for each choice that has ended, and in no other number.
    """
    prompt_tokens = sum(len(prompt.token_ids) for prompt in resolved.prompts)
    completion_tokens = sum(choice.num_tokens for choice in choices.values())
    cached = 0
    for start in range(0, len(choices), resolved.num_sampled):
        timings = [choices[start + j].timing for j in range(resolved.num_sampled)]
        # Later choices share the blocks of the first one: what that one had not is not cached.
        cached += min((timing.num_cached_tokens for timing in timings if timing is not None), default=0)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if resolved.num_predicted is not None:
        ended = [choice.timing for choice in choices.values() if choice.timing is not None]
        accepted = sum(timing.num_accepted_prediction for timing in ended)
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": len(ended) * resolved.num_predicted - accepted,
        }
    return counts


def request_metrics(choices: Mapping[int, Choice], per_step: bool = False) -> dict[str, Any] | None:
    """The ``metrics`` object; null for several choices. ``per_step``: with the numbers of every speculative step."""
    if len(choices) != 1:
        return None
    timing = next(iter(choices.values())).timing
    if timing is None:
        return None
    per_token = timing.seconds_per_token
    generation = timing.last_token_time - timing.arrival_time
    return {
        "time_to_first_token_ms": _ms(timing.seconds_to_first_token),
        "generation_time_ms": _ms(generation),
        "queue_time_ms": _ms(timing.queue_seconds),
        "mean_itl_ms": None if per_token is None else _ms(per_token),
        "tokens_per_second": round(timing.num_output_tokens / generation, 3) if generation > 0 else None,
        "speculative_decoding": _speculation(timing, per_step),
    }


def _speculation(timing: ChoiceTiming, per_step: bool) -> dict[str, Any] | None:
    num_spec_tokens = len(timing.acceptance_histogram) - 1
    if num_spec_tokens < 1:
        return None  # off for this request
    steps, accepted, drafted = timing.num_spec_steps, timing.num_accepted, timing.num_drafted
    return {
        # Numbers also where nothing was drafted: AIPerf drops a report with a null here.
        "mean_acceptance_length": round(1 + accepted / steps, 6) if steps else 1.0,
        "draft_acceptance_rate": round(accepted / drafted, 6) if drafted else 0.0,
        "acceptance_histogram": list(timing.acceptance_histogram),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_spec_tokens,
        "per_step_accepted": list(timing.per_step_accepted) if per_step else None,
        "per_step_drafted": list(timing.per_step_drafted) if per_step else None,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
