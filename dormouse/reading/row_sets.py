"""Sets of rows that deletions list, and the search for equal rows in the batches of a file.

Values are equal as by SQL's IS NOT DISTINCT FROM: NULL equals NULL, NaN equals NaN, and -0.0 equals 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from io import BytesIO
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.errors import ObjectDamaged
from dormouse.model.file_reference import INLINED
from dormouse.model.schema import Field
from dormouse.objects.inlined import InlinedFiles
from dormouse.objects.names import missing, parquet_suffix
from dormouse.objects.store import ObjectStore

if TYPE_CHECKING:
    from dormouse.reading.row_search import RowSearch


@dataclass(frozen=True, slots=True)
class RowSet:
    """The rows that deletions list: values of `fields` together, which have their present names and types.

    `names` are those of Parquet files in the database, which have them in `columns`, with the types of the
    version `version` of the schema. A name contains a digest of its file, so that equal names mean equal
    rows. `count` is the number of the rows. `objects` reads the files.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    fields: tuple[Field, ...]
    version: int
    count: int
    objects: ObjectStore | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves out the connections of `objects`, which another process replaces by its own (`bound`)."""
        return RowSet, (self.names, self.columns, self.fields, self.version, self.count)

    @property
    def form(self) -> object:
        """The columns of the rows. Sets of the same form can be joined."""
        return self.columns, self.fields, self.version

    def bound(self, objects: ObjectStore) -> RowSet:
        """Returns the set with the store that reads its file."""
        return replace(self, objects=objects)

    def search(self) -> RowSearch:
        """Returns the search for these rows, which is cached. Raises the errors of `ObjectStore.get`."""
        from dormouse.reading.row_search import KNOWN  # NumPy, which clients lack

        return KNOWN.of(replace(self, objects=None), self.fields, self.read, joined=len(self.names) > 1)

    def local_paths(self) -> list[str]:
        """Returns the paths of the files on this machine. Their columns have their former names and types."""
        self._fetch()
        return [str(self._store.local_path(name)) for name in self.names]

    def read(self) -> pa.Table:
        """Returns the rows, those of each file in its order. Raises `ObjectDamaged`."""
        self._fetch()
        return pa.concat_tables(map(self._file, self.names))

    def _fetch(self) -> None:
        """Reads all files from the database in one round trip. Raises `ObjectNotFound` if one is lost."""
        if isinstance(self._store, InlinedFiles):
            self._store.fetch(self.names)
            for name in self._store.lacking(self.names):
                raise missing(name, "the database")

    def _file(self, name: str) -> pa.Table:
        content = self._store.get(name)
        if not is_named(content, name):
            raise ObjectDamaged(f"{name!r} in the database differs from the rows that were deleted")
        found = pq.read_table(BytesIO(content), columns=list(self.columns), use_threads=False)
        return found.select(list(self.columns)).rename_columns([one.name for one in self.fields])

    @property
    def _store(self) -> ObjectStore:
        if self.objects is None:
            raise AssertionError(f"{self.names[0]!r} is not bound to a store")
        return self.objects


def joined_sets(sets: Sequence[RowSet]) -> RowSet:
    """Returns the rows of sets of the same form."""
    names = tuple(dict.fromkeys(name for one in sets for name in one.names))
    return replace(sets[0], names=names, count=sum(one.count for one in sets))


@dataclass(frozen=True, slots=True)
class FewRows:
    """A few rows that a deletion lists: distinct values of `fields` together, without nulls and floats."""

    fields: tuple[Field, ...]
    rows: tuple[tuple[Any, ...], ...]


def is_named(content: bytes, name: str) -> bool:
    """Returns whether a name has the digest of the content."""
    return content_name("", content).rsplit("/", 2)[1] == name.rsplit("/", 2)[1]


def content_name(object_prefix: str, content: bytes) -> str:
    """Returns the name of the file with the rows of a deletion: that of an inlined file."""
    digest = blake2b(content, digest_size=16).hexdigest()
    return f"{object_prefix}{INLINED}/{digest}/rows{parquet_suffix(1)}"
