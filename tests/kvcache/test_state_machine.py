"""Random lives of sequences against a simple model of what every slot holds.

The model: for each block a list of what was written to its slots, namely (salt, tokens up to and including that
position), which is all that a position's KV depends on. A block that a match attaches must hold exactly what the new
sequence would have written there: warm equals cold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.manager import KVCacheManager
from kvcache.prefix import sha256
from kvcache.table import BlockTable
from tests.kvcache.builders import constant_hash, one_bit_hash

Content = tuple[bytes, tuple[int, ...]]
REJECTED = 9  # an id that is drafted and never accepted


@dataclass
class Life:
    table: BlockTable
    tokens: list[int]
    num_computed: int = 0
    running: bool = True


@dataclass
class Model:
    slots: dict[int, list[Content | None]]  # block -> content of its slots
    lives: list[Life] = field(default_factory=list)
    committed: set[Content] = field(default_factory=set)  # prefixes of full verified blocks, ever


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 4, 16, 64]),
        num_blocks=st.integers(1, 10),
        hash_function=st.sampled_from([sha256, sha256, one_bit_hash, constant_hash]),
    )
    def build(self, block_size: int, num_blocks: int, hash_function: object) -> None:
        self.size = block_size
        self.exact = hash_function is sha256
        self.manager = KVCacheManager(num_blocks, block_size, hash_function=hash_function)  # type: ignore[arg-type]
        self.model = Model(slots={b: [None] * block_size for b in range(num_blocks)})

    def content(self, life: Life, position: int, tokens: list[int]) -> Content:
        return life.table.salt, tuple(tokens[: position + 1])

    def match(self, life: Life) -> None:
        tokens, limit = life.tokens, len(life.tokens) - 1
        evictions = self.manager.stats().evictions
        covered = self.manager.match_prefix(life.table, tokens, limit)
        life.num_computed = covered
        life.running = True
        assert covered <= limit
        assert covered == life.table.num_slots == life.table.num_committed_tokens
        assert self.manager.stats().evictions == evictions
        for position in range(covered):
            block, offset = divmod(life.table.slot(position), self.size)
            assert self.model.slots[block][offset] == self.content(life, position, tokens)
        ends = range(self.size, limit + 1, self.size)
        known = [end for end in ends if (life.table.salt, tuple(tokens[:end])) in self.model.committed]
        assert covered in (0, *known)
        if self.exact and evictions == 0:
            assert covered == max(known, default=0)

    @rule(
        letters=st.lists(st.integers(0, 1), min_size=0, max_size=4),
        tail=st.integers(1, 64),
        salt=st.sampled_from([b"", b"", b"a"]),
        twins=st.booleans(),
    )
    def admit(self, letters: list[int], tail: int, salt: bytes, twins: bool) -> None:
        tokens = [letter for letter in letters for _ in range(self.size)] + [0] * (1 + tail % self.size)
        self.model.lives += [Life(self.manager.new_table(salt), list(tokens)) for _ in range(2 if twins else 1)]
        for life in self.model.lives[-2 if twins else -1 :]:
            self.match(life)
        if twins:  # side by side they compute the same blocks: duplicates
            for life in self.model.lives[-2:]:
                self.advance(life, len(life.tokens) - life.num_computed)

    @precondition(lambda self: any(life.running for life in self.model.lives))
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from([life for life in self.model.lives if life.running]))
        todo = len(life.tokens) - life.num_computed
        chunk = data.draw(st.sampled_from([todo, max(1, todo // 2), 1]))
        drafted = data.draw(st.integers(0, 2 * self.size + 1)) if chunk == todo else 0
        self.advance(life, chunk, drafted, accepted=data.draw(st.integers(0, drafted)))

    def advance(self, life: Life, chunk: int, drafted: int = 0, accepted: int = 0) -> None:
        samples = life.num_computed + chunk == len(life.tokens)
        before = (list(life.table.blocks), self.manager.stats())
        written = life.num_computed + chunk + drafted
        if not self.manager.reserve(life.table, written):
            assert (life.table.blocks, self.manager.stats()) == before
            needed = -(-written // self.size) - len(life.table.blocks)
            assert needed > before[1].free_blocks + before[1].cached_blocks
            return
        assert life.table.blocks[: len(before[0])] == before[0]
        accepted_ids = [i % 2 for i in range(accepted)]
        speculative = life.tokens[: life.num_computed + chunk] + accepted_ids + [REJECTED] * (drafted - accepted)
        for position in range(life.num_computed, written):
            block, offset = divmod(life.table.slot(position), self.size)
            self.model.slots[block][offset] = self.content(life, position, speculative)
        life.num_computed += chunk + accepted
        if samples:
            life.tokens += [*accepted_ids, 1]
        self.manager.commit(life.table, life.tokens, life.num_computed)
        for end in range(self.size, life.num_computed + 1, self.size):
            self.model.committed.add((life.table.salt, tuple(life.tokens[:end])))
        surplus = len(life.table.blocks) - -(-life.num_computed // self.size)
        assert self.manager.truncate(life.table, life.num_computed) == surplus
        assert life.table.num_committed_tokens == life.num_computed // self.size * self.size

    @precondition(lambda self: any(life.running for life in self.model.lives))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from([life for life in self.model.lives if life.running]))
        self.manager.free(life.table)
        life.num_computed, life.running = 0, False

    @precondition(lambda self: any(not life.running for life in self.model.lives))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.match(data.draw(st.sampled_from([life for life in self.model.lives if not life.running])))

    @precondition(lambda self: self.model.lives)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        life = self.model.lives.pop(data.draw(st.integers(0, len(self.model.lives) - 1)))
        self.manager.free(life.table)

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity([life.table for life in self.model.lives])
        stats = self.manager.stats([(life.table, life.num_computed) for life in self.model.lives])
        assert stats.free_blocks + stats.cached_blocks + stats.used_blocks == stats.num_blocks
        held = {block for life in self.model.lives for block in life.table.blocks}
        assert stats.used_blocks == len(held)
        slots = {life.table.slot(p) for life in self.model.lives for p in range(life.num_computed)}
        assert stats.used_slots == len(slots)
        filled = Counter(slot // self.manager.block_size for slot in slots)
        assert stats.last_block_slots == sum(self.manager.block_size - count for count in filled.values())
        holders = Counter(block for life in self.model.lives for block in life.table.blocks)
        assert stats.shared_blocks == sum(count > 1 for count in holders.values())

    @invariant()
    def the_block_map_tells_each_block(self) -> None:
        if not hasattr(self, "manager"):
            return
        lives = [life for life in self.model.lives if life.table.blocks]
        shown = self.manager.block_map((life.table, life.num_computed) for life in lives)
        stats = self.manager.stats()
        assert (shown.count("."), shown.count("c")) == (stats.free_blocks, stats.cached_blocks)
        holders = Counter(block for life in lives for block in life.table.blocks)
        partly = {block for life in lives for block in life.table.blocks[life.num_computed // self.size :]}
        for block, letter in enumerate(shown):
            held = "p" if block in partly else "s" if holders[block] > 1 else "u" if holders[block] else ".c"
            assert letter in held, (block, letter, held)

    @invariant()
    def committed_blocks_still_hold_what_was_verified(self) -> None:
        for life in self.model.lives if hasattr(self, "manager") else ():
            for position in range(life.num_computed):
                block, offset = divmod(life.table.slot(position), self.size)
                assert self.model.slots[block][offset] == self.content(life, position, life.tokens)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for life in self.model.lives:
            self.manager.free(life.table)
        self.manager.check_integrity([])
        stats = self.manager.stats([])
        assert stats.used_blocks == 0
        assert stats.free_blocks + stats.cached_blocks == stats.num_blocks


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
