"""DuckDB in this process, locked to one object store; each statement has a session of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import duckdb
import pyarrow as pa

from dormouse.data.transform import quoted
from dormouse.errors import EngineFailed
from dormouse.model.parameters import Parameters
from dormouse.model.schema import Schema
from dormouse.objects import ObjectStore
from dormouse.private_folder import spill_folder
from dormouse.query.interruption import Interruption
from dormouse.sql.conditions import text
from dormouse.sql.connection import connection, path_of, secret_of
from dormouse.sql.failures import ReadFailed, named_failures
from dormouse.sql.parsed import Parsed, parsed
from dormouse.sql.remembered import Remembered
from dormouse.sql.results import Rows, rows_of
from dormouse.sql.wanted import Wanted, wanted

MEMORY_SHARE = 0.6
"""Of what DuckDB takes by itself: four fifths of the machine's memory, or of its container's."""
SPARE_MAX = 4
"""Cursors kept with their views, as to make one again takes as long as to plan its table."""
VIEWS_MAX = 64
VIEW_CHARACTERS_MAX = 1_000_000
"""Of all views of one that is kept."""

_of_parents: list[object] = []


class Session(Protocol):
    """What one statement is asked of, call after call."""

    def parsed(self, statement: str) -> Parsed:
        """What it names."""
        ...

    def wanted(self, schemas: Mapping[str, Schema], statement: Parsed, parameters: Parameters) -> Wanted:
        """What it wants of the tables that it names."""
        ...

    def rows(self, views: Mapping[str, str], statement: str, parameters: Parameters) -> Rows:
        """Its answer, with tables as selects of their files; what was asked before is given up."""
        ...

    def close(self) -> None: ...


Sessions: TypeAlias = Callable[[Interruption], Session]


@dataclass(eq=False, slots=True)
class Cursor:
    """A connection of one statement at a time, and what it has views of."""

    opened: duckdb.DuckDBPyConnection
    """The one that it is a cursor of."""
    connection: duckdb.DuckDBPyConnection
    _made: dict[str, str] = field(default_factory=dict)
    """What each view is, by its name in lower case."""

    def make(self, views: Mapping[str, str], parsed: Callable[[], Parsed]) -> None:
        """These views; of those that there are, the ones that the statement would see otherwise go."""
        wanted = {name.lower(): f"{quoted(name)} AS {select}" for name, select in views.items()}
        others = self._made.keys() - wanted.keys()
        if others:
            named = {name.lower() for name in parsed().names}
            for name in others if parsed().lists_tables else others & named:
                self.connection.execute(f"DROP VIEW {quoted(name)}")
                del self._made[name]
        for name, view in wanted.items():
            if self._made.get(name) != view:
                self.connection.execute(f"CREATE OR REPLACE TEMP VIEW {view}")
                self._made[name] = view

    @property
    def is_small(self) -> bool:
        return len(self._made) <= VIEWS_MAX and sum(map(len, self._made.values())) <= VIEW_CHARACTERS_MAX


class Engine:
    """A DuckDB that reads the objects of one store, and nothing else; opened when it is first used."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        memory_limit: str | None = None,
        spill_limit: str | None = None,
        spill_folder: Path | None = None,
        threads: int | None = None,
    ) -> None:
        self._objects = objects
        self._settings = {
            "memory_limit": memory_limit,
            "max_temp_directory_size": spill_limit,
            "threads": None if threads is None else str(threads),
        }
        self._spill_folder = spill_folder
        self.parsed: Remembered[Parsed] = Remembered()
        self.wanted: Remembered[Wanted] = Remembered()
        self._lock = threading.Lock()
        self._opened: duckdb.DuckDBPyConnection | None = None
        self._spare: list[Cursor] = []
        self._secret: str | None = None
        self._pid = 0

    def session(self, interruption: Interruption) -> LocalSession:
        return LocalSession(self, interruption)

    def cursor(self) -> Cursor:
        """One statement's own until it is given back."""
        with self._lock:
            if self._opened is None or self._pid != os.getpid():
                # what a parent had opened does not work in its child, and must not be closed there
                _of_parents.append((self._opened, self._spare))
                self._secret = secret_of(self._objects)
                self._opened, self._spare, self._pid = self._open(), [], os.getpid()
            made = self._spare.pop() if self._spare else Cursor(self._opened, self._opened.cursor())
        self.renew()
        return made

    def give_back(self, cursor: Cursor) -> None:
        """A cursor whose last statement has ended well."""
        with self._lock:
            if cursor.opened is self._opened and cursor.is_small and len(self._spare) < SPARE_MAX:
                self._spare.append(cursor)
                return
        cursor.connection.close()

    def renew(self) -> bool:
        """Reads with the credentials of now; whether they are others. What runs keeps those it began with."""
        secret = secret_of(self._objects)
        with self._lock:
            if secret is None or secret == self._secret or self._opened is None:
                return False
            self._opened.execute(secret)
            self._secret = secret
            return True

    def give_up(self) -> None:
        """After DuckDB failed inside: the next statement gets another."""
        with self._lock:
            self._opened, self._spare = None, []

    def close(self) -> None:
        with self._lock:
            if self._opened is not None and self._pid == os.getpid():
                for cursor in self._spare:
                    cursor.connection.close()
                self._opened.close()
            self._opened, self._spare = None, []

    def _open(self) -> duckdb.DuckDBPyConnection:
        made = connection(self._objects)
        try:
            made.execute(f"SET memory_limit = '{_memory_limit(made)}'")
            for name, value in self._settings.items():
                if value is not None:
                    made.execute(f"SET {name} = {text(value)}")
            folder = self._spill_folder or spill_folder(f"{id(made):x}")
            made.execute(f"SET temp_directory = {text(str(folder))}")
            self._lock_to_objects(made)
        except BaseException:
            made.close()
            raise
        return made

    def _lock_to_objects(self, made: duckdb.DuckDBPyConnection) -> None:
        # as a path, and as the pattern that stands for it alone
        inside = {self._objects.uri("x"), path_of(self._objects, "x")}
        roots = ", ".join(text(name.removesuffix("x")) for name in sorted(inside))
        made.execute(f"SET allowed_directories = [{roots}]")
        # rows come as soon as there are some
        made.execute("SET streaming_buffer_size = '256KiB'")
        made.execute("SET parquet_metadata_cache = true")
        made.execute("SET autoload_known_extensions = false")
        made.execute("SET enable_external_access = false")
        made.execute("SET lock_configuration = true")


