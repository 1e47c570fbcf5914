"""Commit requests: changes of a table's metadata as values, and as JSON that travels through a queue."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, TypeAlias

from dormouse.commits import encoding
from dormouse.commits.encoding import Fields, required, shown
from dormouse.errors import InvalidCommitRequest, InvalidInput
from dormouse.model.file_reference import (
    FILENAME_BYTES_MAX,
    AssignJobIdRequest,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.model.keys import KeyValue
from dormouse.model.text import check_text

VERSION = 1
POINTER = "pointer"
"""The type of a message whose body is an object: `commits.pointers`."""
BODY_BYTES_MAX = 64 * 2**20
"""A request as JSON; larger ones are refused: send several."""
POINT_BYTES_MAX = 2**20
TABLE_ID_MAX = (1 << 31) - 1
_ATTEMPT_ID = re.compile("[0-9a-f]{32}")
_POINT_MAX = (1 << 63) - 1
_MESSAGE_CHARACTERS_MAX = 600
_WHAT = "the request"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """A change of one table, with the id that makes it apply once."""

    kind: ClassVar[str]
    commit_id: str
    table: str

    def __post_init__(self) -> None:
        try:
            check_text("commit_id", self.commit_id)
            check_text("the table's name", self.table)
            self._check()
        except InvalidInput as error:
            raise _invalid(self.commit_id, error) from error

    def _check(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class AddFiles(_Request):
    """Add files that are not tracked yet; `attempt_id` is the write attempt that this ends."""

    kind: ClassVar[str] = "add_files"
    files: tuple[FileWithReferences, ...]
    attempt_id: str | None = None

    @property
    def items(self) -> tuple[FileWithReferences, ...]:
        return self.files

    def _check(self) -> None:
        object.__setattr__(self, "files", encoding.all_are(FileWithReferences, "files", self.files))
        _check_attempt(self.attempt_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignJobIds(_Request):
    """Assign references to jobs, all or nothing."""

    kind: ClassVar[str] = "assign_job_ids"
    requests: tuple[AssignJobIdRequest, ...]

    @property
    def items(self) -> tuple[AssignJobIdRequest, ...]:
        return self.requests

    def _check(self) -> None:
        object.__setattr__(self, "requests", encoding.all_are(AssignJobIdRequest, "requests", self.requests))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaceFileReferences(_Request):
    """Replace the inputs of jobs by their outputs; each job alone.

    `attempt_id` is the write attempt that this ends. With one, inputs that are not there are not waited for.
    """

    kind: ClassVar[str] = "replace_file_references"
    requests: tuple[ReplaceFileReferencesRequest, ...]
    attempt_id: str | None = None

    @property
    def items(self) -> tuple[ReplaceFileReferencesRequest, ...]:
        return self.requests

    def _check(self) -> None:
        requests = encoding.all_are(ReplaceFileReferencesRequest, "requests", self.requests)
        object.__setattr__(self, "requests", requests)
        _check_attempt(self.attempt_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFileReferences(_Request):
    """Replace references by others to the same files; each reference alone."""

    kind: ClassVar[str] = "split_file_references"
    requests: tuple[SplitFileReferenceRequest, ...]

    @property
    def items(self) -> tuple[SplitFileReferenceRequest, ...]:
        return self.requests

    def _check(self) -> None:
        object.__setattr__(
            self, "requests", encoding.all_are(SplitFileReferenceRequest, "requests", self.requests)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteCollectedFiles(_Request):
    """Forget files whose objects are gone, all or nothing."""

    kind: ClassVar[str] = "delete_collected_files"
    filenames: tuple[str, ...]

    @property
    def items(self) -> tuple[str, ...]:
        return self.filenames

    def _check(self) -> None:
        object.__setattr__(self, "filenames", encoding.all_are(str, "filenames", self.filenames))
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


@dataclass(frozen=True, slots=True)
class Envelope:
    """A request as it travels: with the table's id, so that it outlives a renaming."""

    request: CommitRequest
    table_id: int | None = None


def attempt_of(request: CommitRequest) -> str | None:
    """The write attempt that a request ends."""
    return request.attempt_id if isinstance(request, AddFiles | ReplaceFileReferences) else None


