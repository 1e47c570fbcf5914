"""The JSON form of commit requests, as msgspec reads and writes it.

The classes here have the fields of those in `model.file_reference` and `commits.requests`, which check the
values. In JSON:

- A field that has its default value is left out.
- Bytes are base64, and times RFC 3339.
- The references of a file do not repeat its name.
- An unknown key is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import date, datetime
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

import msgspec

from dormouse.model.region import KeyValue

VERSION = 1
TABLE_ID_MAX = (1 << 31) - 1
TableId = Annotated[int, msgspec.Meta(ge=0, le=TABLE_ID_MAX)]
TableUuid = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
T = TypeVar("T")


class _Shape(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The base class of JSON objects: an unknown key is refused, and default values are left out."""


class _Part(_Shape, dict=True):
    """A reference in the JSON of its file. The file sets `filename`, which the JSON does not repeat."""

    partition_id: str
    row_count: int
    job_id: str | None = None
    last_updated: datetime | None = None
    count_approximate: bool = False
    only_contains_data_for_this_partition: bool = True


class _Reference(_Part, kw_only=True):
    filename: str


class _File(_Shape):
    filename: str
    references: tuple[_Part, ...] = ()
    byte_count: int | None = None
    row_count: int | None = None
    min_key: bytes | None = None
    max_key: bytes | None = None
    last_updated: datetime | None = None
    digest: bytes | None = None
    deletions_till: int | None = None
    content: bytes | None = None

    def __post_init__(self) -> None:
        _name_file(self.references, self.filename)


class _Assign(_Shape):
    job_id: str
    partition_id: str
    filenames: tuple[str, ...]


class _Replace(_Shape):
    job_id: str
    partition_id: str
    input_filenames: tuple[str, ...]
    new_reference: _Reference | None = None
    new_file: _File | None = None
    deletions_till: int | None = None


class _Split(_Shape):
    old_reference: _Reference
    new_references: tuple[_Part, ...]

    def __post_init__(self) -> None:
        _name_file(self.new_references, self.old_reference.filename)


class _Point(
    _Shape, rename={"whole": "int", "text": "str", "data": "bytes", "time": "datetime", "day": "date"}
):
    """A split point with its type, which JSON values lack: {"int": 7}, {"str": "b"} or {"bytes": "YQ=="}."""

    whole: int | None = None
    text: str | None = None
    data: bytes | None = None
    time: datetime | None = None
    day: date | None = None

    def __post_init__(self) -> None:
        if len(self._values()) != 1:
            raise ValueError('a split point must say its type, like {"int": 7}')

    @property
    def value(self) -> KeyValue:
        return self._values()[0]

    def _values(self) -> list[KeyValue]:
        return [
            value for value in (self.whole, self.text, self.data, self.time, self.day) if value is not None
        ]


class _Rows(_Shape):
    name: str
    content: bytes


class _Deletion(_Shape):
    condition: str
    bounds: tuple[tuple[bytes | None, ...], tuple[bytes | None, ...]]
    by_values: bool
    rows: _Rows | None = None


class _Read(_Shape):
    snapshot: str
    spans: tuple[tuple[bytes, bytes], ...]
    are_keys: bool = False


class _TableEdit(_Shape):
    table: str
    table_id: TableId | None = None
    table_uuid: TableUuid | None = None
    schema_version: int | None = None
    files: tuple[_File, ...] = ()
    deletions: tuple[_Deletion, ...] = ()
    reads: tuple[_Read, ...] = ()
    attempt_ids: tuple[str, ...] = ()


class _Message(_Shape, kw_only=True, tag_field="type"):
    version: Literal[1]
    commit_id: str
    table: str
    table_id: TableId | None = None
    table_uuid: TableUuid | None = None


class _AddFiles(_Message, tag="add_files", kw_only=True):
    files: tuple[_File, ...]
    attempt_id: str | None = None
    source: bytes | None = None


class _AssignJobIds(_Message, tag="assign_job_ids", kw_only=True):
    requests: tuple[_Assign, ...]


class _ReplaceFileReferences(_Message, tag="replace_file_references", kw_only=True):
    requests: tuple[_Replace, ...]
    attempt_id: str | None = None


class _SplitFileReferences(_Message, tag="split_file_references", kw_only=True):
    requests: tuple[_Split, ...]


class _DeleteCollectedFiles(_Message, tag="delete_collected_files", kw_only=True):
    filenames: tuple[str, ...]


class EditTablesMessage(_Message, tag="edit_tables", kw_only=True):
    """An edit of several tables. The table at its head is that of its first part."""

    parts: tuple[_TableEdit, ...]


class SplitPartitionMessage(_Message, tag="split_partition", kw_only=True):
    partition_id: str
    typed_point: _Point = msgspec.field(name="point")
    field: str | None = None


Message: TypeAlias = (
    _AddFiles
    | _AssignJobIds
    | _ReplaceFileReferences
    | _SplitFileReferences
    | _DeleteCollectedFiles
    | EditTablesMessage
    | SplitPartitionMessage
)


class Head(msgspec.Struct):
    """The fields at the head of a message, which can be read even if the rest of it cannot."""

    version: Any = None
    type: Any = None
    commit_id: Any = None
    table_id: Any = None
    object: Any = None


def message_of(body: str | bytes) -> Message:
    """Returns the message that `text_of` wrote; raises ValueError or RecursionError for anything else."""
    message: Message = _MESSAGES.decode(body)
    text = body if isinstance(body, str) else body.decode()
    if text_of(message) != text:  # of two keys with the same name, msgspec silently takes the last
        json.loads(text, object_pairs_hook=_unique)
    return message


def text_of(message: Message) -> str:
    """Returns the message as one line of JSON, in ASCII."""
    text = _ENCODER.encode(message).decode()
    return text if text.isascii() else _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)


def is_unknown_key(error: BaseException) -> bool:
    """Returns True if `message_of` refused a message for an unknown key.

    msgspec has no class of its own for this error.
    """
    return isinstance(error, msgspec.ValidationError) and "unknown field" in str(error)


def head_of(body: str | bytes) -> Head:
    """Returns the head of a message of any version, even of one that `message_of` refuses.

    Raises ValueError or RecursionError if the body is no JSON object.
    """
    return _HEADS.decode(body)


def kind_of(shape: type[Message]) -> str:
    """Returns the value of the key `type` in messages of this shape."""
    return str(shape.__struct_config__.tag)


def converted(value: object, wanted: type[T]) -> T:
    """Converts a request to its message, or a message to its request.

    Raises ValueError, which names the wrong field.
    """
    return msgspec.convert(value, wanted, from_attributes=True, builtin_types=(bytes, datetime))


def prepare(shapes: Iterable[type]) -> None:
    """Makes msgspec read the fields of the dataclasses that `converted` makes, and of those within them.

    Otherwise msgspec does so at the first conversion. If two threads convert at that moment, one of them uses
    the unfinished type information, and the process ends with a segmentation fault (msgspec 0.22.0). Call
    this while a module is imported, which only one thread does.
    """
    for shape in shapes:
        msgspec.json.Decoder(shape)


def _name_file(parts: tuple[_Part, ...], filename: str) -> None:
    for part in parts:
        part.__dict__["filename"] = filename


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")


MESSAGES = {kind_of(shape): shape for shape in get_args(Message)}
_ENCODER = msgspec.json.Encoder()
_MESSAGES = msgspec.json.Decoder(Message)
_HEADS = msgspec.json.Decoder(Head)
_NOT_ASCII = re.compile("[^\0-\x7f]+")
