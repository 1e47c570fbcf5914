"""Tables of any size that are metadata only: a real partition tree and references to files that are nowhere.

The tree is the one that `Catalog.create` makes of the split points 1000, 2000, …: the leaf of number n has
the keys from n * 1000 to n * 1000 + 999 (the first one also those below, the last one those above). Each leaf
has files of as many ingests. An ingest wrote a file for each leaf, or a single one that all leaves refer to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from dormouse.commits.requests import Envelope, ReplaceFileReferences
from dormouse.model.file_reference import FileReference, FileWithReferences, ReplaceFileReferencesRequest
from dormouse.model.keys import encode_value
from dormouse.model.partition_tree import ROOT
from dormouse.model.table import TableRecord
from dormouse.model.types import LONG

FILES_PER_JOB = 11
KEYS_PER_LEAF = 1_000
ROWS_PER_FILE = 100_000
BYTES_PER_FILE = 4_000_000


class Node(NamedTuple):
    """A partition; it has the leaves of the numbers from `first` to before `end`."""

    partition_id: str
    parent_id: str | None
    first: int
    end: int
    children: tuple[str, str] | None

    @property
    def middle(self) -> int:
        """The first leaf of the right half."""
        return (self.first + self.end + 1) // 2


@dataclass(frozen=True)
class StateTable:
    """A table with a leaf for each number below `leaves`; where it is claimed, its job has its number."""

    record: TableRecord
    leaves: int
    files_per_leaf: int = FILES_PER_JOB
    one_file_per_ingest: bool = False

    def partition_id(self, leaf: int) -> str:
        return self.path(leaf)[-1]

    def path(self, leaf: int) -> list[str]:
        """The ids of the partitions from the root down to the leaf of a number, without the tree."""
        # before a partition is divided, as many were divided as `divided` counts; its halves' ids count on
        first, end, divided, path = 0, self.leaves, 0, [ROOT]
        while end - first > 1:
            middle = (first + end + 1) // 2
            if leaf < middle:
                path.append(f"0-{2 * divided}")
                end, divided = middle, divided + 1
            else:
                path.append(f"0-{2 * divided + 1}")
                first, divided = middle, divided + middle - first
        return path

    def nodes(self) -> Iterator[Node]:
        """Every partition, a parent before its children, left before right."""
        divided = 0
        todo: list[tuple[str, str | None, int, int]] = [(ROOT, None, 0, self.leaves)]
        while todo:
            partition_id, parent_id, first, end = todo.pop()
            if end - first == 1:
                yield Node(partition_id, parent_id, first, end, None)
                continue
            left, right = f"0-{2 * divided}", f"0-{2 * divided + 1}"
            divided += 1
            node = Node(partition_id, parent_id, first, end, (left, right))
            yield node
            todo += [(right, partition_id, node.middle, end), (left, partition_id, first, node.middle)]

    def job_id(self, leaf: int) -> str:
        return str(self._id("job", leaf))

    def commit_id(self, leaf: int) -> str:
        return str(self._id("commit", leaf))

    def ingests(self) -> list[str]:
        """The prefixes of the names of what each ingest wrote."""
        prefix = self.record.object_prefix
        return [f"{prefix}{self._id('ingest', ingest)}/" for ingest in range(self.files_per_leaf)]

    def inputs(self, leaf: int) -> tuple[str, ...]:
        """The files of the leaf's job."""
        name = "all" if self.one_file_per_ingest else self.partition_id(leaf)
        return tuple(f"{ingest}{name}.parquet" for ingest in self.ingests())

    def request(
        self, leaf: int, job_id: str | None = None, inputs: tuple[str, ...] | None = None
    ) -> ReplaceFileReferencesRequest:
        """What a compaction sends when it is done: the leaf's job, or another one of other files."""
        partition, job_id = self.partition_id(leaf), job_id or self.job_id(leaf)
        name = f"{self.record.object_prefix}{job_id}/{partition}.parquet"
        file = new_file(name, partition, keys_between(leaf, leaf + 1), self.files_per_leaf)
        return ReplaceFileReferencesRequest(
            job_id=job_id,
            partition_id=partition,
            input_filenames=inputs or self.inputs(leaf),
            new_reference=file.references[0],
            new_file=file,
        )

    def envelope(self, leaf: int) -> Envelope:
        """The same as a commit request, with a commit id of its own."""
        request = ReplaceFileReferences(
            commit_id=self.commit_id(leaf), table=self.record.name, requests=(self.request(leaf),)
        )
        return Envelope(request, self.record.table_id)

    def _id(self, kind: str, number: int) -> UUID:
        text = f"{self.record.table_id} {kind} {number}"
        return UUID(bytes=hashlib.blake2b(text.encode(), digest_size=16).digest())


def new_file(name: str, partition_id: str, keys: tuple[bytes, bytes], inputs: int = 1) -> FileWithReferences:
    """A file of one partition, with the rows of so many others."""
    rows = inputs * ROWS_PER_FILE
    return FileWithReferences(
        filename=name,
        references=(FileReference(filename=name, partition_id=partition_id, row_count=rows),),
        byte_count=inputs * BYTES_PER_FILE,
        row_count=rows,
        min_key=keys[0],
        max_key=keys[1],
    )


def key_at(leaf: int) -> bytes:
    """The first key of a leaf, as it is stored."""
    return encode_value(LONG, leaf * KEYS_PER_LEAF)


def keys_between(first: int, end: int) -> tuple[bytes, bytes]:
    """The smallest and largest key of the leaves from one to before another."""
    return key_at(first), encode_value(LONG, end * KEYS_PER_LEAF - 1)


def spread(whole: int, some: int) -> range:
    """The numbers of some of the whole, as evenly as steps can be."""
    return range(0, whole, max(1, whole // some))[:some] if some else range(0)
