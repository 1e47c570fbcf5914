"""Commit requests: changes of a table's metadata as values, and as JSON that travels through a queue."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any, ClassVar, NamedTuple, TypeAlias, get_args

from dormouse.errors import CommitRequestTooNew, InvalidCommitRequest, InvalidInput, one_line
from dormouse.model.file_reference import (
    FILENAME_BYTES_MAX,
    AssignJobIdRequest,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.model.region import KeyValue
from dormouse.model.stored_conditions import CONDITION_BYTES_MAX
from dormouse.model.table import TableRecord
from dormouse.model.text import check_text
from dormouse.state.commits import encoding
from dormouse.state.files.deletions import NewDeletion
from dormouse.state.files.edits import Read

VERSION = encoding.VERSION
POINTER = "pointer"
"""The type of a message whose body is stored as an object; see `commits.pointers`."""
BODY_BYTES_MAX = 64 * 2**20
"""The largest request as JSON, in bytes. A larger one is refused; the caller sends several smaller ones."""
POINT_BYTES_MAX = 2**20
ONE_PART_EACH = "each table must be in one part only"
_ATTEMPT_ID = re.compile("[0-9a-f]{32}")
_SNAPSHOT = re.compile("[0-9]{1,19}:[0-9]{1,19}:([0-9]{1,19}(,[0-9]{1,19})*)?")
_POINT_MAX = (1 << 63) - 1
_SHORTENED_CHARACTERS_MAX = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class _AnyRequest:
    """A change with an id. A request is applied once, even if it is sent several times.

    `holds` describes the field that contains the items, a tuple of at least one: its name and the items'
    type.
    """

    version: ClassVar[int] = VERSION
    kind: ClassVar[str]
    holds: ClassVar[tuple[str, type]]
    commit_id: str

    def __post_init__(self) -> None:
        try:
            check_text("commit_id", self.commit_id)
            self._check()
        except InvalidInput as error:
            raise _invalid(self.commit_id, error) from error

    def _check(self) -> None:
        name, expected = self.holds
        object.__setattr__(self, name, _all_are(expected, name, getattr(self, name)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request(_AnyRequest):
    """A change of one table."""

    table: str

    @property
    def items(self) -> tuple[Any, ...]:
        """The parts of the change, in order."""
        return getattr(self, self.holds[0])  # type: ignore[no-any-return]

    def _check(self) -> None:
        check_text("the table's name", self.table)
        _AnyRequest._check(self)
        if (attempt_id := attempt_of(self)) is not None:
            _check_attempt(attempt_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class AddFiles(_Request):
    """A request to add files that are not tracked yet.

    - `attempt_id`: the write attempt that the commit ends.
    - `source`: a digest, 16 bytes, of the data from which the files were made. It is recorded with the commit
      id.
    """

    kind: ClassVar[str] = "add_files"
    holds: ClassVar[tuple[str, type]] = ("files", FileWithReferences)
    files: tuple[FileWithReferences, ...]
    attempt_id: str | None = None
    source: bytes | None = None

    def _check(self) -> None:
        _Request._check(self)
        if self.source is not None and not (isinstance(self.source, bytes) and len(self.source) == 16):
            raise InvalidInput(f"source must be 16 bytes, not {_shortened(self.source)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignJobIds(_Request):
    """A request to assign references to jobs, all or nothing."""

    kind: ClassVar[str] = "assign_job_ids"
    holds: ClassVar[tuple[str, type]] = ("requests", AssignJobIdRequest)
    requests: tuple[AssignJobIdRequest, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaceFileReferences(_Request):
    """A request to replace the inputs of jobs by their outputs; each job may fail alone.

    `attempt_id` is the write attempt that the commit ends. With one, the request is refused at once if its
    inputs are missing.
    """

    kind: ClassVar[str] = "replace_file_references"
    holds: ClassVar[tuple[str, type]] = ("requests", ReplaceFileReferencesRequest)
    requests: tuple[ReplaceFileReferencesRequest, ...]
    attempt_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFileReferences(_Request):
    """A request to replace references by others to the same files; each reference may fail alone."""

    kind: ClassVar[str] = "split_file_references"
    holds: ClassVar[tuple[str, type]] = ("requests", SplitFileReferenceRequest)
    requests: tuple[SplitFileReferenceRequest, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteCollectedFiles(_Request):
    """A request to delete the records of files whose objects were deleted, all or nothing."""

    kind: ClassVar[str] = "delete_collected_files"
    holds: ClassVar[tuple[str, type]] = ("filenames", str)
    filenames: tuple[str, ...]

    def _check(self) -> None:
        _Request._check(self)
        for name in self.filenames:
            check_text("filename", name, FILENAME_BYTES_MAX)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPartition(_Request):
    """A request to divide a leaf partition at a point of the row key `field` (None: the first row key)."""

    kind: ClassVar[str] = "split_partition"
    partition_id: str
    point: KeyValue
    field: str | None = None

    @property
    def items(self) -> tuple[SplitPartition, ...]:
        return (self,)

    @property
    def typed_point(self) -> dict[str, KeyValue]:
        """The point with the name of its type, as in a message: `encoding._Point`."""
        return {type(self.point).__name__: self.point}

    def _check(self) -> None:
        check_text("the table's name", self.table)
        check_text("partition_id", self.partition_id)
        if self.field is not None:
            check_text("field", self.field)
        _check_point(self.point)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEdit:
    """The changes of one table in an `EditTables` request.

    - `files`: the files to add, whose rows the deletions do not concern.
    - `deletions`: the deletions to record, for columns as they were in `schema_version` of the table (None:
      as they are when the request is applied).
    - `reads`: the rows that the edit depends on.
    - `attempt_ids`: the write attempts that the commit ends.
    - `table_id`, `table_uuid`: as in `Envelope`. Without them, the table is found by its name.
    """

    table: str
    files: tuple[FileWithReferences, ...] = ()
    deletions: tuple[NewDeletion, ...] = ()
    reads: tuple[Read, ...] = ()
    attempt_ids: tuple[str, ...] = ()
    schema_version: int | None = None
    table_id: int | None = None
    table_uuid: str | None = None

    @property
    def new_files(self) -> list[str]:
        """The names of the files to add, and of those with the rows that deletions list."""
        listed = [deletion.rows.name for deletion in self.deletions if deletion.rows is not None]
        return [*(file.filename for file in self.files), *listed]

    def __post_init__(self) -> None:
        check_text("the table's name", self.table)
        listed = {"files": FileWithReferences, "deletions": NewDeletion, "reads": Read, "attempt_ids": str}
        for name, kind in listed.items():
            object.__setattr__(self, name, _all_are(kind, name, getattr(self, name), items_min=0))
        for attempt_id in self.attempt_ids:
            _check_attempt(attempt_id)
        for read in self.reads:
            _check_snapshot(read.snapshot)
        for deletion in self.deletions:
            check_text("a deletion's condition", deletion.condition, CONDITION_BYTES_MAX)


@dataclass(frozen=True, kw_only=True, slots=True)
class EditTables(_AnyRequest):
    """A request to add files to one or more tables and to delete rows of them, all or nothing.

    It is refused if other commits may have changed rows that it read: deletions, restores, and ingests of
    files with such keys. Its deletions concern all rows but those of its own files and of later ones.
    """

    kind: ClassVar[str] = "edit_tables"
    holds: ClassVar[tuple[str, type]] = ("parts", TableEdit)
    parts: tuple[TableEdit, ...]

    @property
    def table(self) -> str:
        """The name of the first table, whose queue gets the request."""
        return self.parts[0].table

    @property
    def items(self) -> tuple[Any, ...]:
        """The files and deletions of all parts."""
        return tuple(item for part in self.parts for item in (*part.files, *part.deletions))

    def addressed(self, tables: Mapping[str, TableRecord]) -> EditTables:
        """Returns the request with the ids and UUIDs of its tables, which are given by their names."""
        records = [tables[part.table] for part in self.parts]
        parts = [
            replace(part, table_id=record.table_id, table_uuid=record.uuid)
            for part, record in zip(self.parts, records, strict=True)
        ]
        return replace(self, parts=tuple(parts))

    def _check(self) -> None:
        _AnyRequest._check(self)
        tables = [part.table if part.table_id is None else part.table_id for part in self.parts]
        if len(set(tables)) < len(tables):
            raise InvalidInput(ONE_PART_EACH)


CommitRequest: TypeAlias = (
    AddFiles
    | AssignJobIds
    | ReplaceFileReferences
    | SplitFileReferences
    | DeleteCollectedFiles
    | SplitPartition
    | EditTables
)
_REQUESTS: dict[str, type[CommitRequest]] = {request.kind: request for request in get_args(CommitRequest)}
_OF_MESSAGES = {shape: _REQUESTS[kind] for kind, shape in encoding.MESSAGES.items()}
_WITH_ATTEMPTS = (AddFiles, ReplaceFileReferences)
encoding.prepare(request for request in _REQUESTS.values() if request is not SplitPartition)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A request with its table's id, which a rename does not change, and the table's UUID.

    A database that was restored may give the id to another table, but not the UUID.
    """

    request: CommitRequest
    table_id: int | None = None
    table_uuid: str | None = None

    @property
    def targets(self) -> list[Target]:
        """The tables of the request."""
        if isinstance(self.request, EditTables):
            return [
                Target(part.table_id, part.table, part.table_uuid, part.new_files)
                for part in self.request.parts
            ]
        names = names_of_new_files(self.request)
        return [Target(self.table_id, self.request.table, self.table_uuid, names)]


