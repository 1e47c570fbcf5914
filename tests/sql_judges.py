"""Judges of the answers to statements: DuckDB with the rows in its own tables, and PostgreSQL with
the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import duckdb
import psycopg
import pyarrow as pa

from dormouse.errors import DormouseError
from tests.sql_values import TYPES, Statement, quoted
from tests.support.api import Instance
from tests.support.model import BOOLEAN, BYTES, DOUBLE, INT, LONG, STRING, TIMESTAMP

_POSTGRES = {
    **{INT: "int4", LONG: "int8", STRING: "text", BYTES: "bytea", DOUBLE: "float8", BOOLEAN: "boolean"},
    TIMESTAMP: "timestamptz",
}


class Judges:
    """DuckDB with the rows in its own tables, and PostgreSQL if there is one."""

    def __init__(self, dsn: str | None = None) -> None:
        self._duckdb = duckdb.connect()
        self._duckdb.execute("set TimeZone = 'UTC'")
        self._postgres = None if dsn is None else psycopg.connect(dsn, autocommit=True)
        if self._postgres:
            self._postgres.execute("set TimeZone = 'UTC'; set statement_timeout = '20s'")
            self._postgres.execute(_FROM_HEX)

    def close(self) -> None:
        self._duckdb.close()
        if self._postgres:
            self._postgres.close()

    def learn(self, tables: Mapping[str, pa.Table]) -> None:
        """Replaces all tables of the judges by the given ones."""
        for [name] in self._duckdb.execute("select table_name from duckdb_tables()").fetchall():
            self._duckdb.execute(f"drop table {quoted(name)}")
        for name, rows in tables.items():
            self._duckdb.register("rows_of_it", rows)
            self._duckdb.execute(f"create table {quoted(name)} as from rows_of_it")
            if self._postgres:
                _fill(self._postgres, name, rows)

    def verdict(self, ours: pa.Table | Exception, statement: Statement) -> Verdict:
        """Returns the verdict on Dormouse's answer to a statement."""
        try:
            theirs = self._duckdb.execute(statement.text, statement.parameters).to_arrow_table()
        except duckdb.InternalException:  # a fault of DuckDB
            return Verdict(refused=True)
        except duckdb.Error as error:
            wrong = None if isinstance(ours, DormouseError) else f"DuckDB refuses it: {error}\nours: {ours}"
            return Verdict(wrong, refused=True)
        if isinstance(ours, Exception):
            return Verdict(f"{type(ours).__name__}: {ours}\nDuckDB: {theirs}")
        if wrong := different(ours, theirs, ordered=statement.ordered):
            return Verdict(f"DuckDB: {wrong}")
        if self._postgres is None or not statement.in_postgres:
            return Verdict()
        try:
            known = self._postgres.execute(statement.inlined.encode()).fetchall()
        except psycopg.Error:
            return Verdict()
        wrong = _different(_rows(ours), known, statement.ordered, _about)
        return Verdict(wrong and f"PostgreSQL: {wrong}", by_postgres=True)

    def contradict_themselves(self, instance: Instance, ours: pa.Table, statement: Statement) -> bool:
        """Returns whether DuckDB's optimizer is the reason for a difference.

        It is the reason if our answer equals that of the judge without its optimizer. It is also the reason
        if the optimizer changes the answer over the tables' files.
        """
        plain = _unoptimized(self._duckdb, statement)
        if not different(ours, plain, ordered=statement.ordered):
            return True
        with instance.duckdb() as files:
            theirs = files.execute(statement.text, statement.parameters).to_arrow_table()
            whole = _unoptimized(files, statement)
        return not (
            different(ours, theirs, ordered=statement.ordered)
            or different(plain, whole, ordered=statement.ordered)
        )


@dataclass(frozen=True)
class Verdict:
    """A verdict; `wrong` describes the difference, if there is one."""

    wrong: str | None = None
    refused: bool = False
    by_postgres: bool = False


def _unoptimized(connection: duckdb.DuckDBPyConnection, statement: Statement) -> pa.Table:
    connection.execute("pragma disable_optimizer")
    try:
        return connection.execute(statement.text, statement.parameters).to_arrow_table()
    finally:
        connection.execute("pragma enable_optimizer")


_FROM_HEX = """
create or replace function from_hex(text) returns bytea language sql immutable
as $$ select decode($1, 'hex') $$
"""


def _fill(conn: psycopg.Connection[Any], name: str, rows: pa.Table) -> None:
    columns = [one for one in rows.column_names if TYPES[one] in _POSTGRES]
    listed = ", ".join(f"{quoted(one)} {_POSTGRES[TYPES[one]]}" for one in columns)
    conn.execute(f"drop table if exists {quoted(name)}; create table {quoted(name)} ({listed})".encode())
    with conn.cursor().copy(f"copy {quoted(name)} from stdin".encode()) as copy:
        for one in rows.select(columns).to_pylist():
            copy.write_row([*one.values()])


def _rows(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def different(ours: pa.Table, theirs: pa.Table, *, ordered: bool) -> str | None:
    """Returns a description of the difference between an answer and DuckDB's, or None."""
    for index, (field, other) in enumerate(zip(ours.schema, theirs.schema, strict=False)):
        if (field.type, other.type) == (pa.int64(), pa.decimal128(38, 0)):
            # only our answers have LONG for sums that fit
            theirs = theirs.set_column(index, field, theirs.column(index).cast(pa.int64()))
    if ours.schema.types != theirs.schema.types:
        return f"types {theirs.schema.types}, not {ours.schema.types}"
    return _different(_rows(ours), _rows(theirs), ordered, _exact)


def _different(
    ours: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]], ordered: bool, same: Callable[[Any], Any]
) -> str | None:
    """Returns a text with the rows that only one of the answers has, or about a different order; None if
    equal.
    """
    found, wanted = ([tuple(map(same, one)) for one in rows] for rows in (ours, theirs))
    more, missing = Counter(found) - Counter(wanted), Counter(wanted) - Counter(found)
    if more or missing:
        return f"{len(found)} rows, not {len(wanted)}; too many: {_some(more)}; missing: {_some(missing)}"
    return f"the order is {found}, not {wanted}" if ordered and found != wanted else None


def _some(rows: Counter[Any]) -> str:
    return ", ".join(f"{count} x {one}" for one, count in [*rows.items()][:3]) or "none"


def _exact(value: Any) -> Any:
    """Returns a hashable form of a value: NaN equals NaN, -0.0 equals 0, and a mean is rounded."""
    if isinstance(value, float):
        return f"{value + 0.0:.12g}"
    if isinstance(value, list | tuple):
        return tuple(map(_exact, value))
    if isinstance(value, dict):
        return tuple((name, _exact(one)) for name, one in value.items())
    return str(value) if isinstance(value, bool) else value


def _about(value: Any) -> Any:
    """Returns a hashable form like that of `_exact`, but equal for equal numbers of different types."""
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        value = float(value)
    return value.astimezone(UTC) if isinstance(value, datetime) else _exact(value)
