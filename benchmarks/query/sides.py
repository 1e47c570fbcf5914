"""The engines, each warm in a separate process. All answer in key order, from the newest table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from time import perf_counter
from typing import Any

from benchmarks.harness.processes import resident_bytes
from benchmarks.query.lake import CATALOG, KEY_STEP, Lake


@dataclass(frozen=True)
class Wanted:
    """A query for `rows` rows, from row number `row` in key order.

    With `by_key`, the query has the condition `key = …` for that row alone, instead of a range.
    """

    row: int
    rows: int
    by_key: bool = False

    @property
    def low(self) -> int:
        return self.row * KEY_STEP

    @property
    def high(self) -> int:
        """The first key after the wanted rows."""
        return (self.row + self.rows) * KEY_STEP

    @property
    def sql(self) -> str:
        return f"key = {self.low}" if self.by_key else f"key >= {self.low} and key < {self.high} order by key"


_DIGESTED_ROWS = 10_000

Answer = Callable[[Wanted], Any]
"""A function that returns the rows in the engine's own format, which has a length."""


class Engine:
    """An engine that answers many queries."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def seconds(self, wanted: Sequence[Wanted]) -> list[float]:
        """Returns the seconds of each answer. Raises RuntimeError if an answer has another number of rows."""
        found = []
        for one in wanted:
            began = perf_counter()
            rows = self._answer(one)
            found.append(perf_counter() - began)
            if len(rows) != one.rows:
                raise RuntimeError(f"{len(rows)} rows instead of {one.rows}")
        return found

    def digest(self, wanted: Wanted) -> str:
        """Returns a hash of all values of an answer, in order."""
        return digest(self._answer(wanted))

    def peak_bytes(self) -> int:
        """Returns the peak of the process's resident memory."""
        return resident_bytes()


def digest(rows: Any) -> str:
    """Returns a hash of a pyarrow Table or a Polars DataFrame. Equal values have equal hashes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = rows if isinstance(rows, pa.Table) else rows.to_arrow()
    found = blake2b(digest_size=16)
    for name in sorted(table.column_names):
        for first in range(0, table.num_rows, _DIGESTED_ROWS):
            values = table.column(name).slice(first, _DIGESTED_ROWS)
            if pa.types.is_timestamp(values.type):  # the engines name the time zone differently
                values = values.cast(pa.timestamp("us"))
            values = values.cast(pa.string()).combine_chunks()
            whole = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
            found.update(pc.binary_join(whole, "\n")[0].as_buffer())
    return found.hexdigest()


@contextmanager
def opened_engine(side: str, lake: Lake) -> Iterator[Engine]:
    with ExitStack() as stack:
        yield Engine(SIDES[side](lake, stack))


def _dormouse(lake: Lake, stack: ExitStack) -> Answer:
    import dormouse as dm

    table = stack.enter_context(lake.opened()).table("orders")

    def answer(wanted: Wanted) -> Any:
        where = wanted.low if wanted.by_key else dm.Range(wanted.low, wanted.high)
        return table.query({"key": where}).read_all()

    return answer


def _sql(lake: Lake, stack: ExitStack) -> Answer:
    table = stack.enter_context(lake.opened()).table("orders")
    return lambda wanted: table.sql(f"select * from orders where {wanted.sql}").read_all()


def _duckdb(lake: Lake, stack: ExitStack) -> Answer:
    import duckdb

    connection = stack.enter_context(duckdb.connect())
    connection.execute("set parquet_metadata_cache = true; set enable_progress_bar = false")

    def answer(wanted: Wanted) -> Any:
        query = f"select * from read_parquet('{lake.pattern}') where {wanted.sql}"
        return connection.execute(query).to_arrow_table()

    return answer


def _polars(lake: Lake, stack: ExitStack) -> Answer:
    import polars as pl

    key = pl.col("key")

    def answer(wanted: Wanted) -> Any:
        where = key == wanted.low if wanted.by_key else (key >= wanted.low) & (key < wanted.high)
        return pl.scan_parquet(lake.pattern).filter(where).sort("key").collect()

    return answer


def _pyiceberg(lake: Lake, stack: ExitStack) -> Answer:
    table = lake.place.iceberg(CATALOG).load_table("query.orders")

    def answer(wanted: Wanted) -> Any:
        # the query must see commits since the last one
        table.refresh()
        between = f"key >= {wanted.low} and key < {wanted.high}"
        where = f"key == {wanted.low}" if wanted.by_key else between
        return table.scan(row_filter=where).to_arrow().sort_by("key")

    return answer


SIDES: dict[str, Callable[[Lake, ExitStack], Answer]] = {
    "dormouse": _dormouse,
    "sql": _sql,
    "duckdb": _duckdb,
    "polars": _polars,
    "pyiceberg": _pyiceberg,
}
