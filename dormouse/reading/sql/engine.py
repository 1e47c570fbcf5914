"""A DuckDB in this process that can read only one object store.

Each statement has a session of its own.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

import duckdb

from dormouse.data.transform import quoted
from dormouse.errors import EngineFailed, not_installed
from dormouse.model.locks import process_lock
from dormouse.model.types import Field, Parameters
from dormouse.objects.inlined import inlined_folder, place_of
from dormouse.objects.staging import spill_folder
from dormouse.objects.store import ObjectStore
from dormouse.reading.sql.conditions import text
from dormouse.reading.sql.evaluating import evaluated
from dormouse.reading.sql.moments import macros
from dormouse.reading.sql.parsed import Parsed, parsed
from dormouse.reading.sql.results import ReadFailed, Rows, named_failures, rows_of
from dormouse.reading.sql.scalars import Relations, Scalar, scalar
from dormouse.reading.sql.streaming import streamable
from dormouse.reading.sql.wanted import Planning, Wanted, wanted
from dormouse.reading.sql.writes import Written, written
from dormouse.reading.streams import Interruption
from dormouse.settings.process import environment

if TYPE_CHECKING:
    import pyarrow as pa

# DuckDB connections that can read an object store.

_OF_SECRET = {
    "access_key_id": "key_id",
    "secret_access_key": "secret",
    "session_token": "session_token",
    "region": "region",
}
_VARIABLES = {
    # later variables take precedence, as for the store itself
    "AWS_ENDPOINT": "endpoint",
    "AWS_ENDPOINT_URL": "endpoint",
    "AWS_ENDPOINT_URL_S3": "endpoint",
    "AWS_DEFAULT_REGION": "region",
    "AWS_REGION": "region",
    "AWS_ACCESS_KEY_ID": "access_key_id",
    "AWS_SECRET_ACCESS_KEY": "secret_access_key",
    "AWS_SESSION_TOKEN": "session_token",
}
_GLOB = re.compile(r"[*?[]")


def connection(objects: ObjectStore) -> duckdb.DuckDBPyConnection:
    """Returns a connection to an in-memory database, in UTC, that can read the store's objects.

    A statement names an object by its `path_of`.
    """
    # the needed extensions are installed beside DuckDB, so that nothing is downloaded
    made = duckdb.connect(config={"autoinstall_known_extensions": False})
    try:
        # global, so that it also applies to all cursors
        made.execute("SET GLOBAL TimeZone = 'UTC'")
        if secret := secret_of(objects):
            _load_httpfs(made)
            made.execute(secret)
    except BaseException:
        made.close()
        raise
    return made


def path_of(objects: ObjectStore, name: str) -> str:
    """Returns the path or URL of an object for DuckDB, with glob characters escaped."""
    return _GLOB.sub(r"[\g<0>]", place_of(objects, name))


def _load_httpfs(made: duckdb.DuckDBPyConnection) -> None:
    """Loads DuckDB's httpfs extension of the same version from its installed Python package."""
    try:
        import duckdb_extension_httpfs
    except ImportError:
        raise not_installed("duckdb-extension-httpfs", "sql") from None
    folder = Path(duckdb_extension_httpfs.__file__).parent / "extensions" / f"v{duckdb.__version__}"
    made.load_extension(str(folder / "httpfs.duckdb_extension"))


def secret_of(objects: ObjectStore) -> str | None:
    """Returns the SQL statement that gives DuckDB the current S3 credentials; None for a folder.

    Temporary credentials expire, so the statement is made anew from time to time.
    """
    if urlsplit(objects.url).scheme != "s3":
        return None
    from dormouse.objects.s3 import s3_options

    # AWS's environment variables, which DuckDB ignores
    variables = environment()
    found = {ours: variables[name] for name, ours in _VARIABLES.items() if variables.get(name)}
    found |= s3_options(objects.options)
    scope = text(f"s3://{urlsplit(objects.url).netloc}/")
    given = [f"{ours} {text(found[name])}" for name, ours in _OF_SECRET.items() if name in found]
    if "endpoint" in found:
        parts = urlsplit(found["endpoint"])
        tls = str(parts.scheme != "http").lower()
        given += [f"endpoint {text(parts.netloc + parts.path)}", "url_style 'path'", f"use_ssl {tls}"]
    return f"CREATE OR REPLACE SECRET dormouse (TYPE s3, SCOPE {scope}, {', '.join(given)})"


