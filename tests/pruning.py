"""The parts of files that a query skipped, read from DataFusion's metrics."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from datafusion import SessionContext

from dormouse.reading.executor import query
from dormouse.state.context import TableContext

_PRUNED = re.compile(r"([\d.]+) total → ([\d.]+) matched")


@dataclass(frozen=True)
class Pruned:
    """The number of rows that a query returned, and what its scans skipped.

    Row groups and pages are pairs (considered, matched). There are also other metrics.
    """

    rows: int
    metrics: dict[str, tuple[int, int]]
    numbers: dict[str, int]


def plans_of(context: TableContext, monkeypatch: pytest.MonkeyPatch, *args: Any) -> tuple[list[Any], int]:
    """Returns the physical plans that a query ran, and the number of rows that it returned."""
    plans = []
    execute = SessionContext.execute

    def spy(self: Any, plan: Any, partition: int) -> Any:
        plans.append(plan)
        return execute(self, plan, partition)

    with monkeypatch.context() as patch:
        patch.setattr(SessionContext, "execute", spy)
        found = query(context, *args).read_all()
    return plans, found.num_rows


def pruned(
    context: TableContext, where: Any, monkeypatch: pytest.MonkeyPatch, columns: Sequence[str] | None = None
) -> Pruned:
    """Runs a query and sums the metrics of its scans."""
    plans, rows = plans_of(context, monkeypatch, where, columns)
    pairs: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    numbers: dict[str, int] = defaultdict(int)
    for plan in plans:
        for _, found in plan.collect_metrics():
            for metric in found.metrics():
                if match := _PRUNED.match(str(metric)):
                    total, matched = pairs[metric.name]
                    pairs[metric.name] = (total + int(match[1]), matched + int(match[2]))
                elif isinstance(metric.value, int):
                    numbers[metric.name] += metric.value
    return Pruned(rows, dict(pairs), dict(numbers))
