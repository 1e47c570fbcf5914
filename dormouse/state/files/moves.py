"""What merges of partitions do to references: those of the leaves are moved, those that come late renamed.

A commit may have been planned on an older tree, and name partitions that are gone. The statements that add
references refuse it; then it is sent again, with the partitions that took their places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psycopg

from dormouse.errors import FileReferenceAssignedToJob, NotWhole, PartitionForgotten
from dormouse.model.file_reference import (
    COUNT_MAX,
    FileReference,
    FileWithReferences,
    SplitFileReferenceRequest,
)
from dormouse.postgres.transaction import fetched
from dormouse.state.files.layout import OwnTables

Places = Mapping[str, str]
"""Partitions that are gone, and those that took their places."""


class Moves:
    """The references of one table, inside a transaction that changes its partitions."""

    def __init__(self, own: OwnTables) -> None:
        self._own = own

    def keep_writers_out(self, conn: psycopg.Connection[Any]) -> None:
        """Until the transaction ends, which has seen nothing yet; for `run_alone`."""
        self._rows(conn, "keep_writers_out", {})

    def sizes(self, conn: psycopg.Connection[Any], partition_ids: Sequence[str]) -> list[tuple[int, int]]:
        """Rows and bytes of each partition, as its references tell."""
        rows = self._rows(conn, "sealed_sizes", {"partition_ids": list(partition_ids)})
        found = {partition_id: (row_count, byte_count) for partition_id, row_count, byte_count in rows}
        return [found[partition_id] for partition_id in partition_ids]

    def check_movable(
        self, conn: psycopg.Connection[Any], partition_ids: Sequence[str], same_region: str
    ) -> None:
        """Raises `FileReferenceAssignedToJob`, or `NotWhole` of others than the one of the same region."""
        values = {"partition_ids": list(partition_ids), "same_region": same_region}
        for partition_id, filename, job_id in self._rows(conn, "first_that_stays", values):
            table = self._own.table.name
            if job_id is not None:
                raise FileReferenceAssignedToJob(table, filename, partition_id, job_id)
            raise NotWhole(
                f"partition {partition_id!r} of table {table!r} refers to file {filename!r}, which also "
                f"holds other partitions' rows: run 'dormouse compact {table} --full' first"
            )

    def move(self, conn: psycopg.Connection[Any], partition_ids: Sequence[str], place: str) -> None:
        """Moves all references of partitions to another, which has none."""
        self._rows(conn, "move", {"partition_ids": list(partition_ids), "place": place})

    def _rows(self, conn: psycopg.Connection[Any], name: str, values: Mapping[str, Any]) -> list[Any]:
        table = self._own.table
        key = {"table_id": table.table_id, "salt_buckets": table.properties.salt_buckets}
        return fetched(conn.execute(self._own.on(name), {**values, **key}))


def of_forgotten(
    table: str, items: Sequence[FileWithReferences | SplitFileReferenceRequest], forgotten: Collection[str]
) -> dict[int, PartitionForgotten]:
    """Which items add references to partitions of which it is forgotten what took their places; by number."""
    return {
        number: PartitionForgotten(table, one.filename, one.partition_id)
        for number, item in enumerate(items if forgotten else ())
        for one in (item.references if isinstance(item, FileWithReferences) else item.new_references)
        if one.partition_id in forgotten
    }


def file_in_place(file: FileWithReferences, places: Places) -> FileWithReferences:
    """A file whose references name the partitions that there are."""
    return replace(file, references=_in_place(file.references, places))


def split_in_place(request: SplitFileReferenceRequest, places: Places) -> SplitFileReferenceRequest:
    """A split to the partitions that there are."""
    return replace(request, new_references=_in_place(request.new_references, places))


def _in_place(references: Iterable[FileReference], places: Places) -> tuple[FileReference, ...]:
    """References to one file, those that became one with their counts added up."""
    of_partition: dict[str, list[FileReference]] = defaultdict(list)
    for reference in references:
        of_partition[places.get(reference.partition_id, reference.partition_id)].append(reference)
    return tuple(
        replace(
            found[0],
            partition_id=partition_id,
            row_count=min(sum(each.row_count for each in found), COUNT_MAX),
            count_approximate=any(each.count_approximate for each in found),
            only_contains_data_for_this_partition=len(found) == 1
            and found[0].only_contains_data_for_this_partition,
        )
        for partition_id, found in of_partition.items()
    )
