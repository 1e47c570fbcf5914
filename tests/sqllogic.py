"""A comparison of SELECTs of sqllogictest files, on tables of Dormouse and in DuckDB.

python -m tests.sqllogic FOLDER [--json]

All statements of a file run in DuckDB. Before a SELECT, the tables that it reads are copied to Dormouse. The
two answers are compared with each other, not with those in the file. The files are SQLite's or DuckDB's and
are not part of this repository.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Timer
from typing import Any, TypeVar

import duckdb
import pyarrow as pa
from duckdb import StatementType

import dormouse as dm
from dormouse.api.instance import Instance
from dormouse.errors import DormouseError
from dormouse.model.schema import Field, Schema
from dormouse.model.types import BOOLEAN, BYTES, DOUBLE, INT, LIST, LONG, MAP, STRING, TIMESTAMP, DataType
from dormouse.reading.streams import Interruption
from tests.sql_judges import different
from tests.sql_values import quoted
from tests.sqllogic_files import LeftOut, records

_OF_DUCKDB = re.compile(r"\b(collate|macro|function)\b", re.IGNORECASE)
"""Words of statements that define something that only DuckDB has. It may replace a function of a
common name.
"""
T = TypeVar("T")
ROWS_MAX = 100_000
SECONDS_MAX = 10
_TYPES = {
    "INTEGER": INT,
    "BIGINT": LONG,
    "VARCHAR": STRING,
    "BLOB": BYTES,
    "DOUBLE": DOUBLE,
    "BOOLEAN": BOOLEAN,
    "TIMESTAMP WITH TIME ZONE": TIMESTAMP,
}
_KEY = "dormouse_row"
"""A column that numbers the rows of a table whose first column cannot be a key."""
_NOT_RUN = {
    # they would leave the database, or be known to DuckDB only
    *(StatementType.SET, StatementType.VARIABLE_SET, StatementType.PRAGMA, StatementType.LOAD),
    *(StatementType.ATTACH, StatementType.DETACH, StatementType.COPY, StatementType.EXPORT),
}


@dataclass
class Found:
    """The outcomes of the SELECTs, and for each reason the number of SELECTs that were refused or
    left out.
    """

    files: int = 0
    selects: int = 0
    right: int = 0
    in_key_order: int = 0
    """The number of right answers that depend on the order of rows. They are right for rows in key order."""
    refused_by_both: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    files_left_out: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)


def type_of(name: str) -> DataType:
    """Returns the type of Dormouse for a type of DuckDB; raises `LeftOut` if there is none."""
    if name.endswith("[]"):
        return LIST(type_of(name[:-2]))
    if parts := re.fullmatch(r"MAP\((\w+), (.+)\)", name):
        return MAP(type_of(parts[1]), type_of(parts[2]))
    if name not in _TYPES:
        raise LeftOut("type " + re.sub(r"\(.*", "", name))
    return _TYPES[name]


class Copies:
    """The tables of Dormouse, with the rows that the tables of a DuckDB have now."""

    def __init__(self, instance: Instance, db: duckdb.DuckDBPyConnection) -> None:
        self._instance = instance
        self._db = db
        self._copied: dict[str, tuple[pa.Table, str]] = {}
        for table in instance.tables():
            instance.drop_table(table.name)

    def of(self, statement: str) -> str:
        """Returns the statement, changed to read copies of its tables; raises `LeftOut` if a table cannot be
        copied.
        """
        known = dict(self._db.execute(_RELATIONS).fetchall())
        ((parsed,),) = self._db.execute("select json_serialize_sql(?)", [statement]).fetchall()
        names = {name.lower() for name in re.findall(r'"table_name":"(.*?)"', parsed)}
        for name in self._copied.keys() - known.keys():
            self._drop(name)
        for name in names & known.keys():
            if known[name] != "table":
                raise LeftOut(known[name])
        wrapped = [text for name in sorted(names & known.keys()) if (text := self._copy(name))]
        return _with(statement, wrapped)

    def in_key_order(self, ask: Callable[[], T]) -> T:
        """Returns the result of `ask` while DuckDB's tables have their rows in the order of the copies."""
        keys = {name: rows.column_names[0] for name, (rows, text) in self._copied.items() if not text}
        try:
            for name, key in keys.items():
                ordered = f"from memory.main.{quoted(name)} order by {quoted(key)}, rowid"
                self._db.execute(f"create temp table {quoted(name)} as {ordered}")
            return ask()
        finally:
            for name in keys:
                self._db.execute(f"drop table if exists temp.main.{quoted(name)}")

    def _copy(self, name: str) -> str:
        """Updates the copy of a table. If the copy has an additional column, returns a CTE that hides it,
        else ''.
        """
        rows = self._db.execute(f"from memory.main.{quoted(name)} limit {ROWS_MAX + 1}").to_arrow_table()
        before, text = self._copied.get(name, (None, ""))
        if before is None or not rows.equals(before):
            if len(rows) > ROWS_MAX:
                raise LeftOut("large tables")
            text = self._make(name, rows)
            self._copied[name] = rows, text
        return text

    def _drop(self, name: str) -> None:
        self._copied.pop(name, None)
        for copy in (name, f"{name}_rows"):
            with suppress(DormouseError):
                self._instance.drop_table(copy)

    def _make(self, name: str, rows: pa.Table) -> str:
        described = self._db.execute(f"describe memory.main.{quoted(name)}").fetchall()
        types = {column: type_of(kind) for column, kind, *_ in described}
        first, *others = types
        whole = not types[first].is_key_type or rows[first].null_count
        self._drop(name)
        if whole:
            rows = rows.add_column(0, _KEY, pa.array(range(len(rows)), pa.int64()))
        try:
            keys = [Field(_KEY, LONG)] if whole else [Field(first, types[first])]
            values = [Field(one, types[one], nullable=True) for one in (types if whole else others)]
            made = self._instance.create_table(f"{name}_rows" if whole else name, Schema(keys, [], values))
        except DormouseError as error:
            raise LeftOut(_reason(error)) from None
        made.ingest(rows, engine="local")
        columns = ", ".join(map(quoted, types))
        return f"{quoted(name)} as (select {columns} from {quoted(f'{name}_rows')})" if whole else ""


