"""The files of a change: rows by ids and versions, one file for each leaf that they are in."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

import pyarrow as pa

from dormouse.context import TableContext
from dormouse.data.leaf_files import LeafFiles
from dormouse.data.leaf_lookup import LeafLookup
from dormouse.files.attempts import WriteAttempt
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.schema import Schema

MEMORY_BYTES = 32 * 1024 * 1024


class RowFiles:
    """Takes blocks; a context manager: what waits on the local disk goes at the end."""

    def __init__(self, context: TableContext, attempt: WriteAttempt, schema: Schema) -> None:
        """`schema` is that of the table when the files are committed."""
        self.attempt = replace(attempt, schema_version=schema.version)
        self._lookup = LeafLookup(context.partitions.tree())
        self._writer = LeafFiles(
            context.objects, schema, context.properties, self._lookup.leaf_ids, self.attempt.object_name
        )
        self._open = ExitStack()
        self._sorter = self._open.enter_context(self._writer.sorter(MEMORY_BYTES))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def add(self, rows: pa.RecordBatch) -> None:
        """The rows of a block."""
        self._sorter.add(rows, self._lookup.indexes(rows))

    def written(self) -> Sequence[FileWithReferences]:
        """All rows as files, whole and durable."""
        return list(self._writer.write(self._sorter))
