"""A table, as readers see it: queries, changes and facts. Its methods only delegate."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

from dormouse.api import shown
from dormouse.api.tables import Tables
from dormouse.model.cut import When
from dormouse.model.partition_tree import Partition
from dormouse.model.schema import Schema
from dormouse.model.table import Container, TableProperties, is_edited
from dormouse.state.context import TableContext
from dormouse.state.files.deletions import RecordedDeletion, erasure_proofs
from dormouse.state.files.facts import FileFacts
from dormouse.state.files.shapes import SchemaChange
from dormouse.state.files.store import FileReferenceStore
from dormouse.state.history.changes import span
from dormouse.state.history.consumers import Consumers, ConsumerStatus
from dormouse.state.history.history import History, TableStatus, status_of
from dormouse.state.history.moments import position_of
from dormouse.state.partitions import PartitionStore

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.durability.erasing import EraseReport
    from dormouse.model.types import Parameters
    from dormouse.reading.planner import PlanSummary
    from dormouse.reading.sql.engine import Sessions
    from dormouse.reading.sql.views import LiveFile
    from dormouse.reading.streams import Answer, Interruption
    from dormouse.reading.where import Where


class TableReads(Container):
    """The readers of a table; see `Table`."""

    def __init__(
        self, context: TableContext, tables: Tables, *, read_only: bool = False, every_version: bool = False
    ) -> None:
        self._known = context
        self._tables = tables
        self._read_only = read_only
        self.every_version = every_version
        """True if readers of a row table see every version of its rows."""

    def __repr__(self) -> str:
        return shown.table_text(self)

    def _repr_html_(self) -> str:
        return shown.table_html(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Table cannot be pickled: open its instance again in the other process")

    @property
    def name(self) -> str:
        return self._followed().table.name

    @property
    def known_name(self) -> str:
        """The name when the table was last looked up; reads nothing from the database."""
        return self.context.table.name

    @property
    def is_row_table(self) -> bool:
        """True if the table's rows are edited: then open it with `instance.row_table`."""
        return is_edited(self.context.properties)

    @property
    def properties(self) -> TableProperties:
        return self.context.properties

    @property
    def layout(self) -> str:
        """The layout that tracks the table's files, as last known to this process."""
        return self.files.table.layout

    @property
    def files(self) -> FileReferenceStore:
        """The files that hold the table's rows, and the partitions' references to them."""
        return self.context.store

    @property
    def partitions(self) -> PartitionStore:
        """The partition tree."""
        return self.context.partitions

    @property
    def context(self) -> TableContext:
        """The services of the table, with the newest name, columns and properties that this process knows."""
        self._known = self._known.newest_known
        return self._known

    @property
    def history(self) -> History:
        """The table's past: its epochs, and the lineage of its partitions."""
        return History(self.context, self._tables.check_writable)

    @property
    def schema(self) -> Schema:
        """The current columns, including changes by other processes."""
        return self._reading_of(self._followed()).schema

    @property
    def known_schema(self) -> Schema:
        """The columns when the table was last looked up; reads nothing from the database."""
        return self.reading.schema

    def schema_at(self, when: When) -> Schema:
        """Returns the columns at a moment: a cut, its name or an aware datetime. Raises `query`'s errors."""
        return self.reading.as_of(position_of(self.context, when)).schema

    def schema_changes(self) -> list[SchemaChange]:
        """Returns all changes of the columns since the table was created, the oldest first."""
        return self.context.shapes.changes()

    def query(
        self,
        where: Where = None,
        columns: Sequence[str] | None = None,
        *,
        limit: int | None = None,
        offset: int = 0,
        descending: bool = False,
        as_of: When | None = None,
        interruption: Interruption | None = None,
        sessions: Sessions | None = None,
        verify: bool = False,
    ) -> Answer:
        """Returns the rows that meet conditions, in key order, as a stream.

        `where` maps columns to a value, a `Range` or a list of them; `columns` are the columns to read.
        Conditions on row keys limit the files that are read. NaN is the largest double. The first `offset`
        rows are skipped. With `descending`, DuckDB sorts the largest keys first, in one of `sessions`.

        `as_of` reads the rows of another moment, with all commits up to it: a cut, a cut's name, or an aware
        datetime. Another thread ends the reading with `interruption.set()`. Raises `InvalidQuery`,
        `InvalidRange`, `InvalidCut`, and `CutExpired` for a moment whose files are no longer kept.

        `verify` reads each file whole before its first use by this process, and compares its digest. For a
        changed file, the query raises `ObjectDamaged` before it returns a row of it; for a file without a
        digest, `InvalidQuery`. The table's property `verify_reads` turns this on for every reader.
        """
        reading = self.reading.verifying(verify)
        return self._tables.query(
            reading, where, columns, limit, offset, interruption, as_of, sessions, descending
        )

    def explain(self, where: Where = None, *, as_of: When | None = None) -> PlanSummary:
        """Returns the partitions, files and bytes that a query would read. Raises the errors of `query`."""
        from dormouse.reading.table_view import explain

        return explain(self.reading, where, as_of)

    def head(
        self, rows: int = 10, columns: Sequence[str] | None = None, *, as_of: When | None = None
    ) -> pa.Table:
        """Returns the first `rows` rows in key order. Raises the errors of `query`."""
        return self.query(columns=columns, limit=rows, as_of=as_of).read_all()

    def to_pandas(self, where: Where = None, columns: Sequence[str] | None = None, **how: Any) -> Any:
        """Returns the rows of `query` as a pandas DataFrame. Raises its errors, and `DependencyMissing`."""
        from dormouse.reading.streams import pandas_of

        return pandas_of(lambda: self.query(where, columns, **how))

    def to_polars(self, where: Where = None, columns: Sequence[str] | None = None, **how: Any) -> Any:
        """Returns the rows of `query` as a Polars DataFrame. Raises its errors, and `DependencyMissing`."""
        from dormouse.reading.streams import polars_of

        return polars_of(lambda: self.query(where, columns, **how))

    def count(self, where: Where = None, *, as_of: When | None = None, verify: bool = False) -> int:
        """Returns the exact number of rows that match `where`. Raises the errors of `query`.

        To count all rows, it reads mostly the footers of files, unless `verify`. To count the current rows of
        a row table, it reads only the database.
        """
        return self._tables.count(self.reading, where, as_of, verify)

    def live_files(
        self, as_of: When | None = None, inlined_to: str | PathLike[str] | None = None
    ) -> list[LiveFile]:
        """Returns the Parquet files that hold the table's rows, now or at a moment, to read without Dormouse.

        Each has a `path`, and a `condition` in SQL if not all rows count. They exist for `gc_delay_seconds`
        or longer. Files in the database are copied to `inlined_to`, a folder or S3 URL. Raises `InvalidQuery`
        without it, or if no condition can select the rows; `InvalidCut` and `CutExpired`.
        """
        from dormouse.reading.sql.views import live_files

        return live_files(self.reading, as_of, inlined_to)

    def sql(
        self,
        statement: str,
        parameters: Parameters | None = None,
        *,
        as_of: When | None = None,
        interruption: Interruption | None = None,
        verify: bool = False,
    ) -> Answer:
        """Runs a SELECT over this and other tables of the instance; see `Instance.sql`."""
        return self._tables.sql(statement, parameters, interruption, as_of=as_of, verify=verify)

    def erasures(self) -> list[EraseReport]:
        """Returns the proofs of the table's erasures, the oldest first."""
        from dormouse.durability.erasing import EraseReport

        return [EraseReport.from_json(text) for text in erasure_proofs(self.context.store)]

    def deletions(self, *, pending_only: bool = True) -> list[RecordedDeletion]:
        """Returns the pending deletions, or without `pending_only` all deletions in the history."""
        return self.context.deletions.list(pending_only=pending_only)

    def changes(
        self,
        after: When | None,
        till: When | None = None,
        columns: Sequence[str] | None = None,
        *,
        interruption: Interruption | None = None,
    ) -> Answer:
        """Returns, as a stream, the rows that appeared or disappeared after a moment, until `till` or now.

        A moment is a Cut, a cut's name or an aware datetime; the commits of the moment itself count as before
        it. With `after` None, it begins with the table. Each row has the wanted `columns` and `_change`:
        "insert" for ingested rows, or "delete" for deleted rows, with their values before the deletion. The
        table's filter and aggregates do not apply. Rows between two deletions have no order. Maintenance,
        such as compaction, neither loses nor repeats a row. A keyed table returns each key whose row differs
        between the moments once: "upsert" with the new row, or "delete" with its row keys and nulls.

        Raises `InvalidCut` for an impossible moment. Raises `CutExpired` before the first row, if some of the
        rows are no longer kept.
        """
        from dormouse.reading.changes import changes
        from dormouse.reading.streams import Answer

        start, end = span(self.context, after, till)
        return Answer(changes(self.context, start, end, columns, interruption=interruption))

    def consumers(self) -> list[ConsumerStatus]:
        """Returns the consumers by name, with the rows and seconds by which each is behind the table."""
        return Consumers(self.context).statuses()

    def partition_page(self, after: str = "", limit: int = 100, *, leaves: bool = False) -> list[Partition]:
        """Returns at most `limit` partitions (or only leaves) with ids above `after`, in the order of ids."""
        return self.partitions.page(after, limit, leaves=leaves)

    def file_page(self, after: str | None = None, limit: int = 100) -> list[FileFacts]:
        """Returns at most `limit` files with their facts, after the file named `after`, in a stable order."""
        return self.files.page(after, limit)

    def status(self) -> TableStatus:
        """Returns counts of the table's parts, and the results of its rounds.

        Reads only what changed since the last call.
        """
        return status_of(self._reading_of(self._followed()), read_only=self._read_only)

    @property
    def reading(self) -> TableContext:
        """The services that queries use. For a row table they see only current rows."""
        return self._reading_of(self.context)

    def _reading_of(self, context: TableContext) -> TableContext:
        return context if self.every_version else context.shown

    def _followed(self) -> TableContext:
        self._known = self._tables.followed(self._known)
        return self._known