# A cache of results for short statements, since services and dashboards repeat them.

T = TypeVar("T")
STATEMENTS_MAX = 256
CHARACTERS_MAX = 10_000
"""The longest statement whose result is cached, so that the cache stays small."""


class Remembered(Generic[T]):
    """A least-recently-used cache with a statement and a further key as its key. Threads may share it."""

    def __init__(self) -> None:
        self._lock = process_lock()
        self._found: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, statement: str, more: Hashable, make: Callable[[], T]) -> T:
        """Returns the cached value, or makes and caches it; an error of `make` is not cached."""
        if not isinstance(statement, str) or len(statement) > CHARACTERS_MAX:
            return make()
        key = statement, more
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        found = make()
        with self._lock:
            self._found[key] = found
            if len(self._found) > STATEMENTS_MAX:
                self._found.popitem(last=False)
        return found


MEMORY_SHARE = 0.6
"""The share of DuckDB's default memory limit that it may use.

The default is four fifths of the memory of the machine or container.
"""
_PREFETCHES = "prefetch_all_parquet_files"
_of_parents: list[object] = []


class Session(Protocol):
    """The steps in which one statement is run, one after another."""

    def parsed(self, statement: str) -> Parsed:
        """Parses the statement, and returns the names and properties found in it."""
        ...

    def written(self, statement: str, parameters: Parameters) -> Written:
        """Parses a statement that writes; see `writes.written`."""
        ...

    def wanted(self, planning: Planning) -> Wanted:
        """Returns the ranges of row keys that a statement needs of each table that it names."""
        ...

    def scalar(self, text: str, relations: Relations, repeats: bool) -> Scalar:
        """Checks an expression; see `scalars.scalar`."""
        ...

    def evaluated(
        self,
        rows: pa.RecordBatch,
        expressions: Mapping[Field, str],
        used: Sequence[Field],
        moment: int | None = None,
    ) -> Rows:
        """Returns the values of checked expressions over some rows; see `evaluating.evaluated`.

        `rows` have at least one row and one column. For `moment`, see `rows`. Read the answer before the next
        call.
        """
        ...

    def rows(
        self,
        views: Mapping[str, str],
        statement: str,
        parameters: Parameters,
        moment: int | None = None,
        reads_most: bool = False,
    ) -> Rows:
        """Runs the statement. `views` has a SELECT of each table's files.

        `moment` is the current time, as in `Planning`; None leaves it to DuckDB. `reads_most` says that the
        statement needs most rows of the files. A second call ends the answer of the first.
        """
        ...

    def close(self) -> None: ...


Sessions: TypeAlias = Callable[[Interruption], Session]
VIEWS_CHARACTERS_MAX = 100_000
"""The most characters in the views of a connection that is kept, so that these connections stay small."""


@dataclass(eq=False, slots=True)
class Cursor:
    """A connection for one statement, and the SELECT of each of its views, by the name in lower case."""

    database: duckdb.DuckDBPyConnection
    connection: duckdb.DuckDBPyConnection
    views: dict[str, str] = field(default_factory=dict)
    _prefetches: bool = False

    def prefetch(self, whole: bool) -> None:
        """Makes DuckDB read whole columns of a row group at once, or only the pages that it needs.

        It reads remote files as it sees fit. Of a local file, it otherwise reads each page by itself.
        """
        if whole != self._prefetches:
            self.connection.execute(f"SET SESSION {_PREFETCHES} = {whole}")
            self._prefetches = whole


