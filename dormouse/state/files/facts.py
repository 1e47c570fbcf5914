"""Facts of files, and the references and deletions of a query, as the file reference store returns them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from json import dumps
from operator import itemgetter
from typing import Any, NamedTuple

from dormouse.model.file_reference import FileReference, FileWithReferences
from dormouse.model.text import narrow_bytes
from dormouse.postgres.queries import Uuids, bytes_, texts
from dormouse.state.files.layout import reference_from_row

DeletionRows = Sequence[tuple[int, str] | tuple[int, str, bool]]
"""Deletions in any order, each with its number, its condition as JSON, and True if it is an erasure."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The facts of a file.

    `unreferenced_at` is the time at which garbage collection noticed that its last reference had been
    removed.
    """

    filename: str
    byte_count: int | None
    row_count: int | None
    min_key: bytes | None
    max_key: bytes | None
    added_at: datetime | None
    unreferenced_at: datetime | None
    digest: bytes | None


class KeyBounds(NamedTuple):
    """The smallest and largest value of each row key among some rows, each encoded as bytes.

    None means no bound. Empty bounds mean all rows.
    """

    min_keys: Sequence[bytes | None] = ()
    max_keys: Sequence[bytes | None] = ()

    def arrays(self) -> dict[str, Any]:
        return {"min_keys": bytes_(self.min_keys), "max_keys": bytes_(self.max_keys)}


class KnownPlan(NamedTuple):
    """The facts that a process knows before it plans a query of some partitions, and what it wants.

    - `till`: the snapshot of the last plan of the same partitions, or None.
    - `state`: the state of the references in that plan, or None.
    - `inlined`: the prefix of the names of the table's inlined files whose content comes with the plan; None
      if no content is wanted.
    - `bytes_max`: the most bytes of content. Other files are read by another query.
    - `lowest`, `highest`: encoded bounds of the keys. Content of other files does not come.
    - `wanted`: known inlined files whose content is wanted.
    - `near`: the known files that may have wanted keys, whose references come again if there are deletions;
      None for all.
    """

    till: str | None
    state: str | None
    inlined: str | None
    bytes_max: int
    lowest: bytes | None = None
    highest: bytes | None = None
    wanted: Sequence[str] = ()
    near: Sequence[str] | None = None

    def values(self) -> dict[str, Any]:
        """Returns the values of the statement."""
        return {
            "known_till": self.till,
            "known_state": self.state,
            "inlined": self.inlined,
            "bytes_max": self.bytes_max,
            "lowest": self.lowest,
            "highest": self.highest,
            "wanted_ids": Uuids([narrow_bytes(name) for name in self.wanted]),
            "wanted": texts(self.wanted),
            "near_ids": None if self.near is None else Uuids([narrow_bytes(name) for name in self.near]),
        }


@lru_cache
def shown_by(*properties: Any) -> str:
    """Returns the values of the properties by which rows are merged and shown, as JSON for a plan."""
    return dumps(properties)


@dataclass(frozen=True)
class References:
    """References, each a partition's id and a file's name, in sets that are never joined: they are large."""

    sets: tuple[frozenset[tuple[str, str]], ...] = ()

    def __bool__(self) -> bool:
        return any(self.sets)

    def lack(self, some: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
        """Returns those of some references that are not among these."""
        return some.difference(*self.sets)


class PlannedRows(NamedTuple):
    """The references and deletions, from one snapshot, that a query is planned with.

    Each reference has these values:

    1. the partition id
    2. the filename
    3. True if the file has only rows of this partition
    4. the file's bytes
    5. the file's smallest key
    6. the file's largest key
    7. `till`: of the deletions up to this number, readers apply only those in the last value
    8. the deletions up to `till` that readers still apply to the file
    9. the number of the file's rows
    """

    references: list[Sequence[Any]]
    deletions: DeletionRows
    contents: Sequence[tuple[str, bytes]] = ()
    """The names and contents of inlined files that came with the plan."""
    state: str | None = None
    """The state of all references of the partitions, if it was asked for."""
    is_same: bool = False
    """True if the known references are still those of the partitions.

    `references` then has only those that were added since. If there are deletions, it also has those of known
    files that may have wanted keys.
    """
    added: Sequence[Sequence[Any]] = ()
    """The references that were added since, if the known ones are still those of the partitions."""
    inlined: References | None = None
    """The references to inlined files, if `references` may lack some of them."""


class Planned(NamedTuple):
    """The data with which a query of a table's partitions is planned, all as of one snapshot."""

    epoch: int
    made_at: int
    """The time of the epoch, in microseconds since 1970."""
    schema_version: int
    is_shown_so: bool
    """True if the name and the properties that readers apply are the same as in this process."""
    snapshot: str
    rows: PlannedRows
    """The references, and the pending deletions that may affect rows within the bounds."""


class FileDeletions(NamedTuple):
    """The deletions that readers need not apply to a file, and the file's smallest and largest key.

    Deletions with numbers up to `till` need not be applied, except those in `left`. All values are None for
    an untracked file.
    """

    till: int | None
    min_key: bytes | None
    max_key: bytes | None
    left: list[int] | None


class FilesDeletions(NamedTuple):
    """Some deletions of a table, and facts about some files.

    `till` is the number of the table's last deletion. `files` are in the order of the request.
    """

    till: int
    deletions: DeletionRows
    files: list[FileDeletions]


FACTS = ("filename", "byte_count", "row_count", "min_key", "max_key", "last_updated", "digest")


def files_of_rows(rows: Iterable[Sequence[Any]]) -> list[FileWithReferences]:
    """Returns files with their references.

    Each of `rows` has the facts of a file and one of its references. The rows are sorted by file.
    """
    files = []
    for (filename, *facts), group in groupby(rows, key=itemgetter(*range(len(FACTS)))):
        references = [reference_from_row(row[len(FACTS) :]) for row in group]
        files.append(file_of_row((filename, *facts), references))
    return files


def file_of_row(facts: Sequence[Any], references: Sequence[FileReference] = ()) -> FileWithReferences:
    """Returns a file from its facts."""
    return FileWithReferences(**dict(zip(FACTS, facts, strict=True)), references=tuple(references))
