"""One fault: an exact edit of the source, and the tests that ought to notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class StaleEdit(Exception):
    """The text that an edit replaces does not stand exactly once in its file: the edit has to follow the code."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """``old`` stands exactly once in ``file`` and becomes ``new``.

    ``tests`` are pytest selections, run in this order up to the first failure. ``unseen`` says why comparing the engine
    with itself (speculation on and off, alone and in batches, cold and warm) cannot see this fault; "": it must see it.
    ``subject`` is the executor of tests/exactness on which that is tried, as a ``-k`` expression.
    ``may_hang``: a run that does not end counts as caught. ``may_raise``: so does what otherwise looks like a slip of
    the edit itself, such as a TypeError on a changed line or an error in a fixture; it says why the fault does that.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    unseen: str = ""
    subject: str = "mistral"
    may_hang: bool = False
    may_raise: str = ""
    compiled: bool = False  # the kernels are built anew, so it is not in the short form

    def apply(self, root: Path) -> None:
        """Put the fault into the copy of the project at ``root``. Raises StaleEdit."""
        path = root / self.file
        # A bytecode file of the same second and size would be taken for the new source's.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_text(self.edited(path.read_text(encoding="utf-8")), encoding="utf-8")

    def first_line(self, source: str) -> int:
        """Of ``new``, in the edited ``source``."""
        return source[: source.index(self.old)].count("\n") + 1

    def last_line(self, source: str) -> int:
        return self.first_line(source) + self.new.rstrip("\n").count("\n")

    def edited(self, source: str) -> str:
        """``source`` with the fault. Raises StaleEdit."""
        count = source.count(self.old)
        if count != 1 or self.new == self.old:
            raise StaleEdit(f"{self.name}: this stands {count} times in {self.file}, not once:\n{self.old}")
        return source.replace(self.old, self.new)
