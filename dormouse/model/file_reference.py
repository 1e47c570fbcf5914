"""File references, files, and the requests that the file reference store accepts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache

from dormouse.errors import InvalidInput
from dormouse.model.text import check_text, check_texts

INLINED = "inlined"
"""The folder, within that of a table, in the names of files whose bytes are in the database."""
INLINED_NAME = f"/{INLINED}/[0-9a-f]{{32}}/[^/]+$"
"""A regular expression of the ends of these names, for Python and PostgreSQL."""
_INLINED = re.compile(INLINED_NAME)
FILENAME_BYTES_MAX = 1_024
COUNT_MAX = (1 << 63) - 1
DIGEST_BYTES = 16


@lru_cache(maxsize=100_000)
def is_inlined(filename: str) -> bool:
    """Returns whether the name is that of a file whose bytes are in the database."""
    return _INLINED.search(filename) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReference:
    """A record that rows of a partition are in a file. The store's clock sets `last_updated`.

    A file can have references from several partitions. `count_approximate` is true if `row_count` is an
    estimate.
    """

    filename: str
    partition_id: str
    row_count: int
    job_id: str | None = None
    last_updated: datetime | None = None
    count_approximate: bool = False
    only_contains_data_for_this_partition: bool = True

    def __post_init__(self) -> None:
        check_text("filename", self.filename, FILENAME_BYTES_MAX)
        check_text("partition_id", self.partition_id)
        if self.job_id is not None:
            check_text("job_id", self.job_id)
        check_count(self.filename, "row_count", self.row_count)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileWithReferences:
    """A file with its references (maybe none) and its known facts.

    - `byte_count`: the object's size.
    - `row_count`: the number of all its rows.
    - `min_key`, `max_key`: its smallest and largest row key, encoded by `model.region.encode_key`.
    - `digest`: the XXH3-128 hash of its bytes (16 bytes). Files from before digests were recorded have none.
    - `deletions_till`: the number of the last deletion that does not apply to the file, because its rows are
      newer. None means the last deletion that exists when the file is added.
    - `content`: the bytes of an inlined file, which the database stores when the file is added. Files that
      are read from the database have None here.
    """

    filename: str
    references: tuple[FileReference, ...] = ()
    byte_count: int | None = None
    row_count: int | None = None
    min_key: bytes | None = None
    max_key: bytes | None = None
    last_updated: datetime | None = None
    digest: bytes | None = None
    deletions_till: int | None = None
    content: bytes | None = field(default=None, repr=False)

    @property
    def placeless(self) -> FileWithReferences:
        """The file with `deletions_till` None."""
        return self if self.deletions_till is None else replace(self, deletions_till=None)

    def __post_init__(self) -> None:
        check_text("filename", self.filename, FILENAME_BYTES_MAX)
        object.__setattr__(self, "references", _references(self.filename, self.references))
        for name, key in (("min_key", self.min_key), ("max_key", self.max_key)):
            if key is not None and type(key) is not bytes:
                raise InvalidInput(f"file {self.filename!r}: {name} must be bytes, not {key!r}")
        digest = self.digest
        if digest is not None and not (isinstance(digest, bytes) and len(digest) == DIGEST_BYTES):
            raise InvalidInput(f"file {self.filename!r}: digest must be {DIGEST_BYTES} bytes, not {digest!r}")
        for name in ("byte_count", "row_count", "deletions_till"):
            count = getattr(self, name)
            if count is not None:
                check_count(self.filename, name, count)
        if self.content is not None:
            check_content(self.filename, self.content, self.byte_count)
        for reference in self.references:
            if reference.filename != self.filename:
                raise InvalidInput(f"file {self.filename!r} has a reference to {reference.filename!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _JobFiles:
    """The id of a compaction job, and the names of files of one partition."""

    job_id: str
    partition_id: str
    filenames: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "filenames", _job_files(self.job_id, self.partition_id, self.filenames))


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignJobIdRequest(_JobFiles):
    """A request to assign the references of one partition to a compaction job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckAssignmentRequest(_JobFiles):
    """A request to check whether the references of one partition are assigned to a compaction job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaceFileReferencesRequest:
    """A request to replace a job's inputs on one partition by its output.

    - `new_reference`: the output; None if no rows are left.
    - `new_file`: the output's facts (bytes, smallest and largest key), if known.
    - `deletions_till`: the number of the last deletion that existed when the job began to read. The job has
      applied all deletions up to this number. If it is None, the store refuses the request while a deletion
      of rows in the inputs is pending.
    """

    job_id: str
    partition_id: str
    input_filenames: tuple[str, ...]
    new_reference: FileReference | None
    new_file: FileWithReferences | None = None
    deletions_till: int | None = None

    def __post_init__(self) -> None:
        names = _job_files(self.job_id, self.partition_id, self.input_filenames)
        object.__setattr__(self, "input_filenames", names)
        new, new_file = self.new_reference, self.new_file
        if not isinstance(new, FileReference | None):
            raise InvalidInput(f"job {self.job_id!r}: new_reference must be a FileReference, not {new!r}")
        if not isinstance(new_file, FileWithReferences | None):
            said = f"new_file must be a FileWithReferences, not {new_file!r}"
            raise InvalidInput(f"job {self.job_id!r}: {said}")
        if new_file is not None and new_file.content is not None:
            raise InvalidInput(
                f"job {self.job_id!r}: the output of a job is an object, and cannot be inlined"
            )
        if new is not None and new.partition_id != self.partition_id:
            raise InvalidInput(
                f"job {self.job_id!r}: output on {new.partition_id!r}, inputs on {self.partition_id!r}"
            )
        if new_file is not None and (new is None or new_file.filename != new.filename):
            raise InvalidInput(f"job {self.job_id!r}: new_file and new_reference are not the same file")
        if self.deletions_till is not None:
            check_count(self.input_filenames[0], "deletions_till", self.deletions_till)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFileReferenceRequest:
    """A request to replace one reference by others to the same file."""

    old_reference: FileReference
    new_references: tuple[FileReference, ...]

    def __post_init__(self) -> None:
        old = self.old_reference
        if not isinstance(old, FileReference):
            raise InvalidInput(f"a split's old_reference must be a FileReference, not {old!r}")
        object.__setattr__(self, "new_references", _references(old.filename, self.new_references))
        if not self.new_references:
            raise InvalidInput(f"file {self.old_reference.filename!r}: a split needs new references")
        for reference in self.new_references:
            if reference.filename != self.old_reference.filename:
                raise InvalidInput(
                    f"a split of {self.old_reference.filename!r} cannot refer to {reference.filename!r}"
                )
        if len({reference.partition_id for reference in self.new_references}) < len(self.new_references):
            raise InvalidInput(f"a split of {self.old_reference.filename!r} names a partition twice")

    @staticmethod
    def split_to_children(reference: FileReference, left_id: str, right_id: str) -> SplitFileReferenceRequest:
        """Returns a split that gives each child half of the rows, as an estimate.

        The halves add up to the whole.
        """
        left_rows = reference.row_count // 2
        halves = ((left_id, left_rows), (right_id, reference.row_count - left_rows))
        children = tuple(
            replace(
                reference,
                partition_id=child,
                row_count=rows,
                job_id=None,
                last_updated=None,
                count_approximate=True,
                only_contains_data_for_this_partition=False,
            )
            for child, rows in halves
        )
        return SplitFileReferenceRequest(old_reference=reference, new_references=children)


@dataclass(frozen=True, slots=True)
class AllFiles:
    """All referenced files, and a limited number of unreferenced files.

    `more_than_max` is true if there are more unreferenced files than the limit.
    """

    files: tuple[FileWithReferences, ...]
    more_than_max: bool

    @property
    def unreferenced(self) -> tuple[FileWithReferences, ...]:
        return tuple(file for file in self.files if not file.references)


def group_by_file(references: Iterable[FileReference]) -> list[FileWithReferences]:
    """Returns references grouped by file, in the order of each file's first reference."""
    grouped: dict[str, list[FileReference]] = {}
    for reference in references:
        grouped.setdefault(reference.filename, []).append(reference)
    return [FileWithReferences(filename=name, references=tuple(refs)) for name, refs in grouped.items()]


