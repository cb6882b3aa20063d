"""A toy model and what else a scheduler needs to run, without a tensor.

The toy model's next token is a pure function of the tokens before it. Its "KV" of a position is a hash of all
tokens up to there, kept by slot, and every step checks that the slots it reads hold what they must: a block that
was shared, freed or overwritten wrongly fails the step.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence

from kvcache.manager import KVCacheManager
from kvcache.table import BlockTable
from scheduler.config import SchedulerConfig
from scheduler.pace import StepPace
from scheduler.request import ChoiceEvent, ChoiceSpec, EngineRequest, TextDecision
from scheduler.room import Reservation
from scheduler.scheduler import Scheduler
from specdec.params import SamplingParams
from specdec.plan import PlanItem, SequenceOutput, StepPlan, StepResult, StepStats, TokenLogprobs

VOCAB = 40
STOP_ID = 3


def next_token(tokens: Sequence[int], seed: int) -> int:
    """The toy target."""
    return zlib.crc32(bytes([seed % 251, *tokens])) % VOCAB


def token_text(token_id: int) -> str:
    return chr(ord("a") + token_id % 26)


def expected(request: EngineRequest, position: int) -> tuple[list[int], str, int | str | None]:
    """Tokens, finish reason and stop reason of choice ``position`` of ``request``, were it all alone."""
    params = request.choices[position].params
    tokens, out = list(request.prompt_token_ids), []
    while len(out) < params.max_tokens:
        out.append(next_token(tokens + out, params.seed))
        text = "".join(map(token_text, out))
        for stop in request.stop:
            if text.endswith(stop):
                return out, "stop", stop
        if out[-1] in params.stop_token_ids:
            return out, "stop", out[-1]
    return out, "length", None


class ToyFilter:
    """Stops behind the token that completes a stop string."""

    def __init__(self, request: EngineRequest, index: int) -> None:
        self.stop = request.stop
        self.text = ""
        self.ended = False

    def push(self, token_ids: Sequence[int], is_last: bool) -> TextDecision:
        assert not self.ended, "tokens after the end"
        self.ended = is_last
        start = len(self.text)
        for kept, token_id in enumerate(token_ids, start=1):
            self.text += token_text(token_id)
            for stop in self.stop:
                if self.text.endswith(stop):
                    self.ended = True
                    return TextDecision(kept, self.text[start:], stopped=True, stop_reason=stop)
        return TextDecision(len(token_ids), self.text[start:])


class ToyStep:
    """A step as the contract has it. Each draft is right with probability ``accept``; at 1 it drafts all it may."""

    intact = False

    def __init__(self, manager: KVCacheManager, *, accept: float = 0.6, seed: int = 0) -> None:
        self.manager = manager
        self.accept = accept
        self.random = random.Random(seed)
        self.kv: dict[int, int] = {}  # slot -> hash of the tokens up to its position
        self.known: set[int] = set()  # sequences it keeps state of
        self.fail_seq_ids: set[int] = set()
        self.wrong_drafts: set[int] = set()  # output indices at which a draft is accepted although it is wrong
        self.before_run: Callable[[StepPlan], None] = lambda plan: None

    def release(self, seq_id: int) -> None:
        self.known.discard(seq_id)

    def check(self) -> None:
        self.before_run(StepPlan(()))

    def run(self, plan: StepPlan) -> StepResult:
        self.before_run(plan)
        outputs = tuple(self.run_item(item) for item in plan.items)
        rows = sum(item.num_tokens + output.num_drafted for item, output in zip(plan.items, outputs, strict=True))
        return StepResult(
            outputs,
            StepStats(
                num_rows=rows,
                num_sequences=len(outputs),
                num_drafted=sum(output.num_drafted for output in outputs),
                num_accepted=sum(output.num_accepted for output in outputs),
                num_emitted=sum(len(output.token_ids) for output in outputs),
            ),
        )

    def run_item(self, item: PlanItem) -> SequenceOutput:
        sequence, samples = item.sequence, item.samples
        tokens, params, start = sequence.tokens, sequence.params, sequence.num_computed
        self.known.add(sequence.seq_id)
        if sequence.seq_id in self.fail_seq_ids:
            return SequenceOutput(sequence.seq_id, error="planted")
        known_end = start + item.num_tokens
        drafts: list[int] = []
        wanted = item.max_drafts
        if wanted and self.accept < 1.0:  # who may not draft does not disturb the dice of the others
            wanted = self.random.randint(0, wanted)
        for _ in range(wanted):
            right = next_token(tokens + drafts, params.seed)
            if sequence.num_output_tokens + len(drafts) in self.wrong_drafts:
                drafts.append((right + 1) % VOCAB)
                continue
            drafts.append(right if self.random.random() < self.accept else self.random.randrange(VOCAB))
        self.write(sequence.table, tokens[:known_end] + drafts, start)
        prompt_logprobs = None
        if params.prompt_logprobs is not None and start + 1 < sequence.num_prompt_tokens:
            stop = min(known_end + 1, sequence.num_prompt_tokens)
            prompt_logprobs = tuple(logprob(tokens[i]) for i in range(start + 1, stop))
        if not samples:
            sequence.num_computed = known_end
            self.manager.commit(sequence.table, tokens, known_end)
            return SequenceOutput(sequence.seq_id, prompt_logprobs=prompt_logprobs, prompt_start=start + 1)
        emitted: list[int] = []
        finish_reason, stop_token_id = ("length", None) if params.max_tokens == 0 else (None, None)
        accepted = 0
        for draft in [*drafts, None]:
            if finish_reason is not None:
                break
            emitted.append(next_token(tokens + emitted, params.seed))
            if draft is not None and sequence.num_output_tokens + len(emitted) - 1 in self.wrong_drafts:
                emitted[-1] = draft
            accepted += emitted[-1] == draft
            if emitted[-1] in params.stop_token_ids:
                finish_reason, stop_token_id = "stop", emitted[-1]
            elif sequence.num_output_tokens + len(emitted) == params.max_tokens:
                finish_reason = "length"
            if emitted[-1] != draft:
                break
        tokens.extend(emitted)
        sequence.num_computed = len(tokens) - 1 if emitted else known_end - 1
        self.manager.commit(sequence.table, tokens, max(known_end, sequence.num_computed))
        trimmed = self.manager.truncate(sequence.table, len(tokens))
        return SequenceOutput(
            sequence.seq_id,
            token_ids=tuple(emitted),
            logprobs=None if params.logprobs is None else tuple(map(logprob, emitted)),
            prompt_logprobs=prompt_logprobs,
            prompt_start=start + 1,
            num_drafted=len(drafts),
            num_accepted=accepted,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            blocks_trimmed=trimmed,
        )

    def write(self, table: BlockTable, tokens: list[int], start: int) -> None:
        """Check what lies before ``start``, write from there on."""
        content = 0
        for position, token_id in enumerate(tokens):
            content = hash((content, token_id))
            slot = table.slot(position)
            if position < start:
                assert self.kv.get(slot) == content, f"slot {slot} does not hold position {position}"
            else:
                assert position >= table.num_committed_tokens, f"position {position} is committed, and written again"
                self.kv[slot] = content


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -float(token_id), 1, ())


def build_request(
    request_id: str = "r",
    prompt: Sequence[int] = (1, 2, 4, 5, 6),
    *,
    n: int = 1,
    max_tokens: int = 8,
    stop_token_ids: frozenset[int] = frozenset(),
    priority: int = 0,
    stop: tuple[str, ...] = (),
    salt: str = "",
    read_prefix_cache: bool = True,
    num_speculative_tokens: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    arrival_time: float = 0.0,
    seed: int = 1,
) -> EngineRequest:
    choices = tuple(
        ChoiceSpec(
            index=j,
            params=SamplingParams(
                seed=seed + j,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                num_speculative_tokens=num_speculative_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            ),
        )
        for j in range(n)
    )
    return EngineRequest(
        request_id,
        tuple(prompt),
        choices,
        arrival_time=arrival_time,
        priority=priority,
        cache_salt=salt,
        stop=stop,
        read_prefix_cache=read_prefix_cache,
    )


class Bench:
    """A scheduler with its manager and toy step, and what the reader of each choice has got."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        prefix_cache: bool = True,
        accept: float = 0.6,
        seed: int = 0,
        config: SchedulerConfig | None = None,
        num_private_blocks: int = 0,
        pace: StepPace | None = None,
    ) -> None:
        self.manager = KVCacheManager(
            num_blocks, block_size, enable_prefix_cache=prefix_cache, num_private_blocks=num_private_blocks
        )
        self.config = config or SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
        self.time = 0.0
        self.scheduler = Scheduler(self.manager, self.config, ToyFilter, clock=self.tick, pace=pace)
        self.step = ToyStep(self.manager, accept=accept, seed=seed)
        self.requests: dict[str, EngineRequest] = {}
        self.got: dict[tuple[str, int], list[ChoiceEvent]] = {}

    def tick(self) -> float:
        self.time += 1.0
        return self.time

    def add(self, request: EngineRequest, reservation: Reservation | None = None) -> None:
        self.scheduler.add(request, reservation)
        self.requests[request.request_id] = request
        for spec in request.choices:
            self.got[request.request_id, spec.index] = []

    def queued_prompts(self) -> list[int]:
        """Prompt lengths of the requests of which no choice has run."""
        return [
            len(group.request.prompt_token_ids)
            for group in self.scheduler._roster.groups.values()
            if all(choice.first_scheduled_time is None for choice in group.choices)
        ]

    def abort(self, request_id: str) -> None:
        self.take(self.scheduler.abort(request_id))

    def take(self, events: Sequence[ChoiceEvent]) -> None:
        for event in events:
            earlier = self.got[event.request_id, event.index]
            assert not earlier or earlier[-1].finish_reason is None, "an event after the last one"
            earlier.append(event)

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            check_plan(plan, self.config)
        return plan

    def run_and_apply(self, plan: StepPlan) -> None:
        for seq_id in self.scheduler.take_released():
            self.step.release(seq_id)
        self.take(self.scheduler.apply(plan, self.step.run(plan)))

    def run_step(self) -> StepPlan | None:
        plan = self.schedule()
        if plan is not None:
            self.run_and_apply(plan)
        self.scheduler.check_integrity()
        return plan

    def drain(self, max_steps: int = 1000) -> int:
        """Steps until there is no work left."""
        for steps in range(max_steps):
            if not self.scheduler.has_work:
                return steps
            self.run_step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def token_ids(self, request_id: str, index: int = 0) -> list[int]:
        return [token_id for event in self.got[request_id, index] for token_id in event.token_ids]

    def finish(self, request_id: str, index: int = 0) -> ChoiceEvent:
        """The last event. Raises AssertionError if the choice is still open."""
        events = self.got[request_id, index]
        assert events, (request_id, index, "has no event")
        assert events[-1].finish_reason is not None, (request_id, index, "is open")
        return events[-1]

    def check_output(self, request_id: str) -> None:
        """Every choice got what it would have got alone."""
        request = self.requests[request_id]
        for position, spec in enumerate(request.choices):
            tokens, finish_reason, stop_reason = expected(request, position)
            last = self.finish(request_id, spec.index)
            assert self.token_ids(request_id, spec.index) == tokens
            assert (last.finish_reason, last.stop_reason) == (finish_reason, stop_reason)
            text = "".join(event.text for event in self.got[request_id, spec.index])
            assert text == "".join(map(token_text, tokens))
            assert last.timing is not None
            assert last.timing.num_output_tokens == len(tokens)

    def check_all_free(self) -> None:
        stats = self.manager.stats()
        assert stats.used_blocks == 0
        assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
        assert self.manager.num_private_used == 0


