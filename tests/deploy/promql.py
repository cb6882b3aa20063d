"""Queries taken apart: which series they ask for, and what they divide by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser


@dataclass(frozen=True)
class Selector:
    """``labels``: (name, operator, value) of each matcher."""

    name: str
    labels: frozenset[tuple[str, str, str]]

    def __str__(self) -> str:
        matchers = ", ".join(f'{name}{op}"{value}"' for name, op, value in sorted(self.labels))
        return f"{self.name}{{{matchers}}}"

    @property
    def label_names(self) -> set[str]:
        return {name for name, _, _ in self.labels}


OPERATORS = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}


def parse(query: str) -> Any:
    """Raises ValueError with the place if it is no PromQL."""
    return promql_parser.parse(query)


def nodes(expression: Any) -> Iterator[Any]:
    """``expression`` and all that it is made of."""
    yield expression
    match expression:
        case promql_parser.BinaryExpr():
            parts = [expression.lhs, expression.rhs]
        case promql_parser.AggregateExpr():
            parts = [expression.expr]
        case promql_parser.Call():
            parts = list(expression.args)
        case promql_parser.MatrixSelector():
            parts = [expression.vector_selector]
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            parts = [expression.expr]
        case _:
            parts = []
    for part in parts:
        yield from nodes(part)


def selectors(query: str) -> set[Selector]:
    return {
        Selector(
            node.name,
            frozenset(
                (matcher.name, OPERATORS[str(matcher.op).rpartition(".")[2]], matcher.value)
                for matcher in node.matchers.matchers
            ),
        )
        for node in nodes(parse(query))
        if isinstance(node, promql_parser.VectorSelector)
    }


def unguarded(query: str) -> list[str]:
    """Denominators that can be 0: neither a number nor something of which only what is above 0 is left."""
    return [
        node.rhs.prettify()
        for node in nodes(parse(query))
        if isinstance(node, promql_parser.BinaryExpr) and str(node.op) == "/" and not _guarded(node.rhs)
    ]


def _guarded(expression: Any) -> bool:
    match expression:
        case promql_parser.NumberLiteral():
            return bool(expression.val)
        case promql_parser.ParenExpr():
            return _guarded(expression.expr)
        case promql_parser.BinaryExpr():
            above = str(expression.op) == ">" and isinstance(expression.rhs, promql_parser.NumberLiteral)
            return above and expression.rhs.val >= 0
        case _:
            return False