_RELATIONS = """
select lower(table_name), if(temporary, 'temporary tables', 'table') from duckdb_tables()
where schema_name = 'main'
union all select lower(view_name), 'views' from duckdb_views() where not internal
"""


def _with(statement: str, tables: list[str]) -> str:
    if not tables:
        return statement
    bare = re.sub(r"\A(\s*--[^\n]*\n)*\s*", "", statement)
    begun = re.match(r"with\s+(recursive\s+)?|", bare, re.IGNORECASE)[0]
    return f"{begun or 'with '}{', '.join(tables)}{',' if begun else ''} {bare[len(begun) :]}"


class File:
    """One file of sqllogictest, whose statements run one after another."""

    def __init__(self, instance: Instance, name: str, outcome: Found) -> None:
        self._instance = instance
        self._name = name
        self._found = outcome

    def run(self, text: str) -> None:
        self._found.files += 1
        with duckdb.connect(config={"enable_external_access": "false", "memory_limit": "2GB"}) as db:
            db.execute("set TimeZone = 'UTC'")
            copies = Copies(self._instance, db)
            try:
                for record in records(text):
                    self._run(db, copies, record.sql, record.line)
            except LeftOut as why:
                self._found.files_left_out[str(why)] += 1

    def _run(self, db: duckdb.DuckDBPyConnection, copies: Copies, text: str, line: int) -> None:
        try:
            parsed = db.extract_statements(text)
        except duckdb.Error:
            return
        if len(parsed) == 1 and parsed[0].type == StatementType.SELECT:
            self._found.selects += 1
            try:
                self._compare(db, copies, text, line)
            except LeftOut as why:
                self._found.left_out[str(why)] += 1
            return
        if found := _OF_DUCKDB.search(text):
            raise LeftOut(found[0].lower())
        for one in parsed:
            if one.type not in _NOT_RUN:
                with suppress(duckdb.Error), _limited(db.interrupt):
                    db.execute(one)

    def _compare(self, db: duckdb.DuckDBPyConnection, copies: Copies, text: str, line: int) -> None:
        try:
            ours: pa.Table | Exception = self._answer(copies.of(text))
        except (DormouseError, duckdb.Error, pa.ArrowException) as error:
            ours = error
        try:
            with _limited(db.interrupt):
                theirs = db.execute(text).to_arrow_table()
        except duckdb.Error as error:
            if not isinstance(ours, Exception):
                self._wrong(text, line, f"DuckDB refuses it: {error}")
            self._found.refused_by_both += isinstance(ours, Exception)
            return
        if isinstance(ours, Exception):
            self._found.refused[_reason(ours)] += 1
        elif (why := _different(ours, theirs, text)) is None:
            self._found.right += 1
        elif copies.in_key_order(lambda: _different(ours, db.execute(text).to_arrow_table(), text)):
            self._wrong(text, line, why)
        else:
            self._found.right += 1
            self._found.in_key_order += 1

    def _answer(self, statement: str) -> pa.Table:
        interruption = Interruption()
        with _limited(interruption.set):
            return self._instance.sql(statement, interruption=interruption).read_all()

    def _wrong(self, text: str, line: int, why: str) -> None:
        self._found.wrong.append({"file": self._name, "line": line, "statement": text, "why": why})


