"""An attention backend whose K and V say who they are: what was really read is decoded from what it puts out.

Each slot holds the tag (sequence, position, token) of the row that wrote it: as integers in a plane of their own, and
in the K and V planes. K is the position in bits of +-1 and V is the tag in limbs that bf16 holds exactly, so a query
made of the bits of position j picks one slot with weight 1, and the attention's output is the tag found there::

    query bits(j) --> softmax over the context --> V of the slot whose K says j --> (sequence, position, token)

Real attention code does the reading and, where it can, the writing. The next token is a function of what was read, so
a wrong read changes the answers too.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bench.offline import OfflineConfig, OfflineEngine
from kvcache.storage import KVStorage, PlaneSpec
from model.attention import AttentionTile, paged_attention, tile_sequences
from model.batch import PackedBatch
from model.generic import TILE_CLASSES, plan_tiles
from model.interface import ForwardOutput, ModelInfo
from model.kernels import Kernels
from specdec.drafters.base import DraftRequest
from specdec.plan import StepPlan, StepResult
from specdec.sequence import Sequence

VOCAB = 300  # more than a limb holds
KV_HEADS, GROUP, DIM = 2, 8, 16
HEADS = KV_HEADS * GROUP
BITS, LIMB = 12, 128


def next_token(tokens: Seq[int], window: int | None = None) -> int:
    """The target's token behind ``tokens``, of which it sees the last ``window``."""
    seen = tokens if window is None else tokens[max(0, len(tokens) - window) :]
    return zlib.crc32(np.array(seen, dtype=np.int32).tobytes()) % VOCAB


def position_bits(positions: Tensor) -> Tensor:
    """``[n]`` -> ``[n, DIM]``: +-1 for each bit, zeros behind."""
    bits = (positions[:, None] >> torch.arange(BITS)) & 1
    return torch.nn.functional.pad(2.0 * bits - 1.0, (0, DIM - BITS))


