"""File references and the requests about them as JSON's values, and back.

What has its default is left out. Bytes are base64, times ISO 8601. Everything that comes in is checked here
or by the value that it becomes; what is wrong is `InvalidInput`.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Set
from datetime import datetime
from typing import Any, TypeVar

from dormouse.errors import InvalidInput
from dormouse.model.file_reference import (
    AssignJobIdRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.model.keys import KeyValue

Fields = dict[str, Any]
T = TypeVar("T")

SHOWN_CHARACTERS_MAX = 80
_PART_KEYS = frozenset(
    {
        "partition_id",
        "row_count",
        "job_id",
        "last_updated",
        "count_approximate",
        "only_contains_data_for_this_partition",
    }
)
_REFERENCE_KEYS = _PART_KEYS | {"filename"}
_FILE_KEYS = frozenset(
    {"filename", "references", "byte_count", "row_count", "min_key", "max_key", "last_updated"}
)
_ASSIGN_KEYS = frozenset({"job_id", "partition_id", "filenames"})
_REPLACE_KEYS = frozenset({"job_id", "partition_id", "input_filenames", "new_reference", "new_file"})
_SPLIT_KEYS = frozenset({"old_reference", "new_references"})


def reference_fields(reference: FileReference) -> Fields:
    return {"filename": reference.filename, **_part_fields(reference)}


def file_fields(file: FileWithReferences) -> Fields:
    """A file; its references are without its name."""
    fields: Fields = {"filename": file.filename}
    if file.references:
        fields["references"] = [_part_fields(reference) for reference in file.references]
    if file.byte_count is not None:
        fields["byte_count"] = file.byte_count
    if file.row_count is not None:
        fields["row_count"] = file.row_count
    if file.min_key is not None:
        fields["min_key"] = bytes_text("min_key", file.min_key)
    if file.max_key is not None:
        fields["max_key"] = bytes_text("max_key", file.max_key)
    if file.last_updated is not None:
        fields["last_updated"] = _time_text(file.last_updated)
    return fields


def assign_fields(request: AssignJobIdRequest) -> Fields:
    return {
        "job_id": request.job_id,
        "partition_id": request.partition_id,
        "filenames": request.filenames,
    }


def replace_fields(request: ReplaceFileReferencesRequest) -> Fields:
    fields: Fields = {
        "job_id": request.job_id,
        "partition_id": request.partition_id,
        "input_filenames": request.input_filenames,
    }
    if request.new_reference is not None:
        fields["new_reference"] = reference_fields(request.new_reference)
    if request.new_file is not None:
        fields["new_file"] = file_fields(request.new_file)
    return fields


def split_fields(request: SplitFileReferenceRequest) -> Fields:
    return {
        "old_reference": reference_fields(request.old_reference),
        "new_references": [_part_fields(reference) for reference in request.new_references],
    }


def point_fields(point: KeyValue) -> Fields:
    """A split point with its type, since JSON has no bytes: {"int": 7}, {"str": "b"} or {"bytes": "YQ=="}."""
    return {type(point).__name__: bytes_text("point", point) if isinstance(point, bytes) else point}


def reference_from(fields: Any) -> FileReference:
    check_keys("a file reference", fields, _REFERENCE_KEYS)
    return _part_from(fields, required(fields, "filename", "a file reference"))


def file_from(fields: Any) -> FileWithReferences:
    check_keys("a file", fields, _FILE_KEYS)
    name = required(fields, "filename", "a file")
    get = fields.get
    return FileWithReferences(
        filename=name,
        references=_parts_from(name, get("references", [])),
        byte_count=get("byte_count"),
        row_count=get("row_count"),
        min_key=_optional_bytes("min_key", fields),
        max_key=_optional_bytes("max_key", fields),
        last_updated=_time_from(get("last_updated")),
    )


def assign_from(fields: Any) -> AssignJobIdRequest:
    what = "an assign request"
    check_keys(what, fields, _ASSIGN_KEYS)
    return AssignJobIdRequest(
        job_id=required(fields, "job_id", what),
        partition_id=required(fields, "partition_id", what),
        filenames=texts("filenames", required(fields, "filenames", what)),
    )


def replace_from(fields: Any) -> ReplaceFileReferencesRequest:
    what = "a replace request"
    check_keys(what, fields, _REPLACE_KEYS)
    reference, file = fields.get("new_reference"), fields.get("new_file")
    return ReplaceFileReferencesRequest(
        job_id=required(fields, "job_id", what),
        partition_id=required(fields, "partition_id", what),
        input_filenames=texts("input_filenames", required(fields, "input_filenames", what)),
        new_reference=None if reference is None else reference_from(reference),
        new_file=None if file is None else file_from(file),
    )


def split_from(fields: Any) -> SplitFileReferenceRequest:
    what = "a split request"
    check_keys(what, fields, _SPLIT_KEYS)
    old = reference_from(required(fields, "old_reference", what))
    new = _parts_from(old.filename, required(fields, "new_references", what))
    return SplitFileReferenceRequest(old_reference=old, new_references=new)


def point_from(tagged: Any) -> KeyValue:
    """What `point_fields` wrote."""
    if type(tagged) is dict and len(tagged) == 1:
        ((name, value),) = tagged.items()
        if name == "bytes":
            return bytes_from("point", value)
        if (name, type(value)) in {("int", int), ("str", str)}:
            return value  # type: ignore[no-any-return]
    raise InvalidInput(f'point must say its type, like {{"int": 7}}, not {shown(tagged)}')


def many(what: str, values: Any, convert: Callable[[Any], T]) -> tuple[T, ...]:
    if type(values) is not list:
        raise InvalidInput(f"{what} must be a list, not {shown(values)}")
    return tuple([convert(value) for value in values])


def texts(what: str, values: Any) -> tuple[str, ...]:
    """A list of strings as a tuple."""
    if type(values) is not list or not set(map(type, values)) <= {str}:
        raise InvalidInput(f"{what} must be a list of strings, not {shown(values)}")
    return tuple(values)


def all_are(expected: type, what: str, values: Any) -> tuple[Any, ...]:
    """The values as a tuple, at least one and all of one type."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidInput(f"{what} must be a tuple of {expected.__name__}, not {shown(values)}")
    found = tuple(values)
    if not found:
        raise InvalidInput(f"{what} must not be empty")
    if not set(map(type, found)) <= {expected}:
        wrong = next(value for value in found if type(value) is not expected)
        raise InvalidInput(f"{what} must hold {expected.__name__}, not {shown(wrong)}")
    return found


