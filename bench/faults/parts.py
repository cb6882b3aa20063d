"""The server's own parts with the places of faults in front of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, cast

from torch import Tensor

from bench.faults.faults import Faults, InjectedFault
from kvcache.manager import KVCacheManager
from kvcache.table import BlockTable
from model.batch import PackedBatch
from model.interface import Executor, ForwardOutput, ReducedHead
from model.tokenizer import Tokenizer
from model.wrapped import WrappedExecutor
from scheduler.request import EngineRequest, TextDecision, TextFilter, TextFilterFactory
from server.parts import Parts
from server.worker import WorkerProcess
from specdec.constraint import TokenConstraint
from specdec.drafters.base import CostlyDrafter, Drafter, DraftRequest
from specdec.drafters.scored import ScoredDraft, ScoringDrafter
from specdec.params import SamplingParams
from specdec.pipeline import Mask, Row
from specdec.sampling import RowJob, Sampler, SamplingState
from specdec.sequence import Sequence

CHILDREN = "bench.faults.children"


def faulty_parts(faults: Faults) -> Parts:
    """Parts that ask ``faults`` whenever they are passed."""

    class FaultySampler(Sampler):
        def sample_batch(self, logits: Tensor, jobs: Seq[RowJob]) -> dict[int, int]:
            if faults.anything:
                for job in jobs:
                    faults.pass_by("sample", (job.params.seed,))
            return super().sample_batch(logits, jobs)

        def sample_row(
            self, row: Row, params: SamplingParams, t: int, state: SamplingState | None = None, mask: Mask | None = None
        ) -> int:
            faults.pass_by("sample", (params.seed,))
            return super().sample_row(row, params, t, state, mask)

    class FaultyManager(KVCacheManager):
        def reserve(self, table: BlockTable, num_tokens: int) -> bool:
            faults.pass_by("allocate", _salt(table))
            return super().reserve(table, num_tokens)

        def commit(self, table: BlockTable, token_ids: Seq[int], num_tokens: int) -> None:
            faults.pass_by("commit", _salt(table))
            super().commit(table, token_ids, num_tokens)

    class FaultyWorker(WorkerProcess):
        """The fault happens in the child: it is asked for a function that suffers it."""

        def __init__(self, module: str, *, memory_bytes: int | None = None) -> None:
            self._point: Any = {"server.chat.render": "template"}.get(module, "compile")
            super().__init__(f"{CHILDREN}.{self._point}", memory_bytes=memory_bytes)

        async def call(self, function_name: str, *args: object, timeout: float) -> Any:  # noqa: ASYNC109 - as in the base
            armed = faults.take(self._point, _Text(args)) if function_name in ("render", "check") else None
            if armed is not None:
                function_name, args = "suffer", (armed.fault.action,)
            return await super().call(function_name, *args, timeout=timeout)

    return Parts(
        executor=lambda executor: FaultyExecutor(executor, faults),
        drafter=lambda drafter: _faulty_drafter(drafter, faults),
        sampler=FaultySampler,
        manager=FaultyManager,
        constraint=lambda constraint: FaultyConstraint(constraint, faults),
        text_filters=lambda factory: FaultyTextFilters(factory, faults),
        tokenizer=lambda tokenizer: cast(Tokenizer, FaultyTokenizer(tokenizer, faults)),
        worker=FaultyWorker,
    )


class _Text:
    """Arguments as something that a text may be in."""

    def __init__(self, args: object) -> None:
        self._text = repr(args)

    def __contains__(self, text: object) -> bool:
        return str(text) in self._text

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return len(self._text)


def _salt(table: BlockTable) -> tuple[str, ...]:
    """The table's salt, and what the client sent of it: the name of its key may be in front."""
    salt = table.salt.decode("utf-8", "replace")
    return (salt, salt.partition("/")[2])


class FaultyExecutor(WrappedExecutor):
    """In front of the target's forward."""

    def __init__(self, executor: Executor, faults: Faults) -> None:
        super().__init__(executor)
        self._faults = faults

    def forward(
        self,
        batch: PackedBatch,
        *,
        capture_layers: bool = False,
        num_layers: int | None = None,
        head: ReducedHead | None = None,
    ) -> ForwardOutput:
        if self._faults.anything:
            self._faults.pass_by("verify", frozenset(batch.input_ids.tolist()))
        return super().forward(batch, capture_layers=capture_layers, num_layers=num_layers, head=head)