def encode(request: CommitRequest, *, table_id: int | None = None) -> str:
    """The request as one line of JSON, in ASCII; `InvalidCommitRequest` when it is too large."""
    try:
        body = _ENCODER.encode(
            {
                "version": VERSION,
                "type": request.kind,
                "commit_id": request.commit_id,
                "table": request.table,
                "table_id": _table_id(table_id),
                **_FORMS[request.kind].fields(request),
            }
        )
        _check_size(len(body))
    except InvalidInput as error:
        raise _invalid(request.commit_id, error) from error
    return body


def decode(body: str | bytes) -> Envelope:
    """The request that `encode` wrote; `InvalidCommitRequest` for anything else."""
    fields = parse(body)
    try:
        kind = required(fields, "type", _WHAT)
        form = _FORMS.get(kind) if isinstance(kind, str) else None
        if kind == POINTER:
            raise InvalidInput(
                f"its body, the object {shown(fields.get('object'))}, is gone: another delivery of it was "
                "answered before, or the object was removed and it must be sent again"
            )
        if form is None:
            raise InvalidInput(f"the type {shown(kind)} is not known; known are {', '.join(_FORMS)}")
        encoding.check_keys(_WHAT, fields, form.keys)
        return Envelope(form.request(fields), _table_id(fields.get("table_id")))
    except InvalidCommitRequest:
        raise
    except InvalidInput as error:
        raise _invalid(fields.get("commit_id"), error) from error


def parse(body: str | bytes) -> Fields:
    """A message's JSON object, of a version that is known; else `InvalidCommitRequest`."""
    try:
        _check_size(len(body))
        fields = _DECODER.decode(body.decode() if isinstance(body, bytes) else body)
    except RecursionError:
        raise InvalidCommitRequest("a commit request cannot be read: it is nested too deeply") from None
    except ValueError as error:
        raise InvalidCommitRequest(f"a commit request cannot be read: {_line(error)}") from None
    version = fields.get("version") if type(fields) is dict else None
    if type(version) is not int:
        raise InvalidCommitRequest(
            f"a commit request must be a JSON object with a version, not {shown(fields)}"
        )
    if version != VERSION:
        raise InvalidCommitRequest(
            f"version {shown(version)} of a commit request is not known; "
            f"this Dormouse reads version {VERSION}: upgrade it"
        )
    return fields  # type: ignore[no-any-return]


def commit_id_of(body: str) -> str | None:
    """The commit id that a body names, read without the rest of it; None when it names none."""
    try:
        found = _HEAD.match(body)
        commit_id = json.loads(found[1]) if found else parse(body).get("commit_id")
        check_text("commit_id", commit_id)
    except ValueError:
        return None
    return str(commit_id)


@dataclass(frozen=True, slots=True)
class _Form:
    """How one type of request travels, beyond what all have."""

    keys: frozenset[str]
    fields: Callable[[Any], Fields]
    request: Callable[[Fields], CommitRequest]


_COMMON = frozenset({"version", "type", "commit_id", "table", "table_id"})


def _requests_form(
    make: Callable[..., CommitRequest],
    to_fields: Callable[[Any], Fields],
    from_fields: Callable[[Any], Any],
) -> _Form:
    """A list of requests."""

    def request(fields: Fields) -> CommitRequest:
        items = encoding.many("requests", required(fields, "requests", _WHAT), from_fields)
        return make(**_addressed(fields), requests=items)

    keys = _COMMON | {"requests"}
    return _Form(keys, lambda request: {"requests": [to_fields(item) for item in request.items]}, request)


def _with_attempt(form: _Form) -> _Form:
    """The form of requests that may end a write attempt."""

    def fields(request: Any) -> Fields:
        attempt = {} if request.attempt_id is None else {"attempt_id": request.attempt_id}
        return {**attempt, **form.fields(request)}

    def request(fields: Fields) -> CommitRequest:
        made, attempt_id = form.request(fields), fields.get("attempt_id")
        return made if attempt_id is None else replace(made, attempt_id=attempt_id)

    return _Form(form.keys | {"attempt_id"}, fields, request)


