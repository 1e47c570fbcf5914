"""Expressions evaluated over rows in memory, by a DuckDB that can read nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import duckdb
import pyarrow as pa

from dormouse.data.transform import quoted
from dormouse.reading.sql.moments import dropped, macros
from dormouse.reading.sql.results import named_failures
from dormouse.reading.sql.scalars import TARGET, columns_text

EVALUATORS_MAX = 4
"""The most idle evaluators that are kept. If more threads need one at once, more are made."""
_ROWS = "rows"


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

    def values(self, rows: pa.RecordBatch, expressions: Sequence[str], names: Sequence[str]) -> pa.Table:
        """Returns the values of expressions over the columns `names` of some rows, in their order.

        The expressions refer to the columns as columns of the rows `TARGET`. Raises `InvalidQuery`.
        """
        listed = ", ".join(f"{text} AS {quoted(str(n))}" for n, text in enumerate(expressions))
        # without columns, DuckDB would not know the number of rows
        given = rows.select(list(names) or rows.schema.names[:1])
        with named_failures():
            self._connection.register(_ROWS, pa.Table.from_batches([given]))
            try:
                place = columns_text(TARGET, given.schema.names, _ROWS)
                return self._connection.execute(f"SELECT {listed} FROM ({place})").to_arrow_table()
            finally:
                self._connection.unregister(_ROWS)


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
