"""Expressions evaluated over rows in memory, by a DuckDB that can read nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import duckdb
import pyarrow as pa

from dormouse.data.arrow_schema import arrow_type
from dormouse.model.types import BOOLEAN, BYTES, DOUBLE, FLOAT, INT, LONG, STRING, Field
from dormouse.reading.sql.moments import dropped, macros
from dormouse.reading.sql.results import named_failures, rows_of
from dormouse.reading.sql.scalars import TARGET, columns_text, constant_text, reference

EVALUATORS_MAX = 4
"""The most idle evaluators that are kept. If more threads need one at once, more are made."""
_ROWS = "rows"
_RETURNED = {BOOLEAN, BYTES, DOUBLE, FLOAT, INT, LONG, STRING}


class Evaluator:
    """A DuckDB that evaluates expressions over batches of rows, one after another."""

    def __init__(self) -> None:
        self._connection = duckdb.connect(
            config={
                "threads": 1,
                "enable_external_access": False,
                "autoload_known_extensions": False,
                "autoinstall_known_extensions": False,
                "python_enable_replacements": False,
            }
        )
        self._connection.execute("SET TimeZone = 'UTC'")
        self._connection.execute("SET lock_configuration = true")

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def at(self, moment: int | None) -> Iterator[None]:
        """Fixes the current time, in microseconds since 1970, for the block; None if it is not needed."""
        for statement in () if moment is None else macros(moment):
            self._connection.execute(statement)
        try:
            yield
        finally:
            for statement in () if moment is None else dropped():
                self._connection.execute(statement)

    def values(
        self, rows: pa.RecordBatch, expressions: Mapping[Field, str], used: Sequence[Field]
    ) -> dict[str, pa.Array]:
        """Returns the values of expressions over columns of some rows, in their order, by name.

        `expressions` have the types of their fields, and refer to the columns `used` as those of the rows
        `TARGET`. Raises `InvalidQuery`.
        """
        with named_failures():
            if rows.num_rows == 1 and _are_plain(used) and _are_returned(expressions):
                return self._of_one(rows, expressions, used)
            listed = ", ".join(f"{text} AS c{number}" for number, text in enumerate(expressions.values()))
            # without columns, DuckDB would not know the number of rows
            given = rows.select([one.name for one in used] or rows.schema.names[:1])
            self._connection.register(_ROWS, pa.Table.from_batches([given]))
            try:
                place = columns_text(TARGET, given.schema.names, _ROWS)
                answer = rows_of(self._connection.execute(f"SELECT {listed} FROM ({place})"), named_failures)
                found = pa.Table.from_batches(answer.batches, answer.schema)
            finally:
                self._connection.unregister(_ROWS)
        return {
            one.name: column.combine_chunks() for one, column in zip(expressions, found.columns, strict=True)
        }

    def _of_one(
        self, row: pa.RecordBatch, expressions: Mapping[Field, str], used: Sequence[Field]
    ) -> dict[str, pa.Array]:
        """Returns the values for a single row, whose own values are in the statement: this is faster."""
        values = (
            f"{constant_text(one.type, row.column(one.name)[0].as_py())} AS {reference(TARGET, one.name)}"
            for one in used
        )
        place = ", ".join(values) or "NULL"
        [found] = self._connection.execute(
            f"SELECT {', '.join(expressions.values())} FROM (SELECT {place})"
        ).fetchall()
        return {
            one.name: pa.array([value], arrow_type(one.type))
            for one, value in zip(expressions, found, strict=True)
        }


def _are_plain(fields: Iterable[Field]) -> bool:
    return not any(one.type.is_nested for one in fields)


def _are_returned(fields: Iterable[Field]) -> bool:
    """Returns whether DuckDB returns values of these types in Python as they are."""
    return all(one.type in _RETURNED or one.type.precision is not None for one in fields)


_free: dict[int, list[Evaluator]] = {}
"""The idle evaluators by process id, since a forked process must not use those of its parent."""


@contextmanager
def evaluator(moment: int | None = None) -> Iterator[Evaluator]:
    """Yields an evaluator that no other thread uses meanwhile, at a moment; see `Evaluator.at`."""
    free = _free.setdefault(os.getpid(), [])
    try:
        found = free.pop()
    except IndexError:
        found = Evaluator()
    is_sound = False
    try:
        with found.at(moment):
            yield found
        is_sound = True
    finally:
        if is_sound and len(free) < EVALUATORS_MAX:
            free.append(found)
        else:
            found.close()