class Target(NamedTuple):
    """A table that a request changes, and the names of the files that it adds.

    The table is found by its id. If the request has none, it is found by its name.
    """

    table_id: int | None
    table: str
    uuid: str | None
    new_files: list[str]

    @property
    def key(self) -> tuple[int | None, str]:
        return self.table_id, self.table


def table_names(request: CommitRequest) -> list[str]:
    """Returns the names of the tables of a request. The queue of the first one gets the request."""
    return [part.table for part in request.parts] if isinstance(request, EditTables) else [request.table]


def attempt_of(request: object) -> str | None:
    """Returns the id of a write attempt that a request ends; None if it ends none."""
    if isinstance(request, EditTables):
        return next((attempt_id for part in request.parts for attempt_id in part.attempt_ids), None)
    return request.attempt_id if isinstance(request, _WITH_ATTEMPTS) else None


def source_of(request: object) -> bytes | None:
    """Returns the digest of the data from which a request's files were made; None if it has none."""
    return request.source if isinstance(request, AddFiles) else None


def names_of_new_files(request: CommitRequest) -> list[str]:
    """Returns the names of the files that a request adds."""
    if isinstance(request, AddFiles):
        return [file.filename for file in request.files]
    if isinstance(request, ReplaceFileReferences):
        return [each.new_reference.filename for each in request.requests if each.new_reference is not None]
    if isinstance(request, EditTables):
        return [file.filename for part in request.parts for file in part.files]
    return []


