"""The child that compiles grammars."""

from bench.faults.children.suffering import suffer
from specdec.grammar.check import check, load

__all__ = ["check", "load", "suffer"]
