"""Named, described queries from the `.sql` file beside a module.

    -- name: add_files
    -- Adds files that are not tracked yet.
    insert into {file} (filename) select unnest(%(filenames)s::text[]);

`{file}` is an identifier, given to `Query.on`. `%(filenames)s` is a value, given to psycopg. Every other
brace and percent sign is SQL and stays as it is written, so that a query can be read and run as SQL.

`execute_each` sends several statements, each its own transaction, before it waits for the first answer. It
uses libpq's pipeline mode with a Sync after each statement, so a failure or conflict of one does not affect
the rest. The client prepares the next statement while the server runs one, and waits for one round trip in
all. `execute_together` sends the statements of one transaction with a single Sync, so that the server answers
all of them at once, and skips those after an error.
"""

from __future__ import annotations

import re
import select
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib import resources
from itertools import count
from pathlib import Path
from struct import pack
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import abc, errors, generators, sql
from psycopg.adapt import AdaptersMap, Dumper, PyFormat, Transformer
from psycopg.pq import ExecStatus, Format, TransactionStatus
from psycopg.pq.abc import PGresult

# Statements that run often, with numbered parameters, and prepared by the server.

_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%%")
WALKS_ARRAYS = 17_00_00
"""The version of PostgreSQL since which one index scan finds all values of an array efficiently.

It does so whatever the table's statistics are.
"""

PREPARED_MAX = 2_000
"""The limit of prepared statements of a connection. A committer of many tables has about 20 for each."""