def encode(request: CommitRequest, *, table_id: int | None = None, table_uuid: str | None = None) -> str:
    """Returns the request as one line of JSON, in ASCII.

    The ids of an `EditTables` request are in its parts. Raises `InvalidCommitRequest` if the request is too
    large.
    """
    if isinstance(request, EditTables):
        table_id, table_uuid = request.parts[0].table_id, request.parts[0].table_uuid
    try:
        message = encoding.converted(request, encoding.MESSAGES[request.kind])
        message.table_id, message.table_uuid = table_id, table_uuid
        body = encoding.text_of(message)
        _check_size(len(body))
    except ValueError as error:
        raise _invalid(request.commit_id, error) from error
    return body


def decode(body: str | bytes) -> Envelope:
    """Returns the request that `encode` wrote; raises `InvalidCommitRequest` for any other body.

    Raises the subclass `CommitRequestTooNew` for a body that a newer Dormouse may have written. Such a body
    has a later version, or an unknown type or key.
    """
    try:
        _check_size(len(body))
        message = encoding.message_of(body)
        request = _request_of(message)
    except (ValueError, RecursionError) as error:
        raise _refusal(body, error) from error
    return Envelope(request, message.table_id, message.table_uuid)


def commit_id_of(body: str) -> str | None:
    """Returns the commit id in a body, even in one that `decode` refuses; None if it contains none."""
    try:
        commit_id = encoding.head_of(body).commit_id
        check_text("commit_id", commit_id)
    except (ValueError, RecursionError):
        return None
    return str(commit_id)


def table_id_of(body: str) -> int | None:
    """Returns the table id in a body; None if it contains none, or a value that is no id."""
    try:
        table_id = encoding.head_of(body).table_id
    except (ValueError, RecursionError):
        return None
    is_id = type(table_id) is int and 0 <= table_id <= encoding.TABLE_ID_MAX
    return table_id if is_id else None


def _request_of(message: encoding.Message) -> CommitRequest:
    if isinstance(message, encoding.SplitPartitionMessage):
        return SplitPartition(
            commit_id=message.commit_id,
            table=message.table,
            partition_id=message.partition_id,
            point=message.typed_point.value,
            field=message.field,
        )
    request = encoding.converted(message, _OF_MESSAGES[type(message)])
    if isinstance(message, encoding.EditTablesMessage):
        first = message.parts[0]
        if (message.table, message.table_id, message.table_uuid) != (
            first.table,
            first.table_id,
            first.table_uuid,
        ):
            raise InvalidInput("its table must be that of its first part")
    return request


