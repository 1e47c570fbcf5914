"""Commit requests: changes of a table's metadata as values, and as JSON that travels through a queue."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, ClassVar, TypeAlias, get_args

from dormouse.errors import CommitRequestTooNew, InvalidCommitRequest, InvalidInput, one_line
from dormouse.model.file_reference import (
    FILENAME_BYTES_MAX,
    AssignJobIdRequest,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.model.region import KeyValue
from dormouse.model.text import check_text
from dormouse.state.commits import encoding

VERSION = encoding.VERSION
POINTER = "pointer"
"""The type of a message whose body is an object: `commits.pointers`."""
BODY_BYTES_MAX = 64 * 2**20
"""A request as JSON; larger ones are refused: send several."""
POINT_BYTES_MAX = 2**20
_ATTEMPT_ID = re.compile("[0-9a-f]{32}")
_POINT_MAX = (1 << 63) - 1
_SHOWN_CHARACTERS_MAX = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """A change of one table, with the id that makes it apply once.

    `holds` names the field with its items, a tuple of at least one, and the type that all have.
    """

    version: ClassVar[int] = VERSION
    kind: ClassVar[str]
    holds: ClassVar[tuple[str, type]]
    commit_id: str
    table: str

    def __post_init__(self) -> None:
        try:
            check_text("commit_id", self.commit_id)
            check_text("the table's name", self.table)
            self._check()
        except InvalidInput as error:
            raise _invalid(self.commit_id, error) from error

    @property
    def items(self) -> tuple[Any, ...]:
        """What it changes, one after the other."""
        return getattr(self, self.holds[0])  # type: ignore[no-any-return]

    def _check(self) -> None:
        name, expected = self.holds
        object.__setattr__(self, name, _all_are(expected, name, self.items))
        attempt_id = attempt_of(self)
        if attempt_id is not None and not (isinstance(attempt_id, str) and _ATTEMPT_ID.fullmatch(attempt_id)):
            raise InvalidInput(f"attempt_id must be a UUID in hexadecimal, not {_shown(attempt_id)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AddFiles(_Request):
    """Add files that are not tracked yet; `attempt_id` is the write attempt that this ends.

    `source` is a digest of 16 bytes of the data that they were made of, which is recorded with the commit id.
    """

    kind: ClassVar[str] = "add_files"
    holds: ClassVar[tuple[str, type]] = ("files", FileWithReferences)
    files: tuple[FileWithReferences, ...]
    attempt_id: str | None = None
    source: bytes | None = None

    def _check(self) -> None:
        _Request._check(self)
        if self.source is not None and not (isinstance(self.source, bytes) and len(self.source) == 16):
            raise InvalidInput(f"source must be 16 bytes, not {_shown(self.source)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignJobIds(_Request):
    """Assign references to jobs, all or nothing."""

    kind: ClassVar[str] = "assign_job_ids"
    holds: ClassVar[tuple[str, type]] = ("requests", AssignJobIdRequest)
    requests: tuple[AssignJobIdRequest, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaceFileReferences(_Request):
    """Replace the inputs of jobs by their outputs; each job alone.

    `attempt_id` is the write attempt that this ends. With one, inputs that are not there are not waited for.
    """

    kind: ClassVar[str] = "replace_file_references"
    holds: ClassVar[tuple[str, type]] = ("requests", ReplaceFileReferencesRequest)
    requests: tuple[ReplaceFileReferencesRequest, ...]
    attempt_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFileReferences(_Request):
    """Replace references by others to the same files; each reference alone."""

    kind: ClassVar[str] = "split_file_references"
    holds: ClassVar[tuple[str, type]] = ("requests", SplitFileReferenceRequest)
    requests: tuple[SplitFileReferenceRequest, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteCollectedFiles(_Request):
    """Forget files whose objects are gone, all or nothing."""

    kind: ClassVar[str] = "delete_collected_files"
    holds: ClassVar[tuple[str, type]] = ("filenames", str)
    filenames: tuple[str, ...]

    def _check(self) -> None:
        _Request._check(self)
        for name in self.filenames:
            check_text("filename", name, FILENAME_BYTES_MAX)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPartition(_Request):
    """Divide a leaf at a point of one of its row keys; of the first, when no field is named."""

    kind: ClassVar[str] = "split_partition"
    partition_id: str
    point: KeyValue
    field: str | None = None

    @property
    def items(self) -> tuple[SplitPartition, ...]:
        return (self,)

    @property
    def typed_point(self) -> dict[str, KeyValue]:
        """The point as it travels: `encoding._Point`."""
        return {type(self.point).__name__: self.point}

    def _check(self) -> None:
        check_text("partition_id", self.partition_id)
        if self.field is not None:
            check_text("field", self.field)
        _check_point(self.point)


CommitRequest: TypeAlias = (
    AddFiles
    | AssignJobIds
    | ReplaceFileReferences
    | SplitFileReferences
    | DeleteCollectedFiles
    | SplitPartition
)
_REQUESTS: dict[str, type[CommitRequest]] = {request.kind: request for request in get_args(CommitRequest)}
_OF_MESSAGES = {shape: _REQUESTS[kind] for kind, shape in encoding.MESSAGES.items()}
_WITH_ATTEMPTS = (AddFiles, ReplaceFileReferences)
encoding.prepare(request for request in _REQUESTS.values() if request is not SplitPartition)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A request as it travels: with the table's id, which outlives a renaming, and UUID, which a restore."""

    request: CommitRequest
    table_id: int | None = None
    table_uuid: str | None = None


def attempt_of(request: object) -> str | None:
    """The write attempt that a request ends."""
    return request.attempt_id if isinstance(request, _WITH_ATTEMPTS) else None