def check_count(filename: str, what: str, value: object) -> None:
    """Raises `InvalidInput` for a value that is not a whole number from 0 to 2**63 - 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= COUNT_MAX:
        raise InvalidInput(
            f"file {filename!r}: {what} must be an integer from 0 to {COUNT_MAX}, not {value!r}"
        )


def check_content(filename: str, content: object, byte_count: int | None) -> None:
    """Raises `InvalidInput` for content that is not the bytes of an inlined file of that size."""
    if not isinstance(content, bytes) or len(content) != byte_count:
        raise InvalidInput(f"file {filename!r}: content must be its {byte_count} bytes")
    if not is_inlined(filename):
        raise InvalidInput(f"file {filename!r}: only a file below {INLINED}/ has its content in the database")


def _references(filename: str, references: object) -> tuple[FileReference, ...]:
    """Returns references to a file as a tuple. Raises `InvalidInput` for anything but file references."""
    if isinstance(references, str | bytes) or not isinstance(references, Iterable):
        raise InvalidInput(f"file {filename!r}: references must be a tuple, not {references!r}")
    found = tuple(references)
    for reference in found:
        if not isinstance(reference, FileReference):
            raise InvalidInput(f"file {filename!r}: references must be FileReferences, not {reference!r}")
    return found


def _job_files(job_id: str, partition_id: str, filenames: Sequence[str]) -> tuple[str, ...]:
    check_text("job_id", job_id)
    check_text("partition_id", partition_id)
    if isinstance(filenames, str):
        raise InvalidInput(f"job {job_id!r}: filenames must be a list, not the string {filenames!r}")
    names = tuple(filenames)
    if not names:
        raise InvalidInput(f"job {job_id!r}: filenames must not be empty")
    if len(set(names)) != len(names):
        raise InvalidInput(f"job {job_id!r}: a filename is named twice")
    check_texts("filename", names, FILENAME_BYTES_MAX)
    return names