def _refusal(body: str | bytes, error: Exception) -> InvalidCommitRequest:
    """Returns the error for a body that `decode` refuses.

    It names the first part of the body's head that is not known.
    """
    if isinstance(cause := error.__cause__ or error, InvalidCommitRequest):
        return cause  # the body was read, and the request refused its values
    try:
        _check_size(len(body))
        head = encoding.head_of(body)
    except (ValueError, RecursionError) as unreadable:
        return InvalidCommitRequest(f"a commit request cannot be read: {one_line(unreadable)}")
    if type(head.version) is not int:
        return InvalidCommitRequest(f"a commit request must have a version, not {_shortened(head.version)}")
    if head.version != VERSION:
        too_new = CommitRequestTooNew if head.version > VERSION else InvalidCommitRequest
        return too_new(
            f"version {_shortened(head.version)} of a commit request is not known; "
            f"this Dormouse reads version {VERSION}: upgrade it"
        )
    if head.type == POINTER:
        error = InvalidInput(
            f"its body, the object {_shortened(head.object)}, no longer exists: another delivery of it was "
            "answered before, or the object was removed and the request must be sent again"
        )
    elif head.type not in list(_REQUESTS):
        known = ", ".join(_REQUESTS)
        text = f"the type {_shortened(head.type)} is not known; known are {known}"
        error = CommitRequestTooNew(text) if isinstance(head.type, str) else InvalidInput(text)
    elif encoding.is_unknown_key(error):
        error = CommitRequestTooNew(one_line(error))
    return _invalid(head.commit_id, error)


def _all_are(expected: type, what: str, values: Any, items_min: int = 1) -> tuple[Any, ...]:
    """Returns the values as a tuple; raises `InvalidInput` if there are too few, or one has another type."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidInput(f"{what} must be a tuple of {expected.__name__}, not {_shortened(values)}")
    items = tuple(values)
    if len(items) < items_min:
        raise InvalidInput(f"{what} must not be empty")
    if not set(map(type, items)) <= {expected}:
        wrong = next(value for value in items if type(value) is not expected)
        raise InvalidInput(f"{what} must hold {expected.__name__}, not {_shortened(wrong)}")
    return items


def _check_attempt(attempt_id: Any) -> None:
    if not (isinstance(attempt_id, str) and _ATTEMPT_ID.fullmatch(attempt_id)):
        raise InvalidInput(f"attempt_id must be a UUID in hexadecimal, not {_shortened(attempt_id)}")


def _check_snapshot(text: Any) -> None:
    """Raises `InvalidInput` for a text that PostgreSQL does not accept as a snapshot."""
    if isinstance(text, str) and (match := _SNAPSHOT.fullmatch(text)):
        first, after, *running = map(int, re.findall("[0-9]+", match[0]))
        ordered = [first, *running, after - 1] if running else [first, after]
        if first > 0 and after < 1 << 63 and ordered == sorted(ordered):
            return
    raise InvalidInput(f"snapshot must be that of a moment, not {_shortened(text)}")


def _check_point(point: Any) -> None:
    if type(point) not in {int, str, bytes, datetime, date}:
        raise InvalidInput(
            f"point must be an int, a str, bytes, a datetime or a date, not {_shortened(point)}"
        )
    if isinstance(point, int) and not -_POINT_MAX - 1 <= point <= _POINT_MAX:
        raise InvalidInput("point must fit in 64 bits")
    if isinstance(point, str):
        try:
            point = point.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"point {_shortened(point)} is not valid Unicode") from None
    if isinstance(point, bytes) and len(point) > POINT_BYTES_MAX:
        raise InvalidInput(f"point must have at most {POINT_BYTES_MAX} bytes, not {len(point)}")


def _check_size(size: int) -> None:
    if size > BODY_BYTES_MAX:
        raise InvalidInput(f"it has {size} bytes; send several, each of at most {BODY_BYTES_MAX} bytes")


def _invalid(commit_id: object, error: Exception) -> InvalidCommitRequest:
    kind = CommitRequestTooNew if isinstance(error, CommitRequestTooNew) else InvalidCommitRequest
    return kind(f"commit request {_shortened(commit_id)}: {one_line(error)}")


def _shortened(value: object) -> str:
    """Returns a value as text for an error message, shortened."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "so large a number"
    text = repr(value)
    return text if len(text) <= _SHORTENED_CHARACTERS_MAX else f"{text[:_SHORTENED_CHARACTERS_MAX]}…"