def live_items(plan: StepPlan) -> list[PlanItem]:
    """Without the audits."""
    return [item for item in plan.items if not item.sequence.table.private]


def check_plan(plan: StepPlan, config: SchedulerConfig) -> None:
    """The limits hold and every row has its slot. Audits have no seat, but are in the token budget."""
    assert plan.items
    assert len(live_items(plan)) <= config.max_num_seqs
    assert len({item.sequence.seq_id for item in plan.items}) == len(plan.items)
    assert sum(item.num_tokens + item.max_drafts for item in plan.items) <= config.max_num_batched_tokens
    for item in plan.items:
        sequence = item.sequence
        assert item.num_tokens >= 1
        assert 0 <= item.max_drafts <= config.num_speculative_tokens
        assert item.samples or item.max_drafts == 0
        assert sequence.num_computed + item.num_tokens <= len(sequence.tokens)
        assert sequence.table.num_slots >= sequence.num_computed + item.num_tokens + item.max_drafts
        assert item.max_drafts <= max(0, sequence.params.max_tokens - sequence.num_output_tokens - 1)


class LinearCost:
    """Seconds of a step: a millisecond for each row behind ten. Keeps what it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def seconds(self, rows: int) -> float:
        return (10 + rows) / 1000

    def observe(self, rows: int, seconds: float) -> None:
        self.seen.append((rows, seconds))


def config(**changes: int | bool | None) -> SchedulerConfig:
    values: dict[str, int | bool | None] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "num_speculative_tokens": 4,
    }
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def seq_ids(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [item.sequence.seq_id for item in plan.items]


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 40 for i in range(length)]