class Engine:
    """A DuckDB that reads only the objects of one store; opened when it is first used.

    It keeps up to `cursors_kept` connections of ended statements for statements over exactly the same files,
    which then need no new views.
    """

    def __init__(
        self,
        objects: ObjectStore,
        *,
        memory_limit: str | None = None,
        spill_limit: str | None = None,
        spill_folder: Path | None = None,
        threads: int | None = None,
        cursors_kept: int = 0,
    ) -> None:
        self._objects = objects
        self._cursors_kept = cursors_kept
        self._kept: list[Cursor] = []
        """The kept connections, the one used last at the end."""
        self._settings = {
            "memory_limit": memory_limit,
            "max_temp_directory_size": spill_limit,
            "threads": None if threads is None else str(threads),
        }
        self._spill_folder = spill_folder
        self.parsed: Remembered[Parsed] = Remembered()
        self.wanted: Remembered[Wanted] = Remembered()
        self._lock = process_lock()
        self._opened: duckdb.DuckDBPyConnection | None = None
        self._secret: str | None = None
        self._pid = 0

    def session(self, interruption: Interruption) -> LocalSession:
        return LocalSession(self, interruption)

    def cursor(self) -> Cursor:
        """Returns a connection without views for one statement, which must close it or give it to `keep`."""
        with self._lock:
            if self._opened is None or self._pid != os.getpid():
                # connections that a parent process opened do not work in its child, and must not be closed
                # there
                _of_parents.append((self._opened, self._kept))
                self._secret = secret_of(self._objects)
                self._opened, self._kept, self._pid = self._open(), [], os.getpid()
            made = Cursor(self._opened, self._opened.cursor())
        self.renew()
        return made

    def kept(self, views: Mapping[str, str]) -> Cursor | None:
        """Returns a kept connection that has exactly these views, as `cursor` does; None without one."""
        with self._lock:
            if self._pid != os.getpid():
                return None
            found = next((one for one in reversed(self._kept) if one.views == views), None)
            if found is not None:
                self._kept.remove(found)
        if found is not None:
            self.renew()
        return found

    def keep(self, cursor: Cursor) -> None:
        """Keeps a connection on which no statement runs any more, and closes the one used least recently."""
        with self._lock:
            is_small = sum(map(len, cursor.views.values())) <= VIEWS_CHARACTERS_MAX
            if cursor.database is not self._opened or not is_small or not self._cursors_kept:
                dropped: Cursor | None = cursor
            else:
                self._kept.append(cursor)
                dropped = self._kept.pop(0) if len(self._kept) > self._cursors_kept else None
        if dropped is not None:
            dropped.connection.close()

    def renew(self) -> bool:
        """Gives DuckDB the store's current credentials; returns whether they have changed.

        A running statement keeps its own.
        """
        secret = secret_of(self._objects)
        with self._lock:
            if secret is None or secret == self._secret or self._opened is None:
                return False
            self._opened.execute(secret)
            self._secret = secret
            return True

    def give_up(self) -> None:
        """Drops the connection after DuckDB failed internally; the next statement gets a new one."""
        with self._lock:
            self._opened, self._kept = None, []

    def close(self) -> None:
        with self._lock:
            if self._opened is not None and self._pid == os.getpid():
                self._opened.close()  # and all of its cursors
            self._opened, self._kept = None, []

    def _open(self) -> duckdb.DuckDBPyConnection:
        made = connection(self._objects)
        try:
            [[found]] = made.execute("SELECT current_setting('memory_limit')").fetchall()
            number, unit = str(found).split()
            made.execute(f"SET memory_limit = '{float(number) * MEMORY_SHARE:.3f} {unit}'")
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
        # the folder as a path, and as its escaped pattern
        inside = {self._objects.uri("x"), path_of(self._objects, "x"), inlined_folder(self._objects) + "x"}
        roots = ", ".join(text(name.removesuffix("x")) for name in sorted(inside))
        made.execute(f"SET allowed_directories = [{roots}]")
        # a small buffer returns the first rows early
        made.execute("SET streaming_buffer_size = '256KiB'")
        made.execute("SET parquet_metadata_cache = true")
        # objects never change; remote ones are asked for, so that a file that was erased is not read again
        made.execute("SET validate_external_file_cache = 'VALIDATE_REMOTE'")
        # the system caches local files
        made.execute(f"SET enable_external_file_cache = {self._objects.local_path('x') is None}")
        made.execute("SET autoload_known_extensions = false")
        made.execute("SET enable_external_access = false")
        made.execute(f"SET allowed_configs = ['{_PREFETCHES}']")
        made.execute("SET lock_configuration = true")