@contextmanager
def _limited(end: Callable[[], object]) -> Iterator[None]:
    is_over = Event()

    def over() -> None:
        is_over.set()  # before the interrupted query raises its error
        end()

    timer = Timer(SECONDS_MAX, over)
    timer.start()
    try:
        yield
    except (duckdb.Error, DormouseError):
        if is_over.is_set():
            raise LeftOut(f"takes more than {SECONDS_MAX} s") from None
        raise
    finally:
        timer.cancel()


def _different(ours: pa.Table, theirs: pa.Table, text: str) -> str | None:
    try:
        return different(ours, theirs, ordered=_has_order(text))
    except (ValueError, OverflowError, TypeError):
        raise LeftOut("values that Python has not") from None


def _has_order(text: str) -> bool:
    """Returns whether the whole statement may have an order, which is so if ORDER BY is outside of
    parentheses.
    """
    return "order by" in text.lower().rpartition(")")[2]


def _reason(error: Exception) -> str:
    """Returns the text of an error without names and numbers, so that equal reasons can be counted."""
    return re.sub(r"(?s)['\"].*?['\"]|\d+|\n.*", "…", str(error))[:90]


def run(folder: Path, instance: Instance) -> Found:
    """Runs all files of a folder."""
    found = Found()
    for path in sorted(folder.rglob("*.test")):
        File(instance, str(path.relative_to(folder)), found).run(path.read_text("utf-8", "replace"))
    return found


def shown(outcome: Found) -> str:
    def listed(title: str, counts: Mapping[str, int]) -> list[str]:
        rows = sorted(counts.items(), key=lambda item: -item[1])
        return [f"{title}: {sum(counts.values())}", *(f"  {count:6} {why}" for why, count in rows)]

    lines = [
        f"{outcome.selects} SELECTs of {outcome.files} files: {outcome.right} right "
        f"({outcome.in_key_order} of them in the keys' order), "
        f"{len(outcome.wrong)} wrong, {outcome.refused_by_both} refused by DuckDB, too",
        *listed("refused", outcome.refused),
        *listed("left out", outcome.left_out),
        *listed("files left out from some statement on", outcome.files_left_out),
    ]
    lines += [f"\n{one['file']}:{one['line']}\n{one['statement']}\n-> {one['why']}" for one in outcome.wrong]
    return "\n".join(lines)


def main() -> None:
    parser = ArgumentParser(prog="python -m tests.sqllogic", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="one object on one line")
    given = parser.parse_args()
    with TemporaryDirectory() as folder, dm.local(Path(folder) / "lake") as instance:
        found = run(given.folder, instance)
    print(json.dumps(vars(found)) if given.json else shown(found))


if __name__ == "__main__":
    main()
