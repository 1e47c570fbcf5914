"""Everything that works on one table, wired together; and its address, for other processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from dormouse.files.attempts import WriteAttempts
from dormouse.files.compaction_jobs import CompactionJobs
from dormouse.files.garbage import GarbageCollector
from dormouse.files.store import FileReferenceStore
from dormouse.model.properties import TableProperties
from dormouse.model.schema import Schema
from dormouse.model.table import TableRecord
from dormouse.objects import ObjectStore, open_store
from dormouse.partitions.store import PartitionStore
from dormouse.postgres.connection import ConnectionSupplier, Supplier

TASK_CONNECTIONS_MAX = 2


@dataclass(frozen=True)
class TableAddress:
    """How another process, such as a Spark task, opens the same table. Has credentials: never log it."""

    dsn: str = field(repr=False)
    objects_url: str
    objects_options: dict[str, str] = field(repr=False)
    table: TableRecord

    @contextmanager
    def open(self) -> Iterator[TableContext]:
        """The table's services, over connections that are closed at the end."""
        supplier = ConnectionSupplier(self.dsn, connections_max=TASK_CONNECTIONS_MAX)
        try:
            yield TableContext(
                self.dsn, supplier, open_store(self.objects_url, **self.objects_options), self.table
            )
        finally:
            supplier.close()


@dataclass(frozen=True)
class TableContext:
    """The services of one table."""

    dsn: str = field(repr=False)
    supplier: Supplier
    objects: ObjectStore
    table: TableRecord

    @property
    def schema(self) -> Schema:
        return self.table.schema

    @property
    def properties(self) -> TableProperties:
        return self.table.properties

    @property
    def address(self) -> TableAddress:
        return TableAddress(self.dsn, self.objects.url, self.objects.options, self.table)

    @cached_property
    def store(self) -> FileReferenceStore:
        return FileReferenceStore(self.supplier, self.table)

    @cached_property
    def partitions(self) -> PartitionStore:
        return PartitionStore(self.supplier, self.table)

    @cached_property
    def attempts(self) -> WriteAttempts:
        return WriteAttempts(self.supplier, self.objects)

    @cached_property
    def jobs(self) -> CompactionJobs:
        return CompactionJobs(self.supplier, self.table, self.store)

    @cached_property
    def garbage(self) -> GarbageCollector:
        return GarbageCollector(self.supplier, self.store, self.objects, self.attempts)
