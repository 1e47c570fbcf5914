"""Deletions of rows by the values of some of their columns."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from dormouse.state.context import TableContext
from dormouse.state.files.deletions import NewDeletion
from dormouse.writing.deleting import asked_to_delete


def deletions_of_rows(context: TableContext, batches: Iterable[pa.RecordBatch]) -> list[NewDeletion]:
    """Returns the deletions of the current rows with some values of some columns."""
    tuples = {tuple(sorted(row.items())) for batch in batches for row in batch.to_pylist()}
    return [asked_to_delete(context, dict(one))[1] for one in tuples]