class Statement:
    """A query whose named parameters are translated only once, and not by psycopg at each execution.

    `older` is the query for servers of versions before `WALKS_ARRAYS`. Its parameters must be the same, in
    the same order.
    """

    def __init__(self, query: sql.Composable, *, older: sql.Composable | None = None) -> None:
        self._text, self._names = _numbered(query)
        self._older = self._text if older is None else _numbered(older)[0]

    def execute(self, conn: psycopg.Connection[Any], values: Mapping[str, Any]) -> psycopg.Cursor[Any]:
        """Runs the statement with those of the values that its parameters name."""
        cursor = psycopg.RawCursor(conn)
        return cursor.execute(self.text(conn), self.given(values), prepare=True)

    def fetch(self, conn: psycopg.Connection[Any], values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Runs the statement, which returns rows, like `execute`, and returns its rows.

        It needs a third of the processor time of a cursor, which makes many objects.
        """
        is_alone = conn.autocommit and conn.pgconn.transaction_status == TransactionStatus.IDLE
        if conn.prepare_threshold is None or not is_alone:
            return self.execute(conn, values).fetchall()
        given = self.given(values)
        adapters = _Prepared.of(conn).adapters(conn)
        buffers = adapters.dump_sequence(given, [PyFormat.AUTO] * len(given))
        try:
            result = _result(conn, (self.text(conn), adapters.types or ()), buffers, adapters.formats)
        except errors.InvalidSqlStatementName:  # see execute_each
            return self.execute(conn, values).fetchall()
        return _rows(adapters, result)

    def given(self, values: Mapping[str, Any]) -> list[Any]:
        """Returns the values that the statement names, in the order of their numbers."""
        return [values[name] for name in self._names]

    def text(self, conn: psycopg.Connection[Any]) -> bytes:
        """Returns the statement's text for the version of the connection's server."""
        return self._text if conn.pgconn.server_version >= WALKS_ARRAYS else self._older


def _numbered(query: sql.Composable) -> tuple[bytes, tuple[str, ...]]:
    """Returns the query's text with numbered parameters, and their names in that order."""
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        return f"${numbers.setdefault(match[1], len(numbers) + 1)}" if match[1] else "%"

    return _PLACEHOLDER.sub(numbered, query.as_string(None)).encode(), tuple(numbers)


# Python values as PostgreSQL arrays, which is much faster than adapting each element.

_UUID = psycopg.adapters.types["uuid"]
_UUID_BYTES = pack("!i", 16)
_NULL = pack("!i", -1)


@dataclass(frozen=True, slots=True)
class Uuids:
    """An array of UUIDs, each as its 16 bytes, or null."""

    values: Sequence[bytes | None]

    def __str__(self) -> str:
        """Returns the array as a literal."""
        return "{" + ",".join(["null" if v is None else v.hex() for v in self.values]) + "}"


class UuidsTextDumper(Dumper):
    """An adapter that writes the array as a literal, for queries that contain their values."""

    oid = _UUID.array_oid

    def dump(self, obj: Uuids) -> bytes:
        return str(obj).encode()


class UuidsDumper(Dumper):
    """An adapter that writes the binary format that `array_recv` reads.

    The format is a header (number of dimensions, null flag, element type), then the length and lower bound,
    then the elements.
    """

    format = Format.BINARY
    oid = _UUID.array_oid

    def dump(self, obj: Uuids) -> bytes:
        values = obj.values
        if not values:
            return pack("!iiI", 0, 0, _UUID.oid)
        head = pack("!iiIii", 1, None in values, _UUID.oid, len(values), 1)
        return head + b"".join([_NULL if v is None else _UUID_BYTES + v for v in values])


def texts(values: Sequence[str]) -> str:
    """Returns an array literal of texts. The texts may be array literals themselves."""
    joined = '","'.join(values)
    if values and "\\" not in joined and joined.count('"') == 2 * (len(values) - 1):
        return f'{{"{joined}"}}'  # nothing to escape
    quoted = ['"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' for v in values]
    return "{" + ",".join(quoted) + "}"


def integers(values: Sequence[int | None]) -> str:
    if None not in values:
        return "{" + ",".join(map(str, values)) + "}"
    return "{" + ",".join(["null" if v is None else str(v) for v in values]) + "}"


def booleans(values: Iterable[bool]) -> str:
    return "{" + ",".join(["t" if v else "f" for v in values]) + "}"


def bytes_(values: Iterable[bytes | None]) -> str:
    return "{" + ",".join(["null" if v is None else f'"\\\\x{v.hex()}"' for v in values]) + "}"


IdentifierPath = str | tuple[str, ...]
"""A name, or a name qualified by its schema: `("dormouse", "file_17")`."""

_NAME = re.compile(r"^--\s*name:\s*(?P<name>\S*)\s*$")
_IDENTIFIER = re.compile(r"\{([a-z_][a-z0-9_]*)\}")
_VALUE = re.compile(r"%\([^)]+\)[sbt]")
_PERCENT = re.compile(rf"(?P<value>{_VALUE.pattern})|%%?")


@dataclass(frozen=True)
class Query:
    """One or several SQL statements, with a name and a description."""

    name: str
    description: str
    text: str

    def on(self, **identifiers: IdentifierPath) -> sql.Composed:
        """Returns the query with its `{name}` placeholders replaced by quoted identifiers.

        Raises ValueError unless exactly the query's own identifiers are given.
        """
        return _compose(self, tuple(sorted(identifiers.items())))

    def including(self, **parts: Query) -> Query:
        """Returns the query with `{name}` placeholders replaced by the text of other queries."""
        text = self.text
        for name, part in parts.items():
            text = text.replace(f"{{{name}}}", part.text)
        return replace(self, text=text)

    def with_columns(self, **columns: str) -> Query:
        """Returns the query as a part of another one, whose columns replace `%(name)s` parameters."""
        text = self.text.removesuffix(";")
        for name, column in columns.items():
            text = text.replace(f"%({name})s", column)
        return replace(self, text=text)

    def literally(self, **values: int | str) -> Query:
        """Returns the query with `{name}` placeholders replaced by literals, for DDL, which takes no
        parameters.
        """
        text = self.text
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", sql.Literal(value).as_string(None))
        return replace(self, text=text)

    @cached_property
    def identifiers(self) -> frozenset[str]:
        return frozenset(_IDENTIFIER.findall(self.text))


class Queries(dict[str, Query]):
    """The queries of one file, by name."""

    def __init__(self, source: str, queries: Mapping[str, Query]) -> None:
        super().__init__(queries)
        self._source = source

    def __missing__(self, name: str) -> Query:
        raise KeyError(f"{self._source} has no query named {name!r}; it has {', '.join(sorted(self))}")


def load(package_or_file: str, name: str) -> Queries:
    """Returns the queries of `<name>.sql` in a package (`__package__`), or beside a module (`__file__`).

    Raises ValueError for a repeated name, a missing name or description, or an empty query.
    """
    if package_or_file.endswith(".py"):
        text = Path(package_or_file).with_name(f"{name}.sql").read_text("utf-8")
    else:
        text = resources.files(package_or_file).joinpath(f"{name}.sql").read_text("utf-8")
    return parse(text, source=f"{name}.sql")


def parse(text: str, source: str) -> Queries:
    """Returns the queries of a text; `source` is its name in errors."""
    queries: dict[str, Query] = {}
    for name, lines in _sections(text, source):
        if name in queries:
            raise ValueError(f"{source}: the query {name!r} is there twice")
        queries[name] = _query(name, lines, source)
    return Queries(source, queries)


def _sections(text: str, source: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = None, list[str]()
    for line in text.splitlines():
        if (heading := _NAME.match(line)) is None:
            lines.append(line)
            continue
        if name is not None:
            yield name, lines
        name, lines = heading["name"], []
        if not name.isidentifier():
            raise ValueError(f"{source}: {name!r} is not a name for a query")
    if name is None:
        raise ValueError(f"{source}: no query; each begins with '-- name: ...'")
    yield name, lines


def _query(name: str, lines: list[str], source: str) -> Query:
    described = 0
    while described < len(lines) and lines[described].startswith("--"):
        described += 1
    description = " ".join(line.lstrip("- ").strip() for line in lines[:described]).strip()
    text = "\n".join(lines[described:]).strip()
    if not description:
        raise ValueError(f"{source}: the query {name!r} has no description below its name")
    if not text:
        raise ValueError(f"{source}: the query {name!r} has no SQL")
    return Query(name, description, text)


@lru_cache(maxsize=10_000)
def _compose(query: Query, identifiers: tuple[tuple[str, IdentifierPath], ...]) -> sql.Composed:
    given = dict(identifiers)
    if given.keys() != query.identifiers:
        expected = ", ".join(sorted(query.identifiers)) or "none"
        raise ValueError(
            f"the query {query.name!r} takes the identifiers {expected}, not {', '.join(given) or 'none'}"
        )
    rendered = _IDENTIFIER.sub(lambda match: _quoted(given[match[1]]), query.text)
    # psycopg reads `%%` as a percent sign if there are values, and `%` if there are none
    percent = "%%" if _VALUE.search(rendered) else "%"
    text = _PERCENT.sub(lambda match: match["value"] or percent, rendered)
    # rendered once here, so that an execution need not quote identifiers again
    return sql.Composed([sql.SQL(text)])


def _quoted(path: IdentifierPath) -> str:
    return sql.Identifier(*((path,) if isinstance(path, str) else path)).as_string(None)


Call = tuple[Statement, Mapping[str, Any]]
Key = tuple[bytes, tuple[int, ...]]
"""A statement's text, and the type ids of its values."""
Answer = list[tuple[Any, ...]] | psycopg.Error


@dataclass(slots=True)
class _Context:
    """The adapters of a connection without the connection, whose time zone is UTC and encoding UTF-8."""

    adapters: AdaptersMap
    connection: None = None


@dataclass(slots=True, weakref_slot=True)
class _Prepared:
    """The prepared statements of a connection: their names on the server, oldest first.

    `shared` converts their values and rows; it caches how. One statement after another uses it. It is None if
    the connection has another encoding.
    """

    shared: abc.Transformer | None
    names: dict[Key, bytes] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=count)

    @staticmethod
    def of(conn: psycopg.Connection[Any]) -> _Prepared:
        """Returns the statements of a connection."""
        known = _prepared.get(conn)
        if known is None:
            # not of the connection itself, which would then never be freed
            shared = Transformer(_Context(conn.adapters)) if conn.info.encoding == "utf-8" else None
            known = _prepared.setdefault(conn, _Prepared(shared))
        return known

    def adapters(self, conn: psycopg.Connection[Any]) -> abc.Transformer:
        """Returns what converts the values and rows of the connection's next statement."""
        return self.shared or Transformer(conn)

    def add(self, key: Key) -> tuple[bytes, bytes | None]:
        """Returns a new statement's name, and the name of the one that has to make room for it, if any."""
        oldest = self.names.pop(next(iter(self.names))) if len(self.names) >= PREPARED_MAX else None
        self.names[key] = b"each_%d" % next(self.numbers)
        return self.names[key], oldest


_prepared: WeakKeyDictionary[psycopg.Connection[Any], _Prepared] = WeakKeyDictionary()


def _result(
    conn: psycopg.Connection[Any], key: Key, buffers: Sequence[Any], formats: Sequence[Format] | None
) -> PGresult:
    """Returns the result of a statement, which is prepared first if necessary. Raises the server's error."""
    known = _Prepared.of(conn)
    name = known.names.get(key)
    try:
        if name is None:
            name, oldest = known.add(key)
            if oldest is not None:
                conn.pgconn.send_query_params(b"deallocate " + oldest, None)
                _received(conn)
            conn.pgconn.send_prepare(name, *key)
            _received(conn)
        conn.pgconn.send_query_prepared(name, buffers, formats)
        return _received(conn)
    except errors.InvalidSqlStatementName:
        known.names.pop(key, None)
        raise


def _rows(adapters: abc.Transformer, result: PGresult) -> list[tuple[Any, ...]]:
    adapters.set_pgresult(result)
    try:
        return adapters.load_rows(0, result.ntuples, tuple)
    finally:
        adapters.set_pgresult(None)  # it may be large


def _received(conn: psycopg.Connection[Any]) -> PGresult:
    """Sends what was begun, and returns the result of one statement. Raises the server's error."""
    result: PGresult = conn.wait(generators.execute(conn.pgconn))[-1]
    if result.status == ExecStatus.FATAL_ERROR:
        raise errors.error_from_result(result)
    return result


def execute_each(
    conn: psycopg.Connection[Any], calls: Iterable[Call], *, repeats_reads: bool = False
) -> list[Answer]:
    """Executes statements in order, each as its own transaction. `conn` must be in autocommit mode.

    Returns, for each statement, its rows or its error. Its commit has ended then. Errors of iterating over
    `calls` propagate. If the connection dies, raises OperationalError and closes the connection. The outcomes
    are unknown then.

    A statement that the server no longer had is executed after the others. With `repeats_reads`, those that
    follow it are then executed again, so that none sees an earlier moment than one before it.
    """
    made: list[Call] = []
    found = _answers(conn, ([call] for call in _noted(calls, made)))
    # psycopg drops all prepared statements of a connection after a rollback or a DROP of its own
    lost = [n for n, answer in enumerate(found) if isinstance(answer, errors.InvalidSqlStatementName)]
    if lost and repeats_reads:
        lost = list(range(lost[0], len(found)))
    for n, answer in zip(lost, _answers(conn, [[made[n]] for n in lost]) if lost else (), strict=True):
        found[n] = answer
    return found


def _noted(calls: Iterable[Call], made: list[Call]) -> Iterator[Call]:
    """Yields calls, and appends each to `made`, because `calls` may be an iterator."""
    for call in calls:
        made.append(call)
        yield call


_BEGIN, _COMMIT, _ROLLBACK = (Statement(sql.SQL(text)) for text in ("begin", "commit", "rollback"))


def execute_together(conn: psycopg.Connection[Any], calls: Iterable[Call]) -> psycopg.Error | None:
    """Executes statements in one transaction and one round trip; `conn` must be in autocommit mode.

    Returns None once it is committed, or the first error, after which nothing was applied. If the connection
    dies, raises OperationalError and closes the connection. The outcome is unknown then.
    """
    calls = [(_BEGIN, {}), *calls, (_COMMIT, {})]
    for _ in range(2):
        [answer] = _answers(conn, [calls])
        if conn.pgconn.transaction_status != TransactionStatus.IDLE:
            _answers(conn, [[(_ROLLBACK, {})]])  # not by psycopg, which would drop all prepared statements
        if not isinstance(answer, errors.InvalidSqlStatementName):  # see execute_each
            break
    return answer if isinstance(answer, psycopg.Error) else None


def _answers(conn: psycopg.Connection[Any], groups: Iterable[Iterable[Call]]) -> list[Answer]:
    """Returns the answer to each group of calls: its first error, or the rows of its last call."""
    try:
        conn.pgconn.enter_pipeline_mode()
        pipeline = _Pipeline(conn)
        for calls in groups:
            if pipeline.sent:
                pipeline.exchange()
            pipeline.send(calls)
        pipeline.exchange(wait_for=pipeline.sent)
        conn.pgconn.exit_pipeline_mode()
    except BaseException:
        conn.close()  # it still has answers that will not be read
        raise
    return pipeline.found


@dataclass(slots=True)
class _Group:
    """The prepared statements of a group: their names, and those that the server is preparing, in order."""

    names: dict[Key, bytes] = field(default_factory=dict)
    preparing: list[Key] = field(default_factory=list)


class _Pipeline:
    """The state of a pipeline: the groups of statements sent, and the answers received."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = conn
        self._pgconn = conn.pgconn
        self._prepared = _Prepared.of(conn)
        self._adapters = self._prepared.adapters(conn)
        self._groups: list[_Group] = []
        self._answer: Answer = []
        self.sent = 0
        self.found: list[Answer] = []

    def send(self, calls: Iterable[Call]) -> None:
        group = _Group()
        self._groups.append(group)
        for statement, values in calls:
            given = statement.given(values)
            buffers = self._adapters.dump_sequence(given, [PyFormat.AUTO] * len(given))
            key, formats = (statement.text(self._conn), self._adapters.types or ()), self._adapters.formats
            # with a pooler between, the next statement may run in another session; a rollback must not fail
            if self._conn.prepare_threshold is None or statement is _ROLLBACK:
                self._pgconn.send_query_params(key[0], buffers, key[1], formats)
            else:
                self._pgconn.send_query_prepared(self._name(key, group), buffers, formats)
        self._pgconn.pipeline_sync()
        self.sent += 1

    def exchange(self, wait_for: int = 0) -> None:
        """Sends all pending data and receives the available answers, at least `wait_for` of them."""
        while True:
            unsent = bool(self._pgconn.flush())
            self._pgconn.consume_input()
            self._receive()
            if not unsent and len(self.found) >= wait_for:
                return
            poll = select.poll()
            # answers are read even while the server accepts no data, because it may wait for that
            poll.register(self._pgconn.socket, select.POLLIN | (select.POLLOUT if unsent else 0))
            poll.poll()

    def _receive(self) -> None:
        while len(self.found) < self.sent and not self._pgconn.is_busy():
            result = self._pgconn.get_result()
            if result is None:
                continue  # end of one command's results
            if result.status == ExecStatus.PIPELINE_SYNC:
                self._answered()
            elif result.status == ExecStatus.COMMAND_OK and not result.command_status:
                # prepared, and stays prepared whatever follows
                self._groups[len(self.found)].preparing.pop(0)
            elif result.status == ExecStatus.TUPLES_OK:
                self._answer = _rows(self._adapters, result)
            elif result.status == ExecStatus.FATAL_ERROR:
                self._answer = errors.error_from_result(result)

    def _answered(self) -> None:
        if isinstance(self._answer, psycopg.Error):
            group, names = self._groups[len(self.found)], self._prepared.names
            is_lost = isinstance(self._answer, errors.InvalidSqlStatementName)
            for key, name in group.names.items():
                # it was not prepared; a later group may have prepared it by another name since
                if (is_lost or key in group.preparing) and names.get(key) == name:
                    del names[key]
        self.found.append(self._answer)
        self._answer = []

    def _name(self, key: Key, group: _Group) -> bytes:
        """Returns the name of a prepared statement; prepares it first if necessary."""
        names = self._prepared.names
        if key not in names:
            name, oldest = self._prepared.add(key)
            if oldest is not None:
                self._pgconn.send_query_params(b"deallocate " + oldest, None)
            group.preparing.append(key)
            self._pgconn.send_prepare(name, *key)
        group.names[key] = names[key]
        return names[key]