def _memory_limit(made: duckdb.DuckDBPyConnection) -> str:
    found = made.execute("SELECT current_setting('memory_limit')").fetchone()
    number, unit = str(found and found[0]).split()
    return f"{float(number) * MEMORY_SHARE:.3f} {unit}"


class LocalSession:
    """A statement's session in this process; closes itself with the rows that it gave."""

    def __init__(self, engine: Engine, interruption: Interruption) -> None:
        self._engine = engine
        self._interruption = interruption
        self._cursor = engine.cursor()
        self._is_open = self._ended_well = True

    def parsed(self, statement: str) -> Parsed:
        return self._engine.parsed.get(statement, None, lambda: parsed(self._cursor.connection, statement))

    def wanted(self, schemas: Mapping[str, Schema], statement: Parsed, parameters: Parameters) -> Wanted:
        def find() -> Wanted:
            return wanted(schemas, statement, parameters, self._interruption)

        if parameters:
            return find()
        return self._engine.wanted.get(statement.text, frozenset(schemas.items()), find)

    def rows(self, views: Mapping[str, str], statement: str, parameters: Parameters) -> Rows:
        try:
            return self._rows(views, statement, parameters)
        except ReadFailed:
            # it may have taken longer than credentials last
            if not self._engine.renew():
                raise
        return self._rows(views, statement, parameters)

    def _rows(self, views: Mapping[str, str], statement: str, parameters: Parameters) -> Rows:
        self._ended_well = False
        with self._watched():
            self._cursor.make(views, lambda: self.parsed(statement))
            rows = rows_of(self._cursor.connection.execute(statement, parameters or None), self._watched)

        def batches() -> Iterator[pa.RecordBatch]:
            yield from rows.batches
            self._ended_well = True

        return Rows(rows.schema, batches())

    def close(self) -> None:
        if not self._is_open:  # its cursor may be another's
            return
        self._is_open = False
        if self._ended_well:
            self._engine.give_back(self._cursor)
        else:
            self._cursor.connection.close()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """What ends when it is interrupted, and fails with errors of ours."""
        try:
            with self._interruption.ending(self._cursor.connection.interrupt), named_failures():
                yield
        except EngineFailed:
            self._engine.give_up()
            raise