def check_keys(what: str, fields: Any, known: Set[str]) -> None:
    """A JSON object that has no other keys."""
    if type(fields) is not dict:
        raise InvalidInput(f"{what} must be a JSON object, not {shown(fields)}")
    if not fields.keys() <= known:
        extra = next(key for key in fields if key not in known)
        raise InvalidInput(f"{what} has the unknown key {shown(extra)}; known are {', '.join(sorted(known))}")


def required(fields: Fields, key: str, what: str) -> Any:
    try:
        return fields[key]
    except KeyError:
        raise InvalidInput(f"{what} has no {key!r}") from None


def bytes_text(what: str, value: Any) -> str:
    """Bytes as base64."""
    if not isinstance(value, bytes):
        raise InvalidInput(f"{what} must be bytes, not {shown(value)}")
    return b64encode(value).decode("ascii")


def bytes_from(what: str, text: Any) -> bytes:
    try:
        if type(text) is str:
            return b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise InvalidInput(f"{what} must be bytes in base64, not {shown(text)}")


def shown(value: object) -> str:
    """A value in an error's one line, shortened."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "so large a number"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}…"


def _part_fields(reference: FileReference) -> Fields:
    """A reference without its file's name."""
    fields: Fields = {"partition_id": reference.partition_id, "row_count": reference.row_count}
    if reference.job_id is not None:
        fields["job_id"] = reference.job_id
    if reference.last_updated is not None:
        fields["last_updated"] = _time_text(reference.last_updated)
    if reference.count_approximate is not False:
        fields["count_approximate"] = _flag(reference.count_approximate)
    if reference.only_contains_data_for_this_partition is not True:
        only = _flag(reference.only_contains_data_for_this_partition)
        fields["only_contains_data_for_this_partition"] = only
    return fields


def _part_from(fields: Fields, filename: Any) -> FileReference:
    get = fields.get
    return FileReference(
        filename=filename,
        partition_id=required(fields, "partition_id", "a file reference"),
        row_count=required(fields, "row_count", "a file reference"),
        job_id=get("job_id"),
        last_updated=_time_from(get("last_updated")),
        count_approximate=_flag(get("count_approximate", False)),
        only_contains_data_for_this_partition=_flag(get("only_contains_data_for_this_partition", True)),
    )


def _parts_from(filename: Any, values: Any) -> tuple[FileReference, ...]:
    def convert(fields: Any) -> FileReference:
        check_keys("a file's reference", fields, _PART_KEYS)
        return _part_from(fields, filename)

    return many("a file's references", values, convert)


def _optional_bytes(key: str, fields: Fields) -> bytes | None:
    text = fields.get(key)
    return None if text is None else bytes_from(key, text)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise InvalidInput(f"a flag of a file reference must be true or false, not {shown(value)}")
    return value


def _time_text(value: Any) -> str:
    if not isinstance(value, datetime):
        raise InvalidInput(f"last_updated must be a datetime, not {shown(value)}")
    return value.isoformat()


def _time_from(text: Any) -> datetime | None:
    if text is None:
        return None
    try:
        if type(text) is str:
            return datetime.fromisoformat(text)
    except ValueError:
        pass
    raise InvalidInput(f"last_updated must be a time like 2026-01-31T12:00:00+00:00, not {shown(text)}")
