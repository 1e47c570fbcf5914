"""Work that takes long, as jobs: queries whose answers become objects, ingests of objects, rounds.

Started by the query service or `Instance.jobs.start`, run by `dormouse serve` and `dormouse jobs worker`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from dormouse.api.instance import Instance
from dormouse.api.table import Engine, Table
from dormouse.errors import (
    CutExpired,
    DormouseError,
    InvalidData,
    InvalidInput,
    ObjectAlreadyExists,
    TableNotFound,
)
from dormouse.jobs.job import answer_names
from dormouse.jobs.runs import JobFunction, Progress
from dormouse.model.cut import when_of_text
from dormouse.model.json_values import json_value, parse_parameters
from dormouse.model.reshaping import Evolve
from dormouse.model.schema import Schema
from dormouse.model.types import given
from dormouse.objects.names import INCOMING, check_name, hiding, without_paths
from dormouse.objects.store import ObjectStore
from dormouse.reading.streams import Interruption
from dormouse.reading.where import LIMIT_MAX, parse_where, question
from dormouse.verbs import row_work
from dormouse.verbs.row_work import WorkAsked

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.reading.sql.engine import Sessions

OBJECTS_MAX = 10_000
PLAN_SECONDS_MAX = 5.0
"""How long the start of a job waits for a process that plans its statement."""

logger = logging.getLogger(__name__)


class QueryAsked(WorkAsked):
    """A statement with parameters, or a table with what is wanted of it: as the query service takes both."""

    statement: str | None = None
    parameters: list[Any] | dict[str, Any] | None = None
    table: str | None = None
    where: dict[str, Any] | None = None
    columns: list[str] | None = None
    limit: int | None = Field(default=None, ge=0, le=LIMIT_MAX)
    offset: int = Field(default=0, ge=0, le=LIMIT_MAX)
    descending: bool = False
    as_of: str | int | None = None
    verify: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.statement is None) == (self.table is None):
            raise ValueError("give a statement, or a table")
        of_table = self.where, self.columns, self.limit, self.offset or None, self.descending or None
        if self.statement is not None and any(given is not None for given in of_table):
            raise ValueError(
                "where, columns, limit, offset and descending go with a table: a statement says them itself"
            )
        if self.table is not None and self.parameters is not None:
            raise ValueError("parameters go with a statement")
        return self


class IngestAsked(WorkAsked):
    """Objects of the instance's own store, below incoming/, that become rows of a table, once for each id."""

    table: str
    objects: list[str] = Field(min_length=1, max_length=OBJECTS_MAX)
    ingest_id: str | None = None
    engine: Engine = "auto"
    evolve: Evolve | None = None


class IndexAsked(WorkAsked):
    """The index of a row table, which is behind; `columns` are ids of those to have an index of their own."""

    table: str
    columns: list[int] = Field(default_factory=list, max_length=100)


class RoundAsked(WorkAsked):
    """A round of a table."""

    table: str


class CompactAsked(RoundAsked):
    """A round of compaction; `full` makes each leaf one file."""

    engine: Engine = "auto"
    full: bool = False


KINDS: Mapping[str, type[BaseModel]] = {
    "query": QueryAsked,
    "ingest": IngestAsked,
    "compact": CompactAsked,
    "split": RoundAsked,
    "index_rows": IndexAsked,
    "index_row_columns": IndexAsked,
    **row_work.KINDS,
}
"""The kinds of long work, and what each is asked with."""


def check_request(instance: Instance, kind: str, request: object, sessions: Sessions | None = None) -> None:
    """Raises `InvalidInput`, or `TableNotFound`, for what would fail as soon as a worker takes it.

    `sessions` say where a statement is parsed, if not in this process.
    """
    asked = parsed(kind, request)
    if isinstance(asked, QueryAsked):
        _check_query(instance, asked, sessions)
    elif kind in row_work.KINDS:
        row_work.check(instance, asked)
    elif (table := getattr(asked, "table", None)) is not None:
        instance.table(table)
    if isinstance(asked, IngestAsked):
        for name in asked.objects:
            _check_object(name)


def _check_query(instance: Instance, asked: QueryAsked, sessions: Sessions | None) -> None:
    """Raises what a query would raise before it reads a file of a table."""
    if asked.table is not None:
        table = instance.table(asked.table)
        schema = _schema(table, asked)
        question(schema, parse_where(schema, asked.where), asked.columns, asked.limit)
        return
    parameters = given(parse_parameters(asked.parameters))
    interruption = Interruption()
    timer = threading.Timer(PLAN_SECONDS_MAX, interruption.set)
    timer.start()
    try:
        instance.explain_sql(
            str(asked.statement),
            parameters,
            as_of=_moment(asked),
            interruption=interruption,
            sessions=sessions,
        )
    except (InvalidInput, TableNotFound, CutExpired):
        raise
    except DormouseError:
        # all processes that plan are busy, or a part of the instance does not answer now
        logger.info("the statement of a job was not checked: the job itself does", exc_info=True)
    finally:
        timer.cancel()


def _moment(asked: QueryAsked) -> Any:
    return when_of_text(asked.as_of) if isinstance(asked.as_of, str) else asked.as_of


def _schema(table: Table, asked: QueryAsked) -> Schema:
    moment = _moment(asked)
    return table.known_schema if moment is None else table.schema_at(moment)


