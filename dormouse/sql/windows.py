"""Windows of which DuckDB gives wrong answers, found in its plan of a statement."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dormouse.errors import InvalidQuery

_OF_TEXT = {"alias", "query_location"}
"""Fields of an expression that say how it is written."""


def check_windows(plan: Any) -> None:
    """Raises `InvalidQuery` where DuckDB would compute one window over the partitions of another.

    DuckDB 1.5 takes `PARTITION BY a, a` for `PARTITION BY a, b`: it compares how many expressions there are,
    and looks for each of the first among the second (https://github.com/duckdb/duckdb/issues/24629).
    """
    windows = list(_partitions(plan))
    for one in windows:
        if any(len(one) == len(other) and set(one) < set(other) for other in windows):
            raise InvalidQuery(
                "PARTITION BY names an expression twice, beside another window of as many: DuckDB takes one "
                "for the other and gives wrong answers; name it once"
            )


def _partitions(plan: Any) -> Iterator[list[str]]:
    """Yields for each window the expressions of its PARTITION BY, each as a text."""
    nodes = [plan]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if found := node.get("partitions"):
                yield [json.dumps(_plain(expression)) for expression in found]
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node


def _plain(node: Any) -> Any:
    """Returns an expression without how it is written."""
    if isinstance(node, dict):
        return {name: _plain(value) for name, value in node.items() if name not in _OF_TEXT}
    return [_plain(value) for value in node] if isinstance(node, list) else node
