"""Builders for the decoding tests: a small real model on paged planes, a scripted drafter, and a mini engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kvcache.ledger import Ledger
from kvcache.manager import KVCacheManager
from kvcache.storage import KVStorage, PlaneSpec
from model.batch import PackedBatch
from model.exits import check_depth, head_ids
from model.interface import Executor, ForwardOutput, ModelInfo, ReducedHead
from specdec.constraint import TokenConstraint
from specdec.drafters.base import Drafter, DraftRequest
from specdec.logprobs import logsumexp
from specdec.noise import uniforms
from specdec.params import SamplingParams
from specdec.plan import PlanItem, SequenceOutput, StepPlan, StepResult, TokenLogprobs
from specdec.sampling import Sampler
from specdec.sequence import Sequence
from specdec.step import SpeculativeStep
from tests.specdec.laws import naive_law

VOCAB = 40
MAX_LEN = 128


class ToyExecutor:
    """A two-layer attention model with random weights, computed row by row in numpy on the paged planes.

    Row-invariant by construction: nothing is ever computed for two rows at once. ``logit_hook(logits, token_ids)``
    may change the logits of the row whose sequence reads ``token_ids`` (its own token last). It can stop early.
    """

    def __init__(
        self,
        vocab_size: int = VOCAB,
        *,
        seed: int = 0,
        layers: int = 2,
        width: int = 16,
        scale: float = 3.0,
        embedding_rows: int | None = None,
        max_model_len: int = MAX_LEN,
    ) -> None:
        rng = np.random.default_rng(seed)
        self._width = width

        def weight(*shape: int) -> np.ndarray:
            return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

        self._embedding = weight(vocab_size, width) * 4
        self._position = weight(max_model_len, width)
        self._layers = [{name: weight(width, width) for name in "qkvo"} for _ in range(layers)]
        self._head = weight(vocab_size, width) * np.float32(scale)
        self._storage: KVStorage | None = None
        self.logit_hook: Callable[[np.ndarray, list[int]], None] | None = None
        self.info = ModelInfo(
            name="toy",
            architecture="Toy",
            model_type="toy",
            dtype="float32",
            device="cpu",
            num_layers=layers,
            hidden_size=width,
            vocab_size=vocab_size,
            embedding_rows=vocab_size if embedding_rows is None else embedding_rows,
            max_model_len=max_model_len,
            eos_token_ids=(),
            weights_hash="",
        )
        self.kind = "generic/toy"
        names = [f"target.{layer}.{part}" for layer in range(layers) for part in "kv"]
        # The last plane remembers the token ids, for the hook.
        self.planes = (
            *(PlaneSpec(name, (width,), torch.float32) for name in names),
            PlaneSpec("ids", (1,), torch.int64),
        )

    def bind(self, storage: KVStorage) -> None:
        self._storage = storage

    def check_exit(self, num_layers: int) -> None:
        check_depth(num_layers, self.info)

    def reduce_head(self, token_ids: Seq[int]) -> ReducedHead:
        return ReducedHead(head_ids(token_ids, self.info.vocab_size), None)

    def forward(
        self,
        batch: PackedBatch,
        *,
        capture_layers: bool = False,
        num_layers: int | None = None,
        head: ReducedHead | None = None,
    ) -> ForwardOutput:
        assert self._storage is not None
        slots = batch.slot_mapping.numpy()
        positions = batch.positions.numpy()
        tables, starts = batch.block_tables.numpy(), batch.row_starts.numpy()
        context: list[np.ndarray] = []  # slots each row reads, its own last
        for s in range(batch.num_sequences):
            for row in range(starts[s], starts[s + 1]):
                where = np.arange(positions[row] + 1)
                context.append(tables[s, where // batch.block_size] * batch.block_size + where % batch.block_size)
        ids = self._storage.plane("ids").numpy()
        ids[slots, 0] = batch.input_ids.numpy()
        hidden = [
            self._embedding[token] + self._position[position]
            for token, position in zip(batch.input_ids.numpy(), positions, strict=True)
        ]
        for index, layer in enumerate(self._layers[:num_layers]):
            keys = self._storage.plane(f"target.{index}.k").numpy()
            values = self._storage.plane(f"target.{index}.v").numpy()
            normed = [h / np.sqrt(np.mean(h * h) + np.float32(1e-6)) for h in hidden]
            for row, h in enumerate(normed):
                keys[slots[row]] = layer["k"] @ h
                values[slots[row]] = layer["v"] @ h
            for row, h in enumerate(normed):
                query = layer["q"] @ h
                scores = keys[context[row]] @ query / np.float32(np.sqrt(self._width))
                weights = np.exp(scores - scores.max())
                mixed = (weights[:, None] * values[context[row]]).sum(axis=0) / weights.sum()
                hidden[row] = hidden[row] + layer["o"] @ mixed * 2
        logits = np.empty((len(batch.logits_rows), self.info.vocab_size), dtype=np.float32)
        for i, row in enumerate(batch.logits_rows.tolist()):
            h = hidden[row]
            logits[i] = self._head @ (h / np.sqrt(np.mean(h * h) + np.float32(1e-6)))
            if self.logit_hook is not None:
                self.logit_hook(logits[i], ids[context[row], 0].tolist())
        found = torch.from_numpy(logits)
        return ForwardOutput(found if head is None else found[:, head.token_ids])


class ScriptedDrafter:
    """Proposes what ``script(sequence, max_drafts)`` says and writes down what it hears."""

    def __init__(self, script: Callable[[Sequence, int], list[int]], name: str = "scripted") -> None:
        self.name = name
        self._script = script
        self.asked: list[tuple[int, int]] = []
        self.heard: list[tuple[int, tuple[int, ...]]] = []
        self.released: list[int] = []

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        self.asked.extend((request.sequence.seq_id, request.max_drafts) for request in requests)
        return [self._script(request.sequence, request.max_drafts) for request in requests]

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        self.heard.append((sequence.seq_id, tuple(sequence.tokens[len(sequence.tokens) - num_emitted :])))

    def release(self, seq_id: int) -> None:
        self.released.append(seq_id)


class NumpyKernels:
    """The kernels' contract in numpy, written without the sampler's own code where that is possible."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def argmax_rows(self, logits: torch.Tensor) -> torch.Tensor:
        self.calls.append(("argmax_rows", len(logits)))
        return torch.tensor([int(row.numpy().argmax()) if self._valid(row) else -1 for row in logits])

    def logsumexp_rows(self, logits: torch.Tensor) -> torch.Tensor:
        self.calls.append(("logsumexp_rows", len(logits)))
        return torch.tensor(
            [logsumexp(row.numpy()) if self._valid(row) else float("nan") for row in logits], dtype=torch.float64
        )

    def keyed_sample_rows(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        steps: torch.Tensor,
        *,
        min_p: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
    ) -> torch.Tensor:
        self.calls.append(("keyed_sample_rows", len(logits)))
        columns = (column.tolist() for column in (temperatures, seeds, steps, min_p, top_k, top_p))
        tokens = []
        for row, (temperature, seed, t, least, k, mass) in zip(logits, zip(*columns, strict=True), strict=True):
            if not self._valid(row):
                tokens.append(-1)
                continue
            params = SamplingParams(seed=seed % 2**64, temperature=temperature, min_p=least, top_k=k, top_p=mass)
            law = np.array(naive_law(row.tolist(), params, [0], 1))
            with np.errstate(divide="ignore"):
                times = -np.log(uniforms(params.seed, t, np.arange(len(law)))) / law
            tokens.append(int(times.argmin()))
        return torch.tensor(tokens)

    @staticmethod
    def _valid(row: torch.Tensor) -> bool:
        return bool(np.isfinite(row.numpy().max()))


