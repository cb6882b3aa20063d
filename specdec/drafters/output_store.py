"""What was said before, by anybody with the same cache salt: the bounded store behind the suffix drafter.

Outputs come in units of at most ``unit_tokens`` tokens, each in a slot of its salt's text::

    slot     [mark] [context: what stood before] [the unit's tokens] [what came after] [end]
    read by  nobody  matching                     matching, drafts    drafts           stops a draft

Units leave whole, the oldest first, whenever a new one would not fit into ``max_bytes``, which holds for all salts
together. A salt's tree, text and units are its own: nothing that was said under one is ever found under another.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specdec.drafters.context_tree import BYTES_PER_TEXT_ENTRY, MAX_BYTES_PER_OCCURRENCE, ContextTree

_END = -1
_FIRST_MARK = -3  # marks are this, less the slot; -1 and -2 are for texts outside the store
_BYTES_PER_SALT = 1600  # the shelf, and tokens of contexts: with few outputs nothing else holds these


class _Shelf:
    """The units of one salt."""

    __slots__ = ("free_slots", "num_units", "salt", "tree")

    def __init__(self, salt: bytes, tree: ContextTree) -> None:
        self.salt = salt
        self.tree = tree
        self.free_slots: list[int] = []
        self.num_units = 0


@dataclass(frozen=True, slots=True)
class _Unit:
    shelf: _Shelf
    slot: int
    first: int  # text position of its first token
    count: int


class OutputStore:
    """Bounded in bytes, which a salt costs some of, too; the oldest units are forgotten first, whosever they are.

    Beyond ``max_salts``, the salt used longest ago is forgotten: a bound for what is done for each salt, so far above
    the salts in use that a client who invents some takes nobody's past before its bytes do. Not for several threads at
    once.

    A ``max_bytes`` too small for one unit keeps the store empty. Raises ValueError for a negative ``max_bytes`` and for
    other sizes below 1.
    """

    def __init__(
        self,
        *,
        max_bytes: int = 64 * 2**20,
        max_salts: int = 4096,
        unit_tokens: int = 32,
        ahead_tokens: int = 32,
        max_depth: int = 32,
        max_recent: int = 8,
    ) -> None:
        if max_bytes < 0 or min(max_salts, unit_tokens, ahead_tokens) < 1:
            raise ValueError(
                f"a store needs max_bytes >= 0 and positive sizes, got max_bytes = {max_bytes}, "
                f"max_salts = {max_salts}, unit_tokens = {unit_tokens} and ahead_tokens = {ahead_tokens}"
            )
        self.max_bytes = max_bytes
        self.max_salts = max_salts
        self.unit_tokens = unit_tokens
        self.ahead_tokens = ahead_tokens
        self.context_tokens = max_depth
        self._max_recent = max_recent
        self._slot_size = 1 + max_depth + unit_tokens + ahead_tokens + 1
        self._slot_bytes = self._slot_size * BYTES_PER_TEXT_ENTRY
        self._shelves: OrderedDict[bytes, _Shelf] = OrderedDict()
        self._units: deque[_Unit] = deque()
        self._bytes = 0
        self.num_evicted = 0  # units that left to make room, since the start

    @property
    def num_salts(self) -> int:
        return len(self._shelves)

    @property
    def num_units(self) -> int:
        return len(self._units)

    @property
    def num_tokens(self) -> int:
        """Tokens whose contexts can be found."""
        return sum(shelf.tree.num_occurrences for shelf in self._shelves.values())

    @property
    def memory_bytes(self) -> int:
        """Estimate of what the store holds now; at most ``max_bytes``."""
        return self._bytes

    def add(self, salt: bytes, context: Seq[int], tokens: Seq[int], ahead: Seq[int]) -> None:
        """Keep one unit: ``tokens``, what stood before them and what came after.

        Of ``context`` the last ``context_tokens`` count, of ``ahead`` the first ``ahead_tokens``; both may be empty.
        Raises ValueError unless there are 1 to ``unit_tokens`` tokens.
        """
        if not 0 < len(tokens) <= self.unit_tokens:
            raise ValueError(f"a unit has 1 to {self.unit_tokens} tokens, got {len(tokens)}")
        if not self._make_room(salt, len(tokens)):
            return
        shelf = self._shelf(salt)
        tree = shelf.tree
        before = tree.memory_bytes
        slot, start = self._take_slot(shelf)
        stretch = [*context[max(0, len(context) - self.context_tokens) :], *tokens, *ahead[: self.ahead_tokens]]
        tree.text[start + 1 : start + 1 + len(stretch)] = stretch
        first = start + 1 + min(len(context), self.context_tokens)
        for position in range(first, first + len(tokens)):
            tree.insert(position)
        self._units.append(_Unit(shelf, slot, first, len(tokens)))
        shelf.num_units += 1
        self._bytes += tree.memory_bytes - before

    def find(self, salt: bytes, text: list[int], end: int) -> tuple[int, tuple[int, ...], list[int]]:
        """The longest match of the tokens before ``text[end]``, as :meth:`ContextTree.find`, and the text it lies in.

        ``text`` starts with -1 and holds no other number below -2.
        """
        shelf = self._shelves.get(salt)
        if shelf is None:
            return 0, (), []
        self._shelves.move_to_end(salt)
        length, occurrences = shelf.tree.find(text, end)
        return length, occurrences, shelf.tree.text

    def check_integrity(self) -> None:
        """Raise AssertionError unless units, slots, trees and bytes agree."""
        held: dict[bytes, list[_Unit]] = {salt: [] for salt in self._shelves}
        for unit in self._units:
            held[unit.shelf.salt].append(unit)
        for salt, shelf in self._shelves.items():
            shelf.tree.check_integrity()
            units = held[salt]
            assert len(units) == shelf.num_units > 0, (salt, len(units), shelf.num_units)
            slots = [unit.slot for unit in units] + shelf.free_slots
            assert sorted(slots) == list(range(len(shelf.tree.text) // self._slot_size)), (salt, sorted(slots))
            assert sum(unit.count for unit in units) == shelf.tree.num_occurrences, salt
        assert self._bytes == sum(_shelf_bytes(shelf) for shelf in self._shelves.values()), self._bytes
        assert self._bytes <= self.max_bytes, (self._bytes, self.max_bytes)
        assert len(self._shelves) <= self.max_salts, len(self._shelves)

    def _make_room(self, salt: bytes, num_tokens: int) -> bool:
        """Evict until the worst that a unit of ``num_tokens`` can need is there; False if it never will be."""
        if _BYTES_PER_SALT + self._slot_bytes + num_tokens * MAX_BYTES_PER_OCCURRENCE > self.max_bytes:
            return False
        while self._bytes + self._need(salt, num_tokens) > self.max_bytes:
            unit = self._units.popleft()
            shelf, tree = unit.shelf, unit.shelf.tree
            self._bytes -= tree.memory_bytes
            for position in range(unit.first, unit.first + unit.count):
                tree.remove(position)
            start = unit.slot * self._slot_size
            tree.text[start : start + self._slot_size] = [_END] * self._slot_size
            self._bytes += tree.memory_bytes
            shelf.free_slots.append(unit.slot)
            shelf.num_units -= 1
            self.num_evicted += 1
            if shelf.num_units == 0:
                self._bytes -= _shelf_bytes(shelf)
                del self._shelves[shelf.salt]
        return True

    def _need(self, salt: bytes, num_tokens: int) -> int:
        """Bytes that another unit takes at most."""
        need = num_tokens * MAX_BYTES_PER_OCCURRENCE
        shelf = self._shelves.get(salt)
        if shelf is None:
            return need + _BYTES_PER_SALT + self._slot_bytes
        return need if shelf.free_slots else need + self._slot_bytes

    def _shelf(self, salt: bytes) -> _Shelf:
        shelf = self._shelves.get(salt)
        if shelf is None:
            if len(self._shelves) == self.max_salts:
                _, oldest = self._shelves.popitem(last=False)
                self._bytes -= _shelf_bytes(oldest)
                self.num_evicted += oldest.num_units
                self._units = deque(unit for unit in self._units if unit.shelf is not oldest)
            shelf = _Shelf(salt, ContextTree(max_depth=self.context_tokens, max_recent=self._max_recent))
            self._shelves[salt] = shelf
            self._bytes += _shelf_bytes(shelf)
        self._shelves.move_to_end(salt)
        return shelf

    def _take_slot(self, shelf: _Shelf) -> tuple[int, int]:
        """A slot that holds nothing but its mark and ends, and where it starts."""
        text, size = shelf.tree.text, self._slot_size
        slot = shelf.free_slots.pop() if shelf.free_slots else len(text) // size
        start = slot * size
        if start == len(text):
            text.extend([_END] * size)
        text[start] = _FIRST_MARK - slot
        return slot, start


def _shelf_bytes(shelf: _Shelf) -> int:
    return shelf.tree.memory_bytes + _BYTES_PER_SALT