class FaultyDrafter:
    """In front of a drafter's proposals: the first victim among the sequences counts."""

    def __init__(self, drafter: Drafter, faults: Faults) -> None:
        self._drafter = drafter
        self._faults = faults

    @property
    def name(self) -> str:
        return self._drafter.name

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        self._pass_by(requests)
        return self._drafter.propose(requests)

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        self._drafter.update(sequence, num_emitted)

    def release(self, seq_id: int) -> None:
        self._drafter.release(seq_id)

    def _pass_by(self, requests: Seq[DraftRequest]) -> None:
        if self._faults.anything:
            self._faults.pass_by("draft", {request.sequence.params.seed for request in requests})


class FaultyScoringDrafter(FaultyDrafter):
    _drafter: ScoringDrafter

    def propose_scored(self, requests: Seq[DraftRequest]) -> list[ScoredDraft]:
        self._pass_by(requests)
        return self._drafter.propose_scored(requests)


class FaultyCostlyDrafter(FaultyDrafter):
    _drafter: CostlyDrafter

    def round_seconds(self, rows: int) -> float:
        return self._drafter.round_seconds(rows)

    def num_missing(self, sequence: Sequence) -> int | None:
        return self._drafter.num_missing(sequence)


class FaultyScoringCostlyDrafter(FaultyScoringDrafter):
    def round_seconds(self, rows: int) -> float:
        assert isinstance(self._drafter, CostlyDrafter)
        return self._drafter.round_seconds(rows)

    def num_missing(self, sequence: Sequence) -> int | None:
        assert isinstance(self._drafter, CostlyDrafter)
        return self._drafter.num_missing(sequence)


def _faulty_drafter(drafter: Drafter, faults: Faults) -> Drafter:
    if isinstance(drafter, ScoringDrafter):
        kind = FaultyScoringCostlyDrafter if isinstance(drafter, CostlyDrafter) else FaultyScoringDrafter
        return kind(drafter, faults)
    return (FaultyCostlyDrafter if isinstance(drafter, CostlyDrafter) else FaultyDrafter)(drafter, faults)


class FaultyConstraint:
    """In front of a grammar's masks and of what it leaves of a draft."""

    def __init__(self, constraint: TokenConstraint, faults: Faults) -> None:
        self._constraint = constraint
        self._faults = faults

    def applies(self, sequence: Sequence) -> bool:
        return self._constraint.applies(sequence)

    def mask(self, sequence: Sequence, drafts: Seq[int]) -> Mask | None:
        self._faults.pass_by("grammar", (sequence.params.seed,))
        return self._constraint.mask(sequence, drafts)

    def num_allowed(self, sequence: Sequence, drafts: Seq[int]) -> int:
        self._faults.pass_by("grammar", (sequence.params.seed,))
        return self._constraint.num_allowed(sequence, drafts)

    def forced(self, sequence: Sequence, limit: int) -> list[int]:
        self._faults.pass_by("grammar", (sequence.params.seed,))
        return self._constraint.forced(sequence, limit)

    def release(self, seq_id: int) -> None:
        self._constraint.release(seq_id)


class FaultyTokenizer:
    """In front of what makes ids of a prompt's text."""

    def __init__(self, tokenizer: Tokenizer, faults: Faults) -> None:
        self._tokenizer = tokenizer
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_many(self, texts: Seq[str], add_special_tokens: bool = True) -> list[list[int]]:
        self._pass_by(texts)
        return self._tokenizer.encode_many(texts, add_special_tokens)

    def encode_ordinary(self, texts: Seq[str]) -> list[list[int]]:
        self._pass_by(texts)
        return self._tokenizer.encode_ordinary(texts)

    def _pass_by(self, texts: Seq[str]) -> None:
        if texts and self._faults.anything:
            self._faults.pass_by("tokenize", _Text(texts))


class FaultyTextFilters:
    """In front of each piece of text."""

    def __init__(self, factory: TextFilterFactory, faults: Faults) -> None:
        self._factory = factory
        self._faults = faults

    def __call__(self, request: EngineRequest, index: int) -> TextFilter:
        seed = next(spec.params.seed for spec in request.choices if spec.index == index)
        return _FaultyTextFilter(self._factory(request, index), seed, self._faults)


class _FaultyTextFilter:
    def __init__(self, inner: TextFilter, seed: int, faults: Faults) -> None:
        self._inner = inner
        self._marks = (seed,)
        self._faults = faults

    def push(self, token_ids: Seq[int], is_last: bool) -> TextDecision:
        self._faults.pass_by("detokenize", self._marks)
        return self._inner.push(token_ids, is_last)


__all__ = ["InjectedFault", "faulty_parts"]