@dataclass
class Result:
    """What a sequence has said so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    error: str | None = None
    accepted: list[int] = field(default_factory=list)  # per step that sampled


class Bench:
    """A mini engine: admits sequences, reserves blocks, runs steps, keeps the outputs.

    Checks integrity after each step. With ``poison`` all that is no KV of a known token is NaN before each step.
    """

    def __init__(
        self,
        executor: Executor | None = None,
        *,
        drafter: Drafter | None = None,
        k: int = 0,
        block_size: int = 4,
        num_blocks: int = 256,
        sampler: Sampler | None = None,
        constraint: TokenConstraint | None = None,
        max_model_len: int | None = None,
        poison: bool = False,
    ) -> None:
        self.executor: Executor = ToyExecutor() if executor is None else executor
        self.k = k
        self.ledger = Ledger(num_blocks, block_size)
        self.manager = KVCacheManager(num_blocks, block_size, observer=self.ledger)
        self.storage = KVStorage(self.executor.planes, num_blocks=num_blocks, block_size=block_size)
        self.executor.bind(self.storage)
        self.drafter = drafter
        self.poison = poison
        self._options: dict[str, Any] = {"sampler": sampler, "constraint": constraint, "max_model_len": max_model_len}
        self.step = self._new_step(drafter, default_k=k)
        self.sequences: dict[int, Sequence] = {}
        self.results: dict[int, Result] = {}
        self.steps: list[StepResult] = []
        if poison:
            self.poison_unowned()

    def draft_with(self, drafter: Drafter) -> None:
        """Take a drafter that could only be made on the storage; how much it drafts, the plan says alone."""
        self.step = self._new_step(drafter, default_k=None)

    def _new_step(self, drafter: Drafter | None, default_k: int | None) -> SpeculativeStep:
        return SpeculativeStep(
            self.executor,
            self.manager,
            self.storage,
            drafters={} if drafter is None else {drafter.name: drafter},
            default_drafter=None if drafter is None else drafter.name,
            default_k=default_k,
            ledger=self.ledger,
            **self._options,
        )

    @property
    def num_drafted(self) -> int:
        return sum(step.stats.num_drafted for step in self.steps)

    @property
    def num_accepted(self) -> int:
        return sum(step.stats.num_accepted for step in self.steps)

    def add(self, prompt: Seq[int], params: SamplingParams) -> int:
        seq_id = len(self.results)
        self.sequences[seq_id] = Sequence(seq_id, list(prompt), params, self.manager.new_table())
        self.results[seq_id] = Result()
        return seq_id

    def run_step(self, chunks: Mapping[int, int] | None = None, limits: Mapping[int, int] | None = None) -> StepResult:
        """One step of all running sequences, or of those in ``chunks`` (known tokens each, cut to what there is)."""
        items = []
        for seq_id, sequence in self.sequences.items():
            if chunks is not None and seq_id not in chunks:
                continue
            count = sequence.num_uncomputed
            if chunks is not None:
                count = min(count, chunks[seq_id])
            samples = count == sequence.num_uncomputed
            drafts = (self.k if limits is None else limits.get(seq_id, self.k)) if samples else 0
            assert self.manager.reserve(sequence.table, sequence.num_computed + count + drafts)
            items.append(PlanItem(sequence, count, drafts))
        result = self.step.run(StepPlan(tuple(items)))
        self.steps.append(result)
        for item, output in zip(items, result.outputs, strict=True):
            self._take(item.sequence, output)
        self.manager.check_integrity([sequence.table for sequence in self.sequences.values()])
        if self.poison:
            self.poison_unowned()
        return result

    def _take(self, sequence: Sequence, output: SequenceOutput) -> None:
        assert output.seq_id == sequence.seq_id
        result = self.results[sequence.seq_id]
        result.token_ids.extend(output.token_ids)
        assert sequence.output_token_ids == result.token_ids
        if output.logprobs is not None:
            result.logprobs.extend(output.logprobs)
        if output.prompt_logprobs is not None:
            result.prompt_logprobs.update(enumerate(output.prompt_logprobs, output.prompt_start))
        if output.token_ids:
            result.accepted.append(output.num_accepted)
        result.finish_reason, result.stop_token_id, result.error = (
            output.finish_reason,
            output.stop_token_id,
            output.error,
        )
        sequence.check_integrity()
        if output.finish_reason or output.error:
            self.drop(sequence.seq_id)

    def drop(self, seq_id: int) -> None:
        """The sequence ends here."""
        self.step.release(seq_id)
        self.manager.free(self.sequences.pop(seq_id).table)

    def preempt(self, seq_id: int) -> None:
        """Its blocks go back; it will compute everything again."""
        sequence = self.sequences[seq_id]
        self.step.release(seq_id)
        self.manager.free(sequence.table)
        sequence.num_computed = 0

    def run(self) -> dict[int, Result]:
        while self.sequences:
            self.run_step()
        return self.results

    def poison_unowned(self) -> None:
        """NaN in every slot but those that hold KV of a known token."""
        owned = torch.zeros((self.storage.num_blocks + 1) * self.storage.block_size, dtype=torch.bool)
        for sequence in self.sequences.values():
            for position in range(max(sequence.num_computed, sequence.table.num_committed_tokens)):
                owned[sequence.table.slot(position)] = True
        for name in self.storage.names:
            plane = self.storage.plane(name)
            if plane.is_floating_point():
                plane[~owned] = float("nan")


def outputs(prompts: Seq[Seq[int]], params: SamplingParams | Seq[SamplingParams], **bench: object) -> dict[int, Result]:
    """Run ``prompts`` together to their ends."""
    runner = Bench(**bench)  # type: ignore[arg-type]
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for prompt, own in zip(prompts, each, strict=True):
        runner.add(prompt, own)
    return runner.run()


def alone(prompt: Seq[int], params: SamplingParams, **bench: object) -> Result:
    """Run one prompt by itself, one token a step."""
    return outputs([prompt], replace(params, num_speculative_tokens=0), **bench)[0]


def prompts(count: int = 4, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Prompts of different lengths, with repetition in them."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        part = rng.integers(0, vocab, 2 + 3 * i % 7).tolist()
        found.append((part * 3)[: 1 + 5 * i])
    return found
