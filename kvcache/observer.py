"""Who is told of every block that changes hands: the interface of the ledger (kvcache.ledger) to pool and manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcache.table import BlockTable


class CacheObserver(Protocol):
    """Called after each change, in order. It changes nothing and raises nothing."""

    def allocated(self, block: int) -> None:
        """The pool gave out ``block``, free or evicted, with one reference: what it held counts no more."""

    def acquired(self, block: int) -> None:
        """One more reference to ``block``."""

    def released(self, block: int) -> None:
        """One reference less."""

    def granted(self, table: BlockTable, blocks: Sequence[int]) -> None:
        """Newly allocated ``blocks`` belong to ``table`` alone, behind those it has."""

    def shared(self, table: BlockTable, block: int) -> None:
        """The prefix cache gave ``block`` to ``table``, behind those it has."""

    def returned(self, table: BlockTable, block: int) -> None:
        """``block`` belongs to ``table`` no more."""

    def committed(self, table: BlockTable, index: int, block: int, token_ids: Sequence[int]) -> None:
        """``block``, at ``index`` of ``table``, was declared verified and hashed; it should hold ``token_ids``."""
