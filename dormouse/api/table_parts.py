"""How a table's rows are read, and taken away: parts of `Table`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dormouse.api.shaped_table import ShapedTable
from dormouse.api.tables import compact_on_spark
from dormouse.model.cut import When
from dormouse.model.region import Region
from dormouse.model.table import Container
from dormouse.state.files.deletions import RecordedDeletion, erasure_proofs

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.durability.erasing import EraseReport
    from dormouse.model.types import Parameters
    from dormouse.reading.deleting import DeleteReport, DeleteWhere
    from dormouse.reading.planner import PlanSummary
    from dormouse.reading.sql.engine import Sessions
    from dormouse.reading.sql.views import LiveFile
    from dormouse.reading.streams import Answer, Interruption
    from dormouse.reading.where import Where

Engine = Literal["auto", "local", "spark"]


class Changing(ShapedTable):
    """The methods, over a table's name and columns."""

    def delete(self, where: DeleteWhere, dry_run: bool = False) -> DeleteReport:
        """Deletes the rows that match, at once, for every reader: whatever they are, one row in the database.

        `where` is as for `query`; `dm.ALL` for all rows. Rows that were committed before it are deleted, and
        those that a `filter` hides, too; what is committed later stays. A row whose value is null only goes
        where null is asked for. Moments before still have them. `dry_run` counts what `query` would give.
        On a keyed table it is a load: rows of loads that began before it are gone, whenever they come. By
        values it writes a mark for each key whose newest row matches.

        Raises `InvalidQuery` for a condition that is none, that bounds nothing (a range that is open at both
        ends), or that does not fit the schema, and for one on values where the property `aggregate` merges
        rows; `TableBusy` when others change the table all the time.
        """
        from dormouse.writing.deleting import delete

        self._check_not_edited("use dm.Remove")
        if dry_run:
            return delete(self._context, where, dry_run=True)
        with self.changing():
            return delete(self._context, where)

    def erase(
        self,
        where: DeleteWhere,
        dry_run: bool = False,
        *,
        engine: Engine = "auto",
        wait_seconds: float = 60.0,
        abandon_writers: bool = False,
        backups: Sequence[str] = (),
        progress: Callable[[int, int | None], object] = lambda done, total: None,
    ) -> EraseReport:
        """Deletes the rows that match for ever: also from the history, the store, and its deleted objects.

        They are deleted as by `delete`; then each file that has some is merged without them, and the files
        that had some are deleted, whatever the history keeps, so that moments before raise `CutExpired` for
        their keys. Ended at any time, the same call goes on with it. It waits, all in all for `wait_seconds`,
        for jobs that hold such files, for consumers that did not read the deletion, and for writers that
        began before. Then jobs lose the files, consumers are told `CutExpired`, and writers are named in the
        report as `open`, or, with `abandon_writers`, can commit nothing any more. `backups` are places,
        beside those that are known, in which backups are looked at for the files. `progress` is called with
        the files looked at. Gives the proof, which `erasures` keeps. `dry_run` reads the files of the table
        and its history, tells what it has found, and changes nothing.

        Raises `InvalidQuery` as `delete` does; `JobFailed` for a file that cannot be merged, `CheckFailed`
        while references are lost, `TableBusy` while a backup is taken, and `ObjectStoreError`: then the rows
        are deleted, and not erased, until the same call has ended well.
        """
        from dormouse.durability.erasing import erase, would_erase

        self._check_not_edited("every version of its rows is kept; drop the table to erase them")
        if dry_run:
            return would_erase(self._context, where, progress)
        with self.changing():
            return erase(
                self._context,
                where,
                engine=engine,
                wait_seconds=wait_seconds,
                abandon_writers=abandon_writers,
                backups=backups,
                progress=progress,
                on_spark=compact_on_spark,
            )

    def erasures(self) -> list[EraseReport]:
        """The proofs of the table's erasures, the oldest first."""
        from dormouse.durability.erasing import EraseReport

        return [EraseReport.from_json(text) for text in erasure_proofs(self._context.store)]

    def deletions(self, *, pending_only: bool = True) -> list[RecordedDeletion]:
        """The deletions by their numbers: those that readers apply, or all that the history has."""
        return self._context.deletions.list(pending_only=pending_only)


# How a table's rows are read, as a part of `Table`.


