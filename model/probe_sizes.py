"""How many rows the exactness probe puts into a forward: all small counts, and above them the borders of tiles.

Whoever computes works on blocks of rows; another kernel, or a block cut otherwise, begins at a border. Every count up
to ``EVERY`` runs, so each remainder of the small blocks does, alone and behind a full block; above that::

    tiles of c rows (torch)    c / 2 rows fill half a tile, so it is taken; c fill it; c + 1 begin the next
    compiled kernels           the same for full blocks of rows, panels, and rows that share a pass over the context
    both                       the first count of each class of powers of two, and some inside of the smaller classes
"""

from __future__ import annotations

from model.interface import Executor, TiledExecutor
from model.kernels import INSTRUCTION_SET
from model.kernels.ops import ATTENTION_ROWS, MATMUL_ROWS, PANEL_ROWS

EVERY = 32  # ordinary decode and verify steps
_CLASSES = (33, 65, 129, 257, 513, 1025, 2049, 4097)  # the first count of each class of powers of two
_INSIDE = (41, 77, 100, 171)  # not of the larger classes: a row costs as much as another, and the first start waits


def row_counts(executor: Executor, budget: int) -> list[int]:
    """The counts to try, ascending, up to ``budget``, which is one of them."""
    tiles = list(executor.tile_classes) if isinstance(executor, TiledExecutor) else []
    borders = {border for tile in tiles for border in (tile // 2, tile, tile + 1)}
    if not tiles or INSTRUCTION_SET in executor.kind:
        blocks = (3 * MATMUL_ROWS, ATTENTION_ROWS, 2 * ATTENTION_ROWS, PANEL_ROWS)
        borders |= {border for block in blocks for border in (block, block + 1)}
    counts = {*range(1, EVERY + 1), *_CLASSES, *_INSIDE, *borders, budget}
    return sorted(count for count in counts if 1 <= count <= budget)
