"""What users hold of a query service: a client, and its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypeVar, cast
from urllib.parse import urlencode

from dormouse.client.http import AnswerReader, Http, ask
from dormouse.client.jobs import RemoteJobs
from dormouse.client.payloads import RemotePayloads
from dormouse.errors import InvalidInput, InvalidName, TableNotFound
from dormouse.model.cut import When, text_of_when
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
from dormouse.verbs import reading
from dormouse.verbs.verb import Verb, of_call

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.client.rows import RemoteRowTable
    from dormouse.rows.columns import Column

T = TypeVar("T")
TIMEOUT_SECONDS = 330.0
"""Of silence: a little longer than a service works on a query by default."""


def connect(
    url: str, token: str | None = None, ca: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> Client:
    """The query service at a URL; it is not asked anything yet.

    `token` is what the service demands, `ca` a file of certificates to trust instead of the system's;
    `timeout_seconds` is how long the service may be silent. Raises `InvalidInput`.
    """
    return Client(Http(url, token, ca, timeout_seconds))


class Client:
    """A query service; a context manager. Threads may share it."""

    def __init__(self, http: Http) -> None:
        self._http = http

    @property
    def jobs(self) -> RemoteJobs:
        """What takes long: queries whose answers become objects, ingests of objects, rounds."""
        return RemoteJobs(self._http)

    @property
    def payloads(self) -> RemotePayloads:
        """The payloads of the instance, for tokens that are for them."""
        return RemotePayloads(self._http)

    def close(self) -> None:
        """Ends all connections, also those whose answers are not read to their end."""
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
        """The table of this name; `TableNotFound`."""
        try:
            check_table_name(named_versions(name) or name)
        except InvalidName:
            raise TableNotFound(f"table {name!r} does not exist", table=name) from None
        found = RemoteTable(self, self._http, name)
        found.describe()
        return found

    __getitem__ = table

    def tables(self) -> list[RemoteTable]:
        """All tables, by name."""
        found = self._http.json("GET", "/v1/tables")["tables"]
        return [RemoteTable(self, self._http, each["name"]) for each in found]

    def row_table(self, name: str) -> RemoteRowTable:
        """The row table of this name. `TableNotFound`, `NotARowTable`."""
        from dormouse.client.rows import RemoteRowTable

        found = RemoteRowTable(self._http, name)
        found.version()
        return found

    def row_tables(self) -> list[RemoteRowTable]:
        """All row tables, by name."""
        from dormouse.client.rows import RemoteRowTable

        found = self._http.json("GET", "/v1/rows")["tables"]
        return [RemoteRowTable(self._http, each["name"]) for each in found]

    def create_row_table(self, name: str, columns: Sequence[Column]) -> RemoteRowTable:
        """Makes a row table. Raises `InvalidColumn`, `TableAlreadyExists` and `InvalidName`."""
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
        """The answer of a SELECT over the instance's tables, by name, streamed: as `Instance.sql`.

        Raises `InvalidQuery`, `InvalidCut`, `CutExpired` and `ObjectDamaged`.
        """
        return cast(AnswerReader, ask(self._http, reading.SQL, of_call(locals())))

    def explain_sql(
        self, statement: str, parameters: Parameters | None = None, *, as_of: When | None = None
    ) -> dict[str, PlanSummary]:
        """What a statement would read of each table that it reads. Raises `InvalidQuery`."""
        plans = ask(self._http, reading.PLAN_SQL, of_call(locals()))["tables"]
        return {name: _summary(plan) for name, plan in plans.items()}


class _Columns(NamedTuple):
    """A table's columns as the service told them, and how it calls them as a whole."""

    schema: Schema
    schema_id: str | None
    """A service of before has none, and refuses it."""

    @staticmethod
    def of(found: Mapping[str, Any]) -> _Columns:
        return _Columns(Schema.from_json(found["schema"]), found.get("schema_id"))

    def where(self, asked: Question) -> dict[str, Any]:
        """Returns what is asked, written by these columns, which the service is told."""
        return {"where": where_json(asked), "schema_id": self.schema_id}


