"""What a sequence does not own, or has not written, cannot reach its output: NaN there changes nothing.

Before every step each slot of every plane that no live sequence has computed is filled with NaN: free blocks,
the unwritten tails of owned blocks and the slots of rejected drafts. The physical blocks are shuffled as well.
"""

from __future__ import annotations

import pytest
import torch

from bench.offline import OfflineConfig, OfflineEngine, blocks_for
from specdec.drafters.synthetic import OracleDrafter, WrongDrafter
from tests.exactness.builders import Subject, shuffle_blocks
from tests.exactness.conditions import REFERENCE

K = 6


class PoisoningEngine(OfflineEngine):
    """Poisons before each step."""

    poisoned = 0

    def before_step(self) -> None:
        computed = torch.zeros((self.storage.num_blocks + 1) * self.storage.block_size, dtype=torch.bool)
        for sequence in self.scheduler.running_sequences():
            for position in range(sequence.num_computed):
                computed[sequence.table.slot(position)] = True
        self.poisoned += int((~computed).sum())
        for name in self.storage.names:
            self.storage.plane(name)[~computed] = float("nan")


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("k", [0, K])
@pytest.mark.case("V 46088", "G 2711")
def test_foreign_free_unwritten_and_rejected_slots_do_not_matter(subject: Subject, block_size: int, k: int) -> None:
    requests = subject.requests
    expected = subject.reference(REFERENCE, None)
    config = OfflineConfig(block_size=block_size, num_speculative_tokens=k, prefix_cache=False)
    vocab_size = subject.executor.info.vocab_size
    oracle = OracleDrafter({i: answer.token_ids for i, answer in enumerate(expected)})
    blocks = blocks_for(requests, block_size, K + block_size)
    engine = PoisoningEngine(
        subject.executor, config, num_blocks=blocks, drafter=WrongDrafter(oracle, 9, vocab_size, error_rate=0.3)
    )
    shuffle_blocks(engine.manager, block_size)
    assert engine.generate(requests) == expected
    engine.check_clean()
    assert engine.poisoned > 0
    if k:
        assert sum(step.rollback_tokens for step in engine.steps) > 0
