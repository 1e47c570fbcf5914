"""The client of a query service, and its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypeVar, cast
from urllib.parse import urlencode
from uuid import uuid4

from dormouse.client.http import AnswerReader, Http, ask
from dormouse.client.jobs import RemoteJobs
from dormouse.client.payloads import RemotePayloads
from dormouse.errors import InvalidInput, InvalidName, TableNotFound
from dormouse.model.cut import When, text_of_when
from dormouse.model.edits import COMPUTED_MAX, ExecuteReport
from dormouse.model.json_values import with_times
from dormouse.model.region import Region
from dormouse.model.schema import Schema
from dormouse.model.table import Container, TableProperties, check_table_name, named_versions
from dormouse.model.text import path_segment
from dormouse.model.types import Parameters
from dormouse.reading.planner import PlanSummary
from dormouse.reading.streams import pandas_of, polars_of
from dormouse.reading.where import SCHEMAS_CHASED_MAX, Question, checked_offset, question, where_json
from dormouse.state.files.round_reports import LastRound
from dormouse.state.history.consumers import ConsumerStatus
from dormouse.state.history.history import TableStatus
from dormouse.state.history.retention import Holder
from dormouse.verbs import editing, reading
from dormouse.verbs.verb import Verb, of_call

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.client.rows import RemoteRowTable
    from dormouse.rows.columns import Column

T = TypeVar("T")
TIMEOUT_SECONDS = 330.0
"""The time for which the service may be silent: a little longer than its default limit for a query."""


def connect(
    url: str, token: str | None = None, ca: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> Client:
    """Returns a client for the query service at a URL, without connecting yet.

    `token` is the secret that the service demands. `ca` is a file of certificates to trust instead of the
    system's. `timeout_seconds` is the time for which the service may be silent. Raises `InvalidInput`.
    """
    return Client(Http(url, token, ca, timeout_seconds))


class Client:
    """The connection to a query service, as a context manager. Threads may share it."""

    def __init__(self, http: Http) -> None:
        self._http = http

    @property
    def jobs(self) -> RemoteJobs:
        """The jobs of the instance: queries whose answers become objects, ingests of objects, and rounds of
        tables.
        """
        return RemoteJobs(self._http)

    @property
    def payloads(self) -> RemotePayloads:
        """The payloads of the instance. The token must have the right to use them."""
        return RemotePayloads(self._http)

    def close(self) -> None:
        """Closes all connections, even those of answers that were not read to the end."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._http.url!r})"

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the tables."""
        return iter([table.name for table in self.tables()])

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Client cannot be pickled: connect again in the other process")

    def table(self, name: str) -> RemoteTable:
        """Returns the table of this name. Raises `TableNotFound`."""
        try:
            check_table_name(named_versions(name) or name)
        except InvalidName:
            raise TableNotFound(f"table {name!r} does not exist", table=name) from None
        found = RemoteTable(self, self._http, name)
        found.describe()
        return found

    __getitem__ = table

    def tables(self) -> list[RemoteTable]:
        """Returns all tables, sorted by name."""
        found = self._http.json("GET", "/v1/tables")["tables"]
        return [RemoteTable(self, self._http, each["name"]) for each in found]

    def row_table(self, name: str) -> RemoteRowTable:
        """Returns the row table of this name. Raises `TableNotFound` and `NotARowTable`."""
        from dormouse.client.rows import RemoteRowTable

        found = RemoteRowTable(self._http, name)
        found.version()
        return found

    def row_tables(self) -> list[RemoteRowTable]:
        """Returns all row tables, sorted by name."""
        from dormouse.client.rows import RemoteRowTable

        found = self._http.json("GET", "/v1/rows")["tables"]
        return [RemoteRowTable(self._http, each["name"]) for each in found]

    def create_row_table(self, name: str, columns: Sequence[Column]) -> RemoteRowTable:
        """Creates a row table. Raises `InvalidColumn`, `TableAlreadyExists` and `InvalidName`."""
        from dormouse.client.rows import RemoteRowTable, run
        from dormouse.verbs import rows

        run(self.jobs, rows.CREATE, {"name": name, "columns": columns})
        return RemoteRowTable(self._http, name)

    def sql(
        self,
        statement: str,
        parameters: Parameters | None = None,
        *,
        as_of: When | None = None,
        verify: bool = False,
    ) -> AnswerReader:
        """Returns the answer of a SELECT over the instance's tables, as a stream. See `Instance.sql`.

        Raises `InvalidQuery`, `InvalidCut`, `CutExpired` and `ObjectDamaged`.
        """
        return cast(AnswerReader, ask(self._http, reading.SQL, of_call(locals())))

    def execute(
        self,
        statement: str,
        parameters: Parameters | None = None,
        *,
        edit_id: str | None = None,
        dry_run: bool = False,
        attempts_max: int = COMPUTED_MAX,
    ) -> ExecuteReport:
        """Runs one INSERT, UPDATE, DELETE, TRUNCATE or MERGE INTO once. See `Instance.execute`.

        The token must have the right to write by SQL. If the connection breaks, call it again with the same
        `edit_id`: then the statement is run once.
        """
        given = of_call(locals())
        # so that a repeated request changes nothing twice
        given["edit_id"] = edit_id or uuid4().hex
        done = ask(self._http, editing.EXECUTE, given)
        return ExecuteReport(**{name: done[name] for name in ExecuteReport.__dataclass_fields__})

    def explain_sql(
        self, statement: str, parameters: Parameters | None = None, *, as_of: When | None = None
    ) -> dict[str, PlanSummary]:
        """Returns the plan of a statement for each table that it reads. Raises `InvalidQuery`."""
        plans = ask(self._http, reading.PLAN_SQL, of_call(locals()))["tables"]
        return {name: _summary(plan) for name, plan in plans.items()}


class _Columns(NamedTuple):
    """The columns of a table and the id of this set of columns, as the service described them."""

    schema: Schema
    schema_id: str | None
    """The id of the set of columns; None from an older service, which refuses this field."""

    @staticmethod
    def of(described: Mapping[str, Any]) -> _Columns:
        return _Columns(Schema.from_json(described["schema"]), described.get("schema_id"))

    def where(self, question: Question) -> dict[str, Any]:
        """Returns a question as JSON for these columns, with their id."""
        return {"where": where_json(question), "schema_id": self.schema_id}


class RemoteTable(Container):
    """One table of an instance, read through its query service."""

    def __init__(self, client: Client, http: Http, name: str) -> None:
        self.name = name
        self._client = client
        self._http = http
        self._known: _Columns | None = None

    def __repr__(self) -> str:
        return f"RemoteTable({self.name!r})"

    @property
    def schema(self) -> Schema:
        return self.describe()[0]

    @property
    def properties(self) -> TableProperties:
        return self.describe()[1]

    def describe(self) -> tuple[Schema, TableProperties]:
        """Returns the current schema and properties. Raises `TableNotFound`."""
        found = self._http.json("GET", _path(self.name))
        self._known = _Columns.of(found)
        return self._known.schema, TableProperties(**found["properties"])

    def _by_columns(self, ask: Callable[[_Columns], T], as_of: When | None) -> T:
        """Returns the result of `ask`, called with the table's columns.

        With `as_of`, they are the columns of that moment. Otherwise they are the columns known here; if the
        table's columns have changed since, `ask` is called again with the new ones.
        """
        if as_of is not None:
            then = text_of_when(as_of)
            named = {"cut" if isinstance(then, int) else "as_of": then}
            return ask(_Columns.of(self._http.json("GET", f"{_path(self.name)}?{urlencode(named)}")))
        known = self._known or self._now()
        for _ in range(SCHEMAS_CHASED_MAX):
            try:
                return ask(known)
            except InvalidInput:
                before, known = known, self._now()
                if known == before:
                    raise
        return ask(known)

    def _ask(self, verb: Verb, given: Mapping[str, Any]) -> Any:
        """Returns the answer of a verb whose request has `where`, with conditions in the table's current
        columns.
        """

        def answer(known: _Columns) -> Any:
            columns, limit = given.get("columns"), given.get("limit")
            asked = question(known.schema, given["where"], columns, limit)
            checked_offset(given.get("offset", 0))
            # the table's columns, as the service has them
            wanted = {} if columns is None else {"columns": asked.columns}
            return ask(self._http, verb, {**given, **known.where(asked), **wanted, "table": self.name})

        return self._by_columns(answer, given["as_of"])

    def _now(self) -> _Columns:
        self.describe()
        return cast(_Columns, self._known)

    def query(
        self,
        where: Mapping[str, Any] | Region | None = None,
        columns: Sequence[str] | None = None,
        *,
        limit: int | None = None,
        offset: int = 0,
        descending: bool = False,
        as_of: When | None = None,
        verify: bool = False,
    ) -> AnswerReader:
        """Returns the rows of a region in key order, streamed, with the options of `Table.query`.

        Raises `InstanceError` when the service cannot be reached or the connection breaks. An answer that
        ends without an error is complete.
        """

        return cast(AnswerReader, self._ask(reading.QUERY, of_call(locals())))

    def explain(
        self, where: Mapping[str, Any] | Region | None = None, *, as_of: When | None = None
    ) -> PlanSummary:
        """Returns the plan of a query: its partitions, files and bytes. Raises `InvalidQuery`."""

        return _summary(self._ask(reading.PLAN, of_call(locals())))

    def head(
        self, rows: int = 10, columns: Sequence[str] | None = None, *, as_of: When | None = None
    ) -> pa.Table:
        """Returns the first rows in key order, at most `rows`. Raises the errors of `query`."""
        return self.query(columns=columns, limit=rows, as_of=as_of).read_all()

    def to_pandas(
        self,
        where: Mapping[str, Any] | Region | None = None,
        columns: Sequence[str] | None = None,
        **how: Any,
    ) -> Any:
        """Returns the rows of `query` as a pandas DataFrame. Raises its errors, and `DependencyMissing`."""
        return pandas_of(lambda: self.query(where, columns, **how))

    def to_polars(
        self,
        where: Mapping[str, Any] | Region | None = None,
        columns: Sequence[str] | None = None,
        **how: Any,
    ) -> Any:
        """Returns the rows of `query` as a Polars DataFrame. Raises its errors, and `DependencyMissing`."""
        return polars_of(lambda: self.query(where, columns, **how))

    def count(
        self,
        where: Mapping[str, Any] | Region | None = None,
        *,
        as_of: When | None = None,
        verify: bool = False,
    ) -> int:
        """Returns the exact number of rows that match `where`. Raises the errors of `query`."""

        def ask(known: _Columns) -> int:
            key = known.schema.key_names[:1]
            return sum(batch.num_rows for batch in self.query(where, key, as_of=as_of, verify=verify))

        if where:
            return self._by_columns(ask, as_of)
        answer = self.sql(f'select count(*) from "{self.name}"', as_of=as_of, verify=verify)
        return int(answer.read_all().column(0)[0].as_py())

    def sql(
        self,
        statement: str,
        parameters: Parameters | None = None,
        *,
        as_of: When | None = None,
        verify: bool = False,
    ) -> AnswerReader:
        """Returns the answer of a SELECT over this table and the instance's other tables."""
        return self._client.sql(statement, parameters, as_of=as_of, verify=verify)

    def changes(
        self, after: When | None, till: When | None = None, columns: Sequence[str] | None = None
    ) -> AnswerReader:
        """Returns the rows that changed after one moment and up to another, by default now. See
        `Table.changes`.
        """
        return cast(AnswerReader, ask(self._http, reading.CHANGES, of_call(locals()) | {"table": self.name}))

    def status(self) -> TableStatus:
        """Returns the counts of the table as it is now."""
        found = self._http.json("GET", f"{_path(self.name)}?counts=true")["counts"]
        return _status(found)


_STATUS_PARTS: Mapping[str, Any] = {
    "rounds": LastRound,
    "consumers": ConsumerStatus,
    "history_held_by": Holder,
}
_TIMES = ("_at", "since", "until")


def _status(described: Mapping[str, Any]) -> TableStatus:
    values = {name: described[name] for name in TableStatus.__dataclass_fields__ if name in described}
    for name, kind in _STATUS_PARTS.items():
        values[name] = tuple(kind(**with_times(one, _TIMES)) for one in described.get(name, ()))
    values["one_key_partitions"] = tuple(described.get("one_key_partitions", ()))
    return TableStatus(**with_times(values, _TIMES))


def _path(table: str, *rest: str) -> str:
    return "/".join(("/v1/tables", path_segment(table), *rest))


def _summary(plan: Mapping[str, Any]) -> PlanSummary:
    return PlanSummary(**{name: plan[name] for name in PlanSummary.__dataclass_fields__})