class RemoteTable(Container):
    """One table of an instance, read by way of its query service."""

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
        """The schema and properties, as they are now; `TableNotFound`."""
        found = self._http.json("GET", _path(self.name))
        self._known = _Columns.of(found)
        return self._known.schema, TableProperties(**found["properties"])

    def _by_columns(self, ask: Callable[[_Columns], T], as_of: When | None) -> T:
        """What is answered to what fits the columns; again where those known here were changed since."""
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
        """Returns the answer to what is asked of the columns with `where`."""

        def answer(known: _Columns) -> Any:
            columns, limit = given.get("columns"), given.get("limit")
            asked = question(known.schema, given["where"], columns, limit)
            checked_offset(given.get("offset", 0))
            # those of the table as the service knows them
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
        """The rows of a region, in key order, streamed: as `Table.query`, with its arguments and errors.

        Raises `InstanceError` when the service cannot be reached, or the connection breaks: an answer that
        ends without an error is whole.
        """

        return cast(AnswerReader, self._ask(reading.QUERY, of_call(locals())))

    def explain(
        self, where: Mapping[str, Any] | Region | None = None, *, as_of: When | None = None
    ) -> PlanSummary:
        """What a query would read: partitions, files, bytes. Raises `InvalidQuery`."""

        return _summary(self._ask(reading.PLAN, of_call(locals())))

    def head(
        self, rows: int = 10, columns: Sequence[str] | None = None, *, as_of: When | None = None
    ) -> pa.Table:
        """The first rows in key order, at most so many. Raises as `query` does."""
        return self.query(columns=columns, limit=rows, as_of=as_of).read_all()

    def to_pandas(
        self,
        where: Mapping[str, Any] | Region | None = None,
        columns: Sequence[str] | None = None,
        **how: Any,
    ) -> Any:
        """The rows of `query` as a DataFrame of pandas. Raises as it does, and `DependencyMissing`."""
        return pandas_of(lambda: self.query(where, columns, **how))

    def to_polars(
        self,
        where: Mapping[str, Any] | Region | None = None,
        columns: Sequence[str] | None = None,
        **how: Any,
    ) -> Any:
        """The rows of `query` as a DataFrame of Polars. Raises as it does, and `DependencyMissing`."""
        return polars_of(lambda: self.query(where, columns, **how))

    def count(
        self,
        where: Mapping[str, Any] | Region | None = None,
        *,
        as_of: When | None = None,
        verify: bool = False,
    ) -> int:
        """How many rows there are, exactly, of those that `where` asks for. Raises as `query` does."""

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
        """The answer of a SELECT over this and the instance's other tables, by name."""
        return self._client.sql(statement, parameters, as_of=as_of, verify=verify)

    def changes(
        self, after: When | None, till: When | None = None, columns: Sequence[str] | None = None
    ) -> AnswerReader:
        """The rows that came after a moment and up to another, by default now: as `Table.changes`."""
        return cast(AnswerReader, ask(self._http, reading.CHANGES, of_call(locals()) | {"table": self.name}))

    def status(self) -> TableStatus:
        """What the table consists of now."""
        found = self._http.json("GET", f"{_path(self.name)}?counts=true")["counts"]
        return _status(found)


_STATUS_PARTS: Mapping[str, Any] = {
    "rounds": LastRound,
    "consumers": ConsumerStatus,
    "history_held_by": Holder,
}
_TIMES = ("_at", "since", "until")


def _status(found: Mapping[str, Any]) -> TableStatus:
    values = {name: found[name] for name in TableStatus.__dataclass_fields__ if name in found}
    for name, kind in _STATUS_PARTS.items():
        values[name] = tuple(kind(**with_times(one, _TIMES)) for one in found.get(name, ()))
    values["one_key_partitions"] = tuple(found.get("one_key_partitions", ()))
    return TableStatus(**with_times(values, _TIMES))


def _path(table: str, *rest: str) -> str:
    return "/".join(("/v1/tables", path_segment(table), *rest))


def _summary(plan: Mapping[str, Any]) -> PlanSummary:
    return PlanSummary(**{name: plan[name] for name in PlanSummary.__dataclass_fields__})
