"""Queries of older versions and of snapshots, which DuckDB answers from the rows in the files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import duckdb
import pyarrow as pa

from dormouse.errors import DormouseError, InvalidQuery, one_line
from dormouse.objects.staging import spill_folder
from dormouse.reading.sql.results import INTERRUPTED, failure
from dormouse.reading.streams import Interruption
from dormouse.rows.cluster import QUERY_SECONDS_MAX
from dormouse.rows.columns import Column
from dormouse.rows.emit import DUCKDB, column_name

SOURCE = "rows_then"
MEMORY = "1GB"
"""The memory that DuckDB may use for a query. A query that needs more uses the disk."""
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": False,
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}
_SET = """
-- keeps DuckDB from handing conditions to Arrow, which compares NaN differently
set disabled_optimizers = 'filter_pushdown';
set lock_configuration = true;
"""

Current = Callable[[Sequence[str]], pa.RecordBatchReader]
"""A function that returns the rows of a version, with ROW_ID, ROW_VERSION and the named columns."""


class OlderRows:
    """The rows of one version of a table, for statements. Each statement reads the files again."""

    dialect = DUCKDB
    source = SOURCE

    def __init__(
        self, current: Current, columns: Sequence[Column], interruption: Interruption | None = None
    ) -> None:
        self._current = current
        self._columns = list(columns)
        self._interruption = interruption or Interruption()

    def ask(self, text: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Executes a statement that `emit.py` wrote, and returns its rows.

        Raises `InvalidQuery` if a result does not fit its type or the statement takes too long. Raises
        `QueryTooLarge` if the statement needs too much memory.
        """
        used = [column for column in self._columns if _is_in(column_name(column.column_id or 0), text)]
        with self._current([column.name for column in used]) as reader:
            names = ["row_id", "row_version", *(column_name(column.column_id or 0) for column in used)]
            schema = pa.schema([pa.field(n, f.type) for n, f in zip(names, reader.schema, strict=True)])
            renamed = (pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in reader)
            folder = spill_folder(f"{id(reader):x}")
            settings = {**_SETTINGS, "memory_limit": MEMORY, "temp_directory": folder}
            with duckdb.connect(config=settings) as connection:
                connection.execute(_SET)
                connection.register(SOURCE, pa.RecordBatchReader.from_batches(schema, renamed))
                with self._limited(connection):
                    return connection.execute(text, values).fetchall()

    @contextmanager
    def _limited(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Interrupts a statement in the block if it takes too long, and translates DuckDB's errors."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._interruption.set()

        timer = threading.Timer(QUERY_SECONDS_MAX, end)
        timer.start()
        try:
            with self._interruption.ending(connection.interrupt):
                yield
        except (duckdb.InterruptException, DormouseError) as error:
            if is_late.is_set():
                raise InvalidQuery(
                    f"the query took longer than {QUERY_SECONDS_MAX} s: ask for less"
                ) from None
            if isinstance(error, DormouseError):
                raise
            raise DormouseError(INTERRUPTED) from None
        except duckdb.OutOfMemoryException as error:
            raise failure(error) from None
        except (duckdb.OutOfRangeException, duckdb.ConversionException) as error:
            raise InvalidQuery(f"a result does not fit its type: {one_line(error)}") from None
        finally:
            timer.cancel()


def _is_in(name: str, text: str) -> bool:
    """Returns whether the text of a statement contains the name of a column.

    No digit may follow the name, so that c_1 does not match c_12.
    """
    parts = text.split(name)
    return any(not part[:1].isdigit() for part in parts[1:])