def source_of(request: object) -> bytes | None:
    """Returns the digest of the data that a request's files were made of."""
    return request.source if isinstance(request, AddFiles) else None


def names_of_new_files(request: CommitRequest) -> list[str]:
    """The files that a request adds."""
    if isinstance(request, AddFiles):
        return [file.filename for file in request.files]
    if isinstance(request, ReplaceFileReferences):
        return [one.new_reference.filename for one in request.requests if one.new_reference is not None]
    return []


def encode(request: CommitRequest, *, table_id: int | None = None, table_uuid: str | None = None) -> str:
    """The request as one line of JSON, in ASCII; `InvalidCommitRequest` when it is too large."""
    try:
        message = encoding.converted(request, encoding.MESSAGES[request.kind])
        message.table_id, message.table_uuid = table_id, table_uuid
        body = encoding.text_of(message)
        _check_size(len(body))
    except ValueError as error:
        raise _invalid(request.commit_id, error) from error
    return body


def decode(body: str | bytes) -> Envelope:
    """The request that `encode` wrote; `InvalidCommitRequest` for anything else.

    It is `CommitRequestTooNew` for what a newer Dormouse may have written: a later version, an unknown type
    or key.
    """
    try:
        _check_size(len(body))
        message = encoding.message_of(body)
        request = _request_of(message)
    except (ValueError, RecursionError) as error:
        raise _refusal(body, error) from error
    return Envelope(request, message.table_id, message.table_uuid)


def commit_id_of(body: str) -> str | None:
    """The commit id that a body names, also one that `decode` refuses; None when it names none."""
    try:
        commit_id = encoding.head_of(body).commit_id
        check_text("commit_id", commit_id)
    except (ValueError, RecursionError):
        return None
    return str(commit_id)


def table_id_of(body: str) -> int | None:
    """The id of the table that a body names; None when it names none, or what is no id."""
    try:
        table_id = encoding.head_of(body).table_id
    except (ValueError, RecursionError):
        return None
    is_one = type(table_id) is int and 0 <= table_id <= encoding.TABLE_ID_MAX
    return table_id if is_one else None


def _request_of(message: encoding.Message) -> CommitRequest:
    if isinstance(message, encoding.SplitPartitionMessage):
        return SplitPartition(
            commit_id=message.commit_id,
            table=message.table,
            partition_id=message.partition_id,
            point=message.typed_point.value,
            field=message.field,
        )
    return encoding.converted(message, _OF_MESSAGES[type(message)])


def _refusal(body: str | bytes, error: Exception) -> InvalidCommitRequest:
    """Why a body is refused, by the first of what it says of itself that is not understood."""
    if isinstance(cause := error.__cause__ or error, InvalidCommitRequest):
        return cause  # it was read, and the request refused its values
    try:
        _check_size(len(body))
        head = encoding.head_of(body)
    except (ValueError, RecursionError) as unreadable:
        return InvalidCommitRequest(f"a commit request cannot be read: {one_line(unreadable)}")
    if type(head.version) is not int:
        return InvalidCommitRequest(f"a commit request must have a version, not {_shown(head.version)}")
    if head.version != VERSION:
        too_new = CommitRequestTooNew if head.version > VERSION else InvalidCommitRequest
        return too_new(
            f"version {_shown(head.version)} of a commit request is not known; "
            f"this Dormouse reads version {VERSION}: upgrade it"
        )
    if head.type == POINTER:
        error = InvalidInput(
            f"its body, the object {_shown(head.object)}, is gone: another delivery of it was "
            "answered before, or the object was removed and it must be sent again"
        )
    elif head.type not in list(_REQUESTS):
        known = ", ".join(_REQUESTS)
        said = f"the type {_shown(head.type)} is not known; known are {known}"
        error = CommitRequestTooNew(said) if isinstance(head.type, str) else InvalidInput(said)
    elif encoding.is_unknown_key(error):
        error = CommitRequestTooNew(one_line(error))
    return _invalid(head.commit_id, error)


def _all_are(expected: type, what: str, values: Any) -> tuple[Any, ...]:
    """The values as a tuple, at least one and all of one type."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidInput(f"{what} must be a tuple of {expected.__name__}, not {_shown(values)}")
    found = tuple(values)
    if not found:
        raise InvalidInput(f"{what} must not be empty")
    if not set(map(type, found)) <= {expected}:
        wrong = next(value for value in found if type(value) is not expected)
        raise InvalidInput(f"{what} must hold {expected.__name__}, not {_shown(wrong)}")
    return found


def _check_point(point: Any) -> None:
    if type(point) not in {int, str, bytes, datetime, date}:
        raise InvalidInput(f"point must be an int, a str, bytes, a datetime or a date, not {_shown(point)}")
    if isinstance(point, int) and not -_POINT_MAX - 1 <= point <= _POINT_MAX:
        raise InvalidInput("point must fit in 64 bits")
    if isinstance(point, str):
        try:
            point = point.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"point {_shown(point)} is not valid Unicode") from None
    if isinstance(point, bytes) and len(point) > POINT_BYTES_MAX:
        raise InvalidInput(f"point must have at most {POINT_BYTES_MAX} bytes, not {len(point)}")


def _check_size(size: int) -> None:
    if size > BODY_BYTES_MAX:
        raise InvalidInput(f"it has {size} bytes; send several, each of at most {BODY_BYTES_MAX} bytes")


def _invalid(commit_id: object, error: Exception) -> InvalidCommitRequest:
    kind = CommitRequestTooNew if isinstance(error, CommitRequestTooNew) else InvalidCommitRequest
    return kind(f"commit request {_shown(commit_id)}: {one_line(error)}")


def _shown(value: object) -> str:
    """A value in an error's one line, shortened."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "so large a number"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[:_SHOWN_CHARACTERS_MAX]}…"
