"""The tables of one instance: what works on each, what changes them, and SQL over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dormouse.catalog import Catalog
from dormouse.commits.commit_queues import CommitQueues
from dormouse.context import JobCommits, TableContext
from dormouse.errors import TableNotFound
from dormouse.model.properties import TableProperties
from dormouse.model.table import TableRecord
from dormouse.objects import ObjectStore
from dormouse.objects.activity import note_if_shared
from dormouse.partitions.tree_cache import TreeCache
from dormouse.postgres import ConnectionSupplier

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection

    from dormouse.query import PlanSummary
    from dormouse.query.interruptible import Interruption
    from dormouse.query.where import Where


@dataclass(frozen=True)
class Tables:
    """What a `Table` needs of the instance that it belongs to."""

    dsn: str = field(repr=False)
    supplier: ConnectionSupplier
    objects: ObjectStore
    catalog: Catalog
    trees: TreeCache
    commits: CommitQueues
    job_commits: JobCommits | None

    def context(self, record: TableRecord) -> TableContext:
        """The services of a table."""
        return TableContext(self.dsn, self.supplier, self.objects, record, self.job_commits, self.trees)

    def change_properties(
        self, table: TableRecord, change: Callable[[TableProperties], TableProperties]
    ) -> TableContext:
        context = self.context(self.catalog.change_properties(table, change))
        self.note_activity()
        return context

    def convert_layout(self, table: TableRecord, layout: str) -> TableContext:
        return self.context(self.catalog.convert_layout(table, layout))

    def note_activity(self) -> None:
        """Tells the schedules of a deployed instance that a table has changed."""
        note_if_shared(self.objects)

    def sql(self, statement: str, interruption: Interruption | None = None) -> pa.RecordBatchReader:
        from dormouse.query import sql

        contexts = self._in_statement(statement)
        return sql(contexts, statement, known=self.catalog.names, interruption=interruption)

    def duckdb(self, where: Mapping[str, Where]) -> DuckDBPyConnection:
        from dormouse.sql.views import opened

        while True:
            tables = self.catalog.tables()
            try:
                return opened(self.objects, {one.name: self.context(one) for one in tables}, where)
            except TableNotFound:
                if self.catalog.tables() == tables:
                    raise
                # one was dropped since it was listed

    def explain_sql(self, statement: str) -> dict[str, PlanSummary]:
        from dormouse.query import explain_sql

        return explain_sql(self._in_statement(statement), statement, known=self.catalog.names)

    def _in_statement(self, statement: str) -> dict[str, TableContext]:
        """The tables that a statement may mean."""
        return {record.name: self.context(record) for record in self.catalog.tables_in(statement)}