class LocalSession:
    """The session of one statement, run by the DuckDB of this process."""

    def __init__(self, engine: Engine, interruption: Interruption) -> None:
        self._engine = engine
        self._interruption = interruption
        self._cursor: Cursor | None = None
        self._leaves: object | None = None
        """The last statement, if it may still run, or leaves macros to the connection beside its views."""

    def parsed(self, statement: str) -> Parsed:
        return self._engine.parsed.get(statement, None, lambda: parsed(self._opened().connection, statement))

    def written(self, statement: str, parameters: Parameters) -> Written:
        with self._watched():
            return written(self._opened().connection, statement, parameters)

    def wanted(self, planning: Planning) -> Wanted:
        def find() -> Wanted:
            return wanted(planning, self._interruption)

        if planning.parameters or planning.moment is not None:
            return find()
        statement, schemas = planning.statement, frozenset(planning.schemas.items())
        return self._engine.wanted.get(statement.text, (statement.run, schemas), find)

    def scalar(self, text: str, relations: Relations, repeats: bool) -> Scalar:
        return scalar(text, relations, repeats=repeats)

    def evaluated(
        self,
        rows: pa.RecordBatch,
        expressions: Mapping[Field, str],
        used: Sequence[Field],
        moment: int | None = None,
    ) -> Rows:
        connection = self._opened().connection
        with self._watched():
            for macro in () if moment is None or self._leaves is not None else macros(moment):
                connection.execute(macro)
            self._leaves = self._leaves or object()
            return evaluated(connection, rows, expressions, used, self._watched)

    def rows(
        self,
        views: Mapping[str, str],
        statement: str,
        parameters: Parameters,
        moment: int | None = None,
        reads_most: bool = False,
    ) -> Rows:
        try:
            return self._rows(views, statement, parameters, moment, reads_most)
        except ReadFailed:
            # the credentials may have expired meanwhile
            if not self._engine.renew():
                raise
        return self._rows(views, statement, parameters, moment, reads_most)

    def _rows(
        self,
        views: Mapping[str, str],
        statement: str,
        parameters: Parameters,
        moment: int | None,
        reads_most: bool,
    ) -> Rows:
        cursor = self._with_views({name.lower(): select for name, select in views.items()})
        connection, running = cursor.connection, object()
        with self._watched():
            self._leaves = running
            for macro in () if moment is None else macros(moment):
                connection.execute(macro)
            # replaces views of these names that this statement made before
            for name, select in views.items():
                if cursor.views.get(name.lower()) != select:
                    connection.execute(f"CREATE OR REPLACE TEMP VIEW {quoted(name)} AS {select}")
                    cursor.views[name.lower()] = select
            cursor.prefetch(reads_most)
            statement = streamable(connection, statement, parameters, views)
            rows = rows_of(connection.execute(statement, parameters or None), self._watched)

        def batches() -> Iterator[pa.RecordBatch]:
            yield from rows.batches
            if self._leaves is running and moment is None:
                self._leaves = None

        return Rows(rows.schema, batches())

    def close(self) -> None:
        """Closes the connection, so that its views and variables end, or leaves it to the engine."""
        cursor, self._cursor = self._cursor, None
        if cursor is None:
            return
        if self._leaves is None and cursor.views and not self._interruption.is_set:
            self._engine.keep(cursor)
        else:
            cursor.connection.close()

    def _opened(self) -> Cursor:
        if self._cursor is None:
            self._cursor = self._engine.cursor()
        return self._cursor

    def _with_views(self, views: Mapping[str, str]) -> Cursor:
        """Returns a connection that already has these views if there is one, otherwise the session's own."""
        if self._cursor is not None and self._cursor.views == views:
            return self._cursor
        kept = self._engine.kept(views)
        if kept is None:
            return self._opened()
        self.close()
        self._cursor, self._leaves = kept, None
        return kept

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Interrupts DuckDB when the interruption is set; replaces DuckDB's errors by Dormouse's."""
        try:
            interrupt = self._opened().connection.interrupt
            with self._interruption.ending(interrupt), named_failures():
                yield
        except EngineFailed:
            self._engine.give_up()
            raise
