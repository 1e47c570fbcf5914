"""The options of `format("dormouse")`, parsed and checked: instance, table, and the kind of access."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

from dormouse.errors import InvalidInput, InvalidQuery
from dormouse.model.cut import BEGINNING, When
from dormouse.model.reshaping import Evolve, check_evolve
from dormouse.model.text import check_text
from dormouse.verbs.loading import LoadRequest
from dormouse.verbs.reading import ChangesRequest, QueryRequest
from dormouse.verbs.verb import Request, fields_of, form_of, options, parse

if TYPE_CHECKING:
    from pathlib import Path

    from dormouse.api.instance import Instance
    from dormouse.api.table import Table

Metadata = Literal["files", "partitions", "cuts", "jobs", "consumers"]
_WHICH = ("instance", "dsn", "objects", "table")
_QUERY = fields_of(QueryRequest, "table")
_CHANGES = [f"changes_{name}" for name in fields_of(ChangesRequest, "table", "columns")]
_WRITES = (*_WHICH, *fields_of(LoadRequest, "table", "engine"))
_SPARKS = {"checkpointlocation", "path", "queryname", "triggerinterval"}
"""Options of Spark's own streams, which Spark also passes to the source."""
STREAM_BYTES_MAX = 200
_STREAMS = (*_WHICH, "columns", "split_bytes", "changes_after", "max_rows_per_batch")
# includes options of streams, because Spark does not say that it wants the columns of a stream
_READS = (*_WHICH, *_QUERY, "split_bytes", *_CHANGES, "metadata", "max_rows_per_batch")
_OF_PARTS = {"columns", "as_of", "verify"}
"""The options, besides `where`, that a read may have if several tasks divide it among them."""


@dataclass(frozen=True, slots=True)
class TableOptions:
    """A table and its instance, which is given as a folder, or as `dsn` and `objects`."""

    table: str
    instance: str | None = None
    dsn: str | None = field(default=None, repr=False)
    objects: str | None = None

    @staticmethod
    def parse(given: Mapping[str, str]) -> TableOptions:
        """Returns the table that options or the environment name. Raises `InvalidInput`.

        Runs on the driver, because workers may lack its environment variables.
        """
        from dormouse.settings.process import load_settings

        table, settings = given.get("table"), load_settings()
        if not table:
            raise InvalidInput("""the option table is missing: write .option("table", "flights")""")
        folder, dsn, objects = (given.get(name) for name in ("instance", "dsn", "objects"))
        if folder is not None and (dsn is not None or objects is not None):
            raise InvalidInput("give the option instance, or dsn and objects, not both")
        if folder is None and dsn is None and objects is None and settings.objects is None:
            if settings.instance is None:
                raise InvalidInput(
                    "no instance is named: give the option instance, a folder, or dsn and objects, or set "
                    "DORMOUSE_INSTANCE, or DORMOUSE_DSN and DORMOUSE_OBJECTS"
                )
            folder = str(settings.instance)
        if folder is not None:
            if settings.dsn is None:
                return TableOptions(table, folder)
            # passes the DSN on, because a worker without the variable would start a PostgreSQL in the folder
            objects = (_folder(folder) / "objects").as_uri()
        named = TableOptions(table, None, dsn or settings.dsn, objects or settings.objects)
        if named.dsn is None or named.objects is None:
            raise InvalidInput("the options dsn and objects go together: give both, or instance")
        return named

    @contextmanager
    def open(self, *, writes: bool = False, goes_on: bool = False) -> Iterator[Table]:
        """Opens the table, and closes its instance at the end of the block.

        With `writes`, raises an error if the instance is a copy, which cannot be written. With `goes_on`,
        opens it only for reading, without the check that database and objects belong together. Another
        process has made that check, which takes several requests to S3.
        """
        with self._instance(writes=writes, goes_on=goes_on) as instance:
            if writes and instance.refusal is not None:
                raise instance.refusal
            yield instance.table(self.table)

    def _instance(self, *, writes: bool, goes_on: bool) -> Instance:
        if self.dsn is not None and self.objects is not None:
            from dormouse.api.instance import Instance, connect
            from dormouse.objects.store import open_store
            from dormouse.settings.process import load_settings

            if goes_on:
                return Instance(self.dsn, open_store(self.objects), load_settings(), read_only=True)
            return connect(self.dsn, self.objects, read_only=not writes)
        from dormouse.embedded.local import local, opened_again

        path = _folder(str(self.instance))
        # a writer opens the folder several times: for its tasks and for its commit
        return opened_again(path) if writes else local(path, read_only=True)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read: of rows now or at a moment, of changes between two moments, or of metadata."""

    of: TableOptions
    query: Mapping[str, Any]
    """The options of a query except `where`, as Python values."""

    where: Mapping[str, Any] | None = None
    changes: tuple[When | None, When | None] | None = None
    metadata: Metadata | None = None
    split_bytes: int | None = None
    max_rows_per_batch: int | None = None
    """The most rows of a stream's batch. A batch has more only if a single commit has more."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        return None if self.query["columns"] is None else tuple(self.query["columns"])

    @property
    def as_of(self) -> When | None:
        return self.query["as_of"]  # type: ignore[no-any-return]

    @property
    def are_in_order(self) -> bool:
        """True if options such as `limit` need rows in order, so that one task must read them."""
        fields = QueryRequest.model_fields
        return any(
            value != fields[name].default for name, value in self.query.items() if name not in _OF_PARTS
        )

    @staticmethod
    def parse(given: Mapping[str, str]) -> ReadOptions:
        """Returns the options of a read from texts.

        Raises `InvalidInput` and `InvalidQuery` for unknown or malformed options, and for those that do not
        go together.
        """
        check_known(given, _READS)
        rows = [name for name in _QUERY if name != "columns"]
        kinds = {
            "metadata": ("metadata", "columns", *rows, *_CHANGES),
            "changes_after": ("changes_after", *rows),
        }
        for kind, (named, *others) in kinds.items():
            if kind in given and (other := next((name for name in others if name in given), None)):
                raise InvalidInput(f"the options {named} and {other} do not go together")
        if "changes_till" in given and "changes_after" not in given:
            raise InvalidInput(
                f"the option changes_till needs changes_after: a moment, or {BEGINNING!r} for all changes"
            )
        query = parsed(QueryRequest, given)
        between = {name: text for name, text in given.items() if text != BEGINNING or name == "changes_till"}
        changes = parsed(ChangesRequest, between, "changes_")
        return ReadOptions(
            TableOptions.parse(given),
            query,
            where=query.pop("where"),
            changes=(changes["after"], changes["till"]) if "changes_after" in given else None,
            metadata=_metadata(given.get("metadata")),
            split_bytes=_positive(given, "split_bytes"),
            max_rows_per_batch=_positive(given, "max_rows_per_batch"),
        )

    @staticmethod
    def of_stream(given: Mapping[str, str]) -> ReadOptions:
        """Returns the options of a stream, which reads all changes after a moment. Raises `InvalidInput`."""
        plain = {name: value for name, value in given.items() if name not in _SPARKS}
        check_known(plain, _STREAMS)
        if "changes_after" not in plain:
            raise InvalidInput(
                f"a stream reads changes: give the option changes_after, a moment, or {BEGINNING!r} for all"
            )
        return ReadOptions.parse(plain)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of a stream that adds rows to a table.

    `stream` is the stream's unique name, under which the database counts the committed batches.
    """

    of: TableOptions
    stream: str
    evolve: Evolve | None = None

    @staticmethod
    def parse(given: Mapping[str, str]) -> StreamOptions:
        """Returns the options of a stream's writer. Raises `InvalidInput`, also if the stream has no name."""
        check_known((name for name in given if name not in _SPARKS), (*_WHICH, "stream", "evolve"))
        stream = given.get("stream")
        if not stream:
            raise InvalidInput(
                "the option stream is missing: a unique name of the stream, by which its batches are counted"
            )
        check_text("stream", stream, STREAM_BYTES_MAX)
        load = parsed(LoadRequest, {name: given[name] for name in given if name == "evolve"})
        return StreamOptions(TableOptions.parse(given), stream, load["evolve"])


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of a write that adds rows to a table. Repeating it with its `ingest_id` adds nothing."""

    of: TableOptions
    ingest_id: str | None = None
    evolve: Evolve | None = None

    @staticmethod
    def parse(given: Mapping[str, str]) -> WriteOptions:
        """Returns the options of a write. Raises `InvalidInput` for unknown or missing options."""
        check_known(given, _WRITES)
        load = parsed(LoadRequest, given)
        del load["engine"]  # it is Spark
        return WriteOptions(TableOptions.parse(given), **load)


def check_known(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises `InvalidInput` for the first name in `given` that is not in `known`."""
    from dormouse.reading.where import unknown

    listed = tuple(known)
    for name in given:
        if name not in listed:
            raise InvalidInput(str(unknown("option", name, listed)))