class Reading(ShapedTable, Container):
    """The methods, over a table's name and columns."""

    def query(
        self,
        where: Mapping[str, Any] | Region | None = None,
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
        """The rows of a region, in key order, streamed.

        The first `offset` of them are read and left out. `descending` has those of the largest keys first;
        they are sorted by DuckDB, where `sessions` say, if not in this process.

        `where` maps columns to a value, a `Range` or a list of them; `columns` names what to read. Row keys
        choose the files that are read; NaN is the largest double. `as_of` reads the rows of another moment:
        a cut, a cut's name, or an aware time, which means all that was committed at or before it. Another
        thread ends what is read by `interruption.set()`. Raises `InvalidQuery`, `InvalidRange`, `InvalidCut`,
        and `CutExpired` for a moment that cannot be read any more.

        `verify` reads each file whole before the process first uses it, and compares its digest: a file with
        other bytes than were written raises `ObjectDamaged`, and gives no row. It raises `InvalidQuery` for a
        file that has no digest. The table's property `verify_reads` makes every reader do so.
        """
        from dormouse.reading.executor import query
        from dormouse.reading.streams import Answer
        from dormouse.reading.where import LIMIT_MAX, checked_limit, checked_offset

        reading = self.reading.verifying(verify)
        if descending:
            from dormouse.reading.sql.views import descending as read

            sessions = sessions or self._tables.sessions()
            return Answer(read(sessions, reading, where, columns, limit, offset, interruption, as_of))
        most, offset = checked_limit(limit), checked_offset(offset)
        if most is not None:
            most = min(most + offset, LIMIT_MAX)
        found = query(reading, where, columns, limit=most, interruption=interruption, as_of=as_of)
        if not offset:
            return Answer(found)
        from dormouse.reading.streams import without_first

        return Answer(without_first(found, offset))

    def explain(
        self, where: Mapping[str, Any] | Region | None = None, *, as_of: When | None = None
    ) -> PlanSummary:
        """What a query would read: partitions, files, bytes. Raises as `query` does."""
        from dormouse.reading.table_view import explain

        return explain(self.reading, where, as_of)

    def head(
        self, rows: int = 10, columns: Sequence[str] | None = None, *, as_of: When | None = None
    ) -> pa.Table:
        """The first rows in key order, at most so many. Raises as `query` does."""
        return self.query(columns=columns, limit=rows, as_of=as_of).read_all()

    def to_pandas(self, where: Where = None, columns: Sequence[str] | None = None, **how: Any) -> Any:
        """The rows of `query` as a DataFrame of pandas. Raises as it does, and `DependencyMissing`."""
        from dormouse.reading.streams import pandas_of

        return pandas_of(lambda: self.query(where, columns, **how))

    def to_polars(self, where: Where = None, columns: Sequence[str] | None = None, **how: Any) -> Any:
        """The rows of `query` as a DataFrame of Polars. Raises as it does, and `DependencyMissing`."""
        from dormouse.reading.streams import polars_of

        return polars_of(lambda: self.query(where, columns, **how))

    def count(
        self,
        where: Mapping[str, Any] | Region | None = None,
        *,
        as_of: When | None = None,
        verify: bool = False,
    ) -> int:
        """How many rows there are, exactly, of those that `where` asks for. Raises as `query` does.

        Of all rows mostly the files' footers are read, but for `verify`; of a row table's rows of now, the
        database alone.
        """
        if where:
            first = [self.reading.schema.key_names[0]]
            return sum(batch.num_rows for batch in self.query(where, first, as_of=as_of, verify=verify))
        if as_of is None and self.reading.current_rows and not verify:
            from dormouse.state.history.history import current_row_count

            return current_row_count(self.reading)
        from dormouse.reading.sql.views import value

        return int(value(self._tables.sessions(), self.reading.verifying(verify), "count(*)", as_of))

    def live_files(self, as_of: When | None = None) -> list[LiveFile]:
        """The Parquet files that hold the table's rows, now or at a moment, to be read without Dormouse.

        Each has a `path`, and a `condition` in SQL where not all of its rows count. Files that are compacted
        are kept for `gc_delay_seconds`. Raises `InvalidQuery` where no condition can say it, `InvalidCut` and
        `CutExpired`.
        """
        from dormouse.reading.sql.views import live_files

        return live_files(self.reading, as_of)

    def sql(
        self,
        statement: str,
        parameters: Parameters | None = None,
        *,
        as_of: When | None = None,
        interruption: Interruption | None = None,
        verify: bool = False,
    ) -> Answer:
        """The answer of a SELECT over this and the instance's other tables, by name; see `Instance.sql`."""
        return self._tables.sql(statement, parameters, interruption, as_of=as_of, verify=verify)
