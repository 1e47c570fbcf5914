"""Dormouse and DuckDB, each in a separate process, and the comparison of their answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Number
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.harness.processes import resident_bytes
from benchmarks.sql.lake import TABLES, Lake, duckdb_connection

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.api.instance import Instance

Row = tuple[Any, ...]


class Engine:
    """An engine that answers many statements."""

    def __init__(self, answer: Callable[[str], pa.Table], instance: Instance | None = None) -> None:
        self._answer = answer
        self._instance = instance

    def rows(self, statement: str) -> list[Row]:
        return rows_of(self._answer(statement))

    def seconds(self, statement: str, times: int = 1) -> float:
        """Returns the average seconds of an answer."""
        began = perf_counter()
        for _ in range(times):
            self._answer(statement)
        return (perf_counter() - began) / times

    def plan_seconds(self, statements: Sequence[str]) -> list[float]:
        """Returns the seconds to plan each statement."""
        found = []
        for statement in statements:
            began = perf_counter()
            self._instance.explain_sql(statement)  # type: ignore[union-attr]
            found.append(perf_counter() - began)
        return found

    def peak_bytes(self) -> int:
        """Returns the peak of the process's resident memory."""
        return resident_bytes()


@contextmanager
def dormouse(lake: Lake) -> Iterator[Engine]:
    with lake.opened() as instance:
        yield Engine(lambda statement: instance.sql(statement).read_all(), instance)


@contextmanager
def duckdb(lake: Lake) -> Iterator[Engine]:
    with duckdb_connection() as made:
        made.execute("set parquet_metadata_cache = true")
        for name in TABLES:
            made.execute(f"create view {name} as from '{lake.path(name)}'")
        yield Engine(lambda statement: made.execute(statement).to_arrow_table())


def rows_of(table: pa.Table) -> list[Row]:
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def same(ours: Sequence[Row], theirs: Sequence[Row]) -> bool:
    """Returns whether the rows are equal in any order, up to rounding of sums of doubles."""
    if len(ours) != len(theirs):
        return False
    return all(map(_same_row, sorted(ours, key=_sort_key), sorted(theirs, key=_sort_key)))


def _sort_key(row: Row) -> tuple[list[str], list[float]]:
    numbers = [float(value) for value in row if isinstance(value, Number)]  # type: ignore[arg-type]
    return [repr(value) for value in row if not isinstance(value, Number)], numbers


def _same_row(ours: Row, theirs: Row) -> bool:
    return len(ours) == len(theirs) and all(map(_same_value, ours, theirs))


def _same_value(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Number) and isinstance(theirs, Number):
        return math.isclose(float(ours), float(theirs), rel_tol=1e-9)  # type: ignore[arg-type]
    return bool(ours == theirs)


def resident_of_descendants(process_id: int) -> list[int]:
    """Returns the resident bytes of each descendant of a process."""
    found = []
    for task in Path(f"/proc/{process_id}/task").iterdir():
        for child in (task / "children").read_text("utf-8").split():
            found += [resident_bytes("VmRSS", child), *resident_of_descendants(int(child))]
    return found