def _folder(folder: str) -> Path:
    from pathlib import Path

    from dormouse.embedded.local import prepare
    from dormouse.errors import NotAnInstance

    path = Path(folder).expanduser().absolute()
    if not path.exists():
        raise NotAnInstance(
            f"there is no instance in {path}: the option instance names a folder that this machine and each "
            "worker must see; otherwise give dsn and objects"
        )
    prepare(path, read_only=True)
    return path


def parsed(model: type[Request], given: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """Returns the options of a verb as Python values, parsed from texts.

    `prefix` is the text with which the options' names begin, before the names of the verb's fields.
    """
    check_evolve(given.get("evolve"))
    texts = {name: given[prefix + name] for name in fields_of(model, "table") if prefix + name in given}
    values = {name: _value(model, name, prefix + name, text) for name, text in texts.items()}
    return options(parse(model, {"table": "t", **values}, "the options"), "table")


def _value(model: type[Request], name: str, option: str, text: str) -> Any:
    """Returns the Python value of an option's text, parsed by the form or the type of the field."""
    form, field = form_of(model, name), model.model_fields[name]
    if form is not None and form.of_text is not None:
        return form.of_text(text)
    kinds = {field.annotation, *get_args(field.annotation)}
    if bool in kinds:
        return _flag(option, text)
    if int in kinds:
        return _whole(option, text)
    return _object(option, text) if any(get_origin(kind) is dict for kind in kinds) else text


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidQuery(f"""the option {name} is JSON, like {{"carrier": "UA"}}: {error}""") from None
    if not isinstance(value, dict):
        raise InvalidQuery(f"""the option {name} is a JSON object, like {{"carrier": "UA"}}, not {text}""")
    return value


def _metadata(text: str | None) -> Metadata | None:
    if text is None or text in get_args(Metadata):
        return cast("Metadata | None", text)
    raise InvalidInput(f"the option metadata is one of {', '.join(get_args(Metadata))}, not {text!r}")


def _positive(given: Mapping[str, str], name: str) -> int | None:
    return None if name not in given else _whole(name, given[name], 1, "above 0")


def _whole(name: str, text: str, least: int = 0, which: str = "of rows, at least 0") -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise InvalidInput(f"the option {name} is a whole number {which}, not {text!r}")
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InvalidInput(f"the option {name} is true or false, not {text!r}")
    return text.lower() == "true"