def _addressed(fields: Fields) -> Fields:
    return {"commit_id": required(fields, "commit_id", _WHAT), "table": required(fields, "table", _WHAT)}


def _add_files(fields: Fields) -> CommitRequest:
    files = encoding.many("files", required(fields, "files", _WHAT), encoding.file_from)
    return AddFiles(**_addressed(fields), files=files)


def _add_files_fields(request: AddFiles) -> Fields:
    return {"files": [encoding.file_fields(file) for file in request.files]}


def _delete_collected_files(fields: Fields) -> CommitRequest:
    names = encoding.texts("filenames", required(fields, "filenames", _WHAT))
    return DeleteCollectedFiles(**_addressed(fields), filenames=names)


def _split_partition(fields: Fields) -> CommitRequest:
    return SplitPartition(
        **_addressed(fields),
        partition_id=required(fields, "partition_id", _WHAT),
        point=encoding.point_from(required(fields, "point", _WHAT)),
        field=fields.get("field"),
    )


def _split_partition_fields(request: SplitPartition) -> Fields:
    fields: Fields = {"partition_id": request.partition_id, "point": encoding.point_fields(request.point)}
    return fields if request.field is None else {**fields, "field": request.field}


def _check_attempt(attempt_id: Any) -> None:
    if attempt_id is not None and not (isinstance(attempt_id, str) and _ATTEMPT_ID.fullmatch(attempt_id)):
        raise InvalidInput(f"attempt_id must be a UUID in hexadecimal, not {shown(attempt_id)}")


def _check_point(point: Any) -> None:
    if type(point) not in {int, str, bytes}:
        raise InvalidInput(f"point must be an int, a str or bytes, not {shown(point)}")
    if isinstance(point, int) and not -_POINT_MAX - 1 <= point <= _POINT_MAX:
        raise InvalidInput("point must fit in 64 bits")
    if isinstance(point, str):
        try:
            point = point.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"point {shown(point)} is not valid Unicode") from None
    if isinstance(point, bytes) and len(point) > POINT_BYTES_MAX:
        raise InvalidInput(f"point must have at most {POINT_BYTES_MAX} bytes, not {len(point)}")


def _table_id(value: Any) -> int | None:
    if value is None or (type(value) is int and 0 <= value <= TABLE_ID_MAX):
        return value
    raise InvalidInput(f"table_id must be a whole number from 0 to {TABLE_ID_MAX}, not {shown(value)}")


def _check_size(size: int) -> None:
    if size > BODY_BYTES_MAX:
        raise InvalidInput(f"it has {size} bytes; send several, each of at most {BODY_BYTES_MAX} bytes")


def _invalid(commit_id: object, error: Exception) -> InvalidCommitRequest:
    return InvalidCommitRequest(f"commit request {shown(commit_id)}: {_line(error)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MESSAGE_CHARACTERS_MAX]


def _unique(pairs: Sequence[tuple[str, Any]]) -> Fields:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key is there twice")
    return fields


def _not_a_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


_ENCODER = json.JSONEncoder(check_circular=False, allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_not_a_number)
_HEAD = re.compile(r'\{"version":1,"type":"[a-z_]+","commit_id":("(?:[^"\\\x00-\x1f]|\\["\\/bfnrtu])*")')
_FORMS = {
    "add_files": _with_attempt(_Form(_COMMON | {"files"}, _add_files_fields, _add_files)),
    "assign_job_ids": _requests_form(AssignJobIds, encoding.assign_fields, encoding.assign_from),
    "replace_file_references": _with_attempt(
        _requests_form(ReplaceFileReferences, encoding.replace_fields, encoding.replace_from)
    ),
    "split_file_references": _requests_form(SplitFileReferences, encoding.split_fields, encoding.split_from),
    "delete_collected_files": _Form(
        _COMMON | {"filenames"}, lambda request: {"filenames": request.filenames}, _delete_collected_files
    ),
    "split_partition": _Form(
        _COMMON | {"partition_id", "point", "field"}, _split_partition_fields, _split_partition
    ),
}