def limbs(tags: Tensor) -> Tensor:
    """``[n, 3]`` -> ``[n, DIM]``: low and high limb of each number."""
    parts = torch.stack([tags % LIMB, tags // LIMB], dim=-1).view(len(tags), 6)
    return torch.nn.functional.pad(parts.float(), (0, DIM - 6))


@dataclass
class Memory:
    """The planes of one storage."""

    keys: Tensor  # [slots, KV_HEADS, DIM]
    values: Tensor  # [slots, KV_HEADS, DIM]
    tags: Tensor  # [slots, 3] int64


class Backend(Protocol):
    dtype: torch.dtype

    def run(self, memory: Memory, batch: PackedBatch, tags: Tensor, window: int | None) -> list[np.ndarray]:
        """Write the rows' ``tags`` ``[T, 3]``, then read: for each row the tags ``[n, 3]`` that it sees, in order."""


class Plain:
    """Integers only, read through the batch's block tables; for tests that need many steps."""

    dtype = torch.float32

    def run(self, memory: Memory, batch: PackedBatch, tags: Tensor, window: int | None) -> list[np.ndarray]:
        memory.tags[batch.slot_mapping] = tags
        found = []
        for s in range(batch.num_sequences):
            for row in range(int(batch.row_starts[s]), int(batch.row_starts[s + 1])):
                where = torch.arange(int(batch.positions[row]) + 1)[0 if window is None else -window :]
                slots = batch.block_tables[s, where // batch.block_size] * batch.block_size + where % batch.block_size
                found.append(memory.tags[slots].numpy())
        return found


class Torch:
    """model.attention, in tiles as both executors on torch run it: its integers, and what its output says."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype

    def run(self, memory: Memory, batch: PackedBatch, tags: Tensor, window: int | None) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for first, count, size in plan_tiles(batch.num_rows, TILE_CLASSES):
            rows = slice(first, first + count)
            slots, own = batch.slot_mapping[rows], tags[rows]
            memory.keys.index_copy_(0, slots, _heads(position_bits(own[:, 1]), self.dtype))
            memory.values.index_copy_(0, slots, _heads(limbs(own), self.dtype))
            memory.tags.index_copy_(0, slots, own)
            tile = AttentionTile(
                size, tile_sequences(batch, first, first + count), batch.block_size, torch.device("cpu"), TILE_CLASSES
            )

            def attend(query: Tensor, tile: AttentionTile = tile, rows: slice = rows, size: int = size) -> Tensor:
                padded = torch.zeros((size, HEADS, DIM), dtype=self.dtype)
                padded[: len(query)] = query
                return paged_attention(padded, memory.keys, memory.values, tile, scaling=1.0, window=window)[
                    : len(query)
                ]

            decoded = decode(attend, batch.positions[rows], window, self.dtype)
            integers = [_indexed(memory.tags, tile, window, row) for row in range(count)]
            for by_output, by_index in zip(decoded, integers, strict=True):
                np.testing.assert_array_equal(by_output, by_index)
            found += integers
        return found


def _indexed(tags: Tensor, tile: AttentionTile, window: int | None, row: int) -> np.ndarray:
    """The tags in the slots that the attention of ``row`` sees."""
    (part,) = [p for p in tile.parts(window) if p.first + p.own.start <= row < p.first + p.own.stop]
    seen = [
        tags[chunk.slots] if chunk.hidden is None else tags[chunk.slots][~chunk.hidden[0, row - part.first, 0]]
        for chunk in part.chunks
    ]
    return torch.cat(seen).numpy()


class Compiled:
    """The CPU kernels: they write (rope without a turn) and read."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype, threads: int = 2) -> None:
        self.kernels = kernels
        self.dtype = dtype
        self.threads = threads

    def run(self, memory: Memory, batch: PackedBatch, tags: Tensor, window: int | None) -> list[np.ndarray]:
        keys, values = _heads(position_bits(tags[:, 1]), torch.float32), _heads(limbs(tags), torch.float32)
        qkv = torch.cat([torch.zeros_like(keys), keys, values], dim=1).reshape(len(tags), -1)
        turns = int(batch.positions.max()) + 1, DIM // 2
        self.kernels.rope_write(
            qkv,
            memory.keys,
            memory.values,
            batch.positions,
            batch.slot_mapping,
            torch.ones(turns),
            torch.zeros(turns),
        )

        def attend(query: Tensor) -> Tensor:
            return self.kernels.paged_attention(
                query,
                memory.keys,
                memory.values,
                batch.positions,
                batch.row_starts,
                batch.block_tables,
                block_size=batch.block_size,
                scale=1.0,
                window=window or 0,
                threads=self.threads,
            )

        return decode(attend, batch.positions, window, self.dtype)


def _heads(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows[:, None, :].expand(-1, KV_HEADS, -1).to(dtype).contiguous()


def decode(attend: object, positions: Tensor, window: int | None, dtype: torch.dtype) -> list[np.ndarray]:
    """Ask for every position up to one behind the newest row; for each row the tags it sees, in order.

    Raises AssertionError if a row's answer for a position that it must not see is that position all the same.
    """
    reach = int(positions.max()) + 2
    answers = torch.empty((len(positions), reach, 3), dtype=torch.int64)
    clean = torch.empty((len(positions), reach), dtype=torch.bool)
    for base in range(0, reach, HEADS):
        asked = torch.arange(base, base + HEADS)
        query = (64 * position_bits(asked)).to(dtype).expand(len(positions), -1, -1).contiguous()
        out = attend(query).float()  # type: ignore[operator]
        numbers = out[..., :6].round()
        parts = numbers.long().view(*numbers.shape[:2], 3, 2)
        stop = min(HEADS, reach - base)
        answers[:, base : base + stop] = (parts[..., 0] + parts[..., 1] * LIMB)[:, :stop]
        clean[:, base : base + stop] = (out[..., :6] == numbers).all(-1)[:, :stop]
    found = []
    for row, position in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, position - window + 1)
        assert clean[row, first : position + 1].all(), (row, position, "a mixture of slots")
        for outside in {position + 1, first - 1} - {-1}:
            assert answers[row, outside, 1] != outside or not clean[row, outside], (row, position, outside)
        found.append(answers[row, first : position + 1].numpy())
    return found


class TagExecutor:
    """Implements model.interface.Executor. ``order`` names the sequences of the batch that comes next."""

    def __init__(self, backend: Backend, *, window: int | None = None, max_model_len: int = 400) -> None:
        self.backend = backend
        self.window = window
        self.order: list[int] = []
        self.reads: list[np.ndarray] = []  # of the last forward, by row
        self.kind = "generic/tags"
        self.info = ModelInfo(
            name="tags",
            architecture="Tags",
            model_type="tags",
            dtype="bfloat16" if backend.dtype == torch.bfloat16 else "float32",
            device="cpu",
            num_layers=1,
            hidden_size=DIM,
            vocab_size=VOCAB,
            embedding_rows=VOCAB,
            max_model_len=max_model_len,
            eos_token_ids=(),
            weights_hash="",
        )
        shape = (KV_HEADS, DIM)
        self.planes = (
            PlaneSpec("target.0.k", shape, backend.dtype),
            PlaneSpec("target.0.v", shape, backend.dtype),
            PlaneSpec("tags", (3,), torch.int64),
        )

    def bind(self, storage: KVStorage) -> None:
        self._memory = Memory(*(storage.plane(spec.name) for spec in self.planes))
        self._memory.keys.fill_(float("nan"))
        self._memory.values.fill_(float("nan"))
        self._memory.tags.fill_(-1)

    def forward(self, batch: PackedBatch, *, capture_layers: bool = False) -> ForwardOutput:
        counts = torch.diff(batch.row_starts).long()
        writers = torch.tensor(self.order).repeat_interleave(counts)
        tags = torch.stack([writers, batch.positions, batch.input_ids], dim=1)
        self.reads = self.backend.run(self._memory, batch, tags, self.window)
        logits = torch.zeros((len(batch.logits_rows), VOCAB))
        for i, row in enumerate(batch.logits_rows.tolist()):
            logits[i, next_token(self.reads[row][:, 2].tolist())] = 9.0
        return ForwardOutput(logits)


class PatternDrafter:
    """Drafts as many as it may, right and wrong in turn through all patterns of that length."""

    name = "patterns"

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.drafts: dict[int, list[int]] = {}  # of the step that runs
        self.patterns: set[tuple[bool, ...]] = set()
        self._turns: dict[int, itertools.cycle[tuple[bool, ...]]] = {}

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> list[int]:
        k = request.max_drafts
        if k not in self._turns:
            everything, *others = itertools.product((True, False), repeat=k)
            random.Random(k).shuffle(others)
            self._turns[k] = itertools.cycle([everything, *others])
        pattern = next(self._turns[k])
        self.patterns.add(pattern)
        tokens = list(request.sequence.tokens)
        for right in pattern:
            tokens.append((next_token(tokens, self.window) + (not right)) % VOCAB)
        self.drafts[request.sequence.seq_id] = tokens[len(request.sequence.tokens) :]
        return self.drafts[request.sequence.seq_id]

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass


class TagEngine(OfflineEngine):
    """Compares what each row read with the tokens of its sequence, position by position."""

    def __init__(self, executor: TagExecutor, config: OfflineConfig, *, num_blocks: int) -> None:
        self.tags = executor
        self.patterns = PatternDrafter(executor.window)
        self.compared = 0  # tags
        self.foreign = 0  # tags of other sequences, from prefix hits
        self.accepted: set[int] = set()
        self._seen: dict[int, tuple[int, int]] = {}  # num_computed when a sequence was admitted, and now
        super().__init__(executor, config, num_blocks=num_blocks, drafter=self.patterns)

    def run_step(self, plan: StepPlan) -> StepResult:
        self.tags.order = [item.sequence.seq_id for item in plan.items]
        before = [(item, list(item.sequence.tokens), item.sequence.num_computed) for item in plan.items]
        self.patterns.drafts.clear()
        result = super().run_step(plan)
        reads = iter(self.tags.reads)
        for (item, tokens, start), output in zip(before, result.outputs, strict=True):
            seq_id = item.sequence.seq_id
            admitted, now = self._seen.get(seq_id, (start, start))
            if now != start:  # it was preempted, and came back
                admitted = start
            self._seen[seq_id] = (admitted, item.sequence.num_computed)
            drafts = self.patterns.drafts.get(seq_id, [])
            if len(drafts) == self.scheduler.config.num_speculative_tokens:
                self.accepted.add(output.num_accepted)
            truth = tokens + drafts
            for position in range(start, start + item.num_tokens + len(drafts)):
                self._compare(next(reads), seq_id, position, truth, admitted)
        assert next(reads, None) is None
        return result

    def _compare(self, read: np.ndarray, seq_id: int, position: int, truth: list[int], admitted: int) -> None:
        window = self.tags.window
        first = 0 if window is None else max(0, position - window + 1)
        expected = np.arange(first, position + 1)
        np.testing.assert_array_equal(read[:, 1], expected, err_msg=f"positions read at {position} of {seq_id}")
        np.testing.assert_array_equal(read[:, 2], truth[first : position + 1], err_msg=f"tokens read by {seq_id}")
        foreign = read[:, 0] != seq_id
        assert not foreign[expected >= admitted].any(), (seq_id, position, "read what another sequence wrote")
        self.foreign += int(foreign.sum())
        self.compared += len(read)