def parsed(kind: str, request: object) -> Any:
    """A request as the work reads it; `InvalidInput` says what is wrong with it."""
    if kind not in KINDS:
        raise InvalidInput(f"kind {kind!r} is none of {', '.join(KINDS)}")
    try:
        return KINDS[kind].model_validate(request)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg'].removeprefix('Value error, ')}"
            for one in error.errors()[:5]
        ]
        raise InvalidInput(
            f"the request of a job of kind {kind!r} is not valid: {'; '.join(faults)}"
        ) from None


def functions(instance: Instance, sessions: Sessions | None = None) -> dict[str, JobFunction]:
    """What workers of an instance run, by kind; statements run where `sessions` say."""

    def work(kind: str, do: Callable[..., Any]) -> JobFunction:
        return lambda request, progress: do(instance, parsed(kind, request), progress)

    return {
        **row_work.functions(instance, parsed),
        "query": work("query", lambda on, asked, progress: _query(on, asked, progress, sessions)),
        "ingest": work("ingest", _ingest),
        "compact": work("compact", _compact),
        "split": work("split", _split),
        "index_rows": work("index_rows", _index_rows),
        "index_row_columns": work("index_row_columns", _index_rows),
    }


def _query(
    instance: Instance, asked: QueryAsked, progress: Progress, sessions: Sessions | None
) -> dict[str, Any]:
    """Writes the answer as an object: `object`, its `url` in S3, how many `rows` and `bytes`."""
    for name in answer_names(progress.job_id, progress.attempt, progress.attempt):
        with suppress(ObjectAlreadyExists):
            return _answer(instance, asked, progress, sessions, name)
    raise ObjectAlreadyExists(f"there are answers of attempt {progress.attempt} already")


def _answer(
    instance: Instance, asked: QueryAsked, progress: Progress, sessions: Sessions | None, name: str
) -> dict[str, Any]:
    from dormouse.sources.export import export

    interruption = Interruption()
    progress.at_end(interruption.set)
    objects = instance.objects
    try:
        with objects.staged(name) as path, path.open("wb") as sink:
            reader = _Watched(_rows(instance, asked, interruption, sessions), progress)
            rows = export(reader, sink, "parquet")
    except Exception:
        progress.check()  # of an interrupted reader nothing else is worth telling
        raise
    url = objects.uri(name) if objects.url.startswith("s3:") else None  # a path of this machine is none
    return {"object": name, "url": url, "rows": rows, "bytes": objects.size(name)}


def _rows(
    instance: Instance, asked: QueryAsked, interruption: Interruption, sessions: Sessions | None
) -> pa.RecordBatchReader:
    more: dict[str, Any] = {"as_of": _moment(asked), "interruption": interruption, "sessions": sessions}
    more["verify"] = asked.verify
    if asked.table is None:
        parameters = parse_parameters(asked.parameters)
        return instance.sql(str(asked.statement), parameters, **more)
    table = instance.table(asked.table)
    schema = _schema(table, asked)
    more |= {"limit": asked.limit, "offset": asked.offset, "descending": asked.descending}
    return table.query(parse_where(schema, asked.where), asked.columns, **more)


class _Watched:
    """The batches of a reader, which tell how far they are, and end with the job."""

    def __init__(self, reader: pa.RecordBatchReader, progress: Progress) -> None:
        self.schema = reader.schema
        self._reader = reader
        self._progress = progress

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        rows = 0
        with self._reader as reader:
            for batch in reader:
                rows += batch.num_rows
                self._progress(rows)
                yield batch


def _ingest(instance: Instance, asked: IngestAsked, progress: Progress) -> Any:
    table, names = instance.table(asked.table), dict.fromkeys(asked.objects)
    objects = instance.objects
    with _objects_named(objects) as paths, objects.pinned(_checked(names, progress)) as files:
        paths.update({str(path): name for name, path in files.items()})
        report = table.ingest(
            [str(files[name]) for name in asked.objects],
            # a job that is run again, as its worker died, adds its rows once
            ingest_id=asked.ingest_id or f"job:{progress.job_id}",
            engine=asked.engine,
            progress=progress,
            evolve=asked.evolve,
        )
    return json_value(report)


def _checked(names: Iterable[str], progress: Progress) -> Iterator[str]:
    for name in names:
        _check_object(name)
        progress.check()
        yield name


@contextmanager
def _objects_named(objects: ObjectStore) -> Iterator[dict[str, str]]:
    """Gives a dict to be filled with names of objects by their paths; errors say the names."""
    names: dict[str, str] = {}
    try:
        yield names
    except DormouseError as error:
        hide = hiding(objects.url)

        def named(text: str) -> str:
            for path, name in names.items():
                text = text.replace(path, name)
            return hide(text)

        error.args = tuple(named(str(one)) for one in error.args)
        error.data = without_paths(error.data, named)
        raise


def _check_object(name: str) -> None:
    check_name(name)
    if not name.startswith(f"{INCOMING}/"):
        raise InvalidInput(f"object {name!r} is not below {INCOMING}/: put there what is to be ingested")
    from dormouse.sources.data_files import KNOWN, kind_of

    if kind_of(Path(name)) is None:
        raise InvalidData(f"object {name!r} is neither {KNOWN} by its name")


def _compact(instance: Instance, asked: CompactAsked, progress: Progress) -> Any:
    return json_value(
        instance.table(asked.table).compact(engine=asked.engine, full=asked.full, progress=progress)
    )


def _index_rows(instance: Instance, asked: IndexAsked, progress: Progress) -> Any:
    return instance.row_indexes.work(asked.model_dump(), progress)


def _split(instance: Instance, asked: RoundAsked, progress: Progress) -> Any:
    progress.check()
    return json_value(instance.table(asked.table).split())
