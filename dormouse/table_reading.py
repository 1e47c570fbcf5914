"""How a table's rows are read, as a part of `Table`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dormouse.model.container import Container
from dormouse.model.cut import When
from dormouse.model.region import Region
from dormouse.shaped_table import ShapedTable

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.model.parameters import Parameters
    from dormouse.query import PlanSummary
    from dormouse.query.answer import Answer
    from dormouse.query.interruption import Interruption
    from dormouse.query.where import Where
    from dormouse.sql.engine import Sessions
    from dormouse.sql.live_files import LiveFile


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
        from dormouse.query import query
        from dormouse.query.answer import Answer
        from dormouse.query.where import LIMIT_MAX, checked_limit, checked_offset

        reading = self.reading.verifying(verify)
        if descending:
            from dormouse.sql.one_table import descending as read

            sessions = sessions or self._tables.sessions()
            return Answer(read(sessions, reading, where, columns, limit, offset, interruption, as_of))
        most, offset = checked_limit(limit), checked_offset(offset)
        if most is not None:
            most = min(most + offset, LIMIT_MAX)
        found = query(reading, where, columns, limit=most, interruption=interruption, as_of=as_of)
        if not offset:
            return Answer(found)
        from dormouse.query.streams import without_first

        return Answer(without_first(found, offset))

    def explain(
        self, where: Mapping[str, Any] | Region | None = None, *, as_of: When | None = None
    ) -> PlanSummary:
        """What a query would read: partitions, files, bytes. Raises as `query` does."""
        from dormouse.query import explain

        return explain(self.reading, where, as_of)

    def head(
        self, rows: int = 10, columns: Sequence[str] | None = None, *, as_of: When | None = None
    ) -> pa.Table:
        """The first rows in key order, at most so many. Raises as `query` does."""
        return self.query(columns=columns, limit=rows, as_of=as_of).read_all()

    def to_pandas(self, where: Where = None, columns: Sequence[str] | None = None, **how: Any) -> Any:
        """The rows of `query` as a DataFrame of pandas. Raises as it does, and `DependencyMissing`."""
        from dormouse.query.frames import pandas_of

        return pandas_of(lambda: self.query(where, columns, **how))

    def to_polars(self, where: Where = None, columns: Sequence[str] | None = None, **how: Any) -> Any:
        """The rows of `query` as a DataFrame of Polars. Raises as it does, and `DependencyMissing`."""
        from dormouse.query.frames import polars_of

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
            from dormouse.history.status import current_row_count

            return current_row_count(self.reading)
        from dormouse.sql.one_table import value

        return int(value(self._tables.sessions(), self.reading.verifying(verify), "count(*)", as_of))

    def live_files(self, as_of: When | None = None) -> list[LiveFile]:
        """The Parquet files that hold the table's rows, now or at a moment, to be read without Dormouse.

        Each has a `path`, and a `condition` in SQL where not all of its rows count. Files that are compacted
        are kept for `gc_delay_seconds`. Raises `InvalidQuery` where no condition can say it, `InvalidCut` and
        `CutExpired`.
        """
        from dormouse.sql.live_files import live_files

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
