"""Statements over the rows of one table at one moment and over staged rows, from which edits are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from dormouse.errors import QueryOvertaken
from dormouse.model.edits import TARGET
from dormouse.model.region import KeyRanges
from dormouse.model.schema import Schema
from dormouse.reading.checked_files import FileGone
from dormouse.reading.sql.engine import Session, Sessions
from dormouse.reading.sql.results import Rows
from dormouse.reading.sql.staged import Staged
from dormouse.reading.sql.table_files import TableFiles
from dormouse.reading.sql.wanted import Planning
from dormouse.reading.streams import Interruption, batches_ahead, interruptible_call
from dormouse.reading.table_moments import Moments
from dormouse.state.context import TableContext

REPLANS_MAX = 10


@dataclass(frozen=True)
class TableRows:
    """The rows of a table, which statements read by the name `TARGET`, beside staged rows by other names.

    `moment` is the current time for all statements, in microseconds since 1970; None if none needs it. For
    `searches`, see `Select`.
    """

    sessions: Sessions
    context: TableContext
    moment: int | None = None
    searches: bool = False

    def ranges(self, statement: str, others: Mapping[str, Schema] = {}) -> KeyRanges:
        """Returns ranges with the row keys of all rows of the table that a statement needs.

        `others` has the columns of staged rows, by their names in the statement.
        """
        session = self.sessions(Interruption())
        try:
            schemas = {TARGET: self.context.schema, **others}
            parsed = session.parsed(statement)
            wanted = session.wanted(Planning(schemas, parsed, (), self.moment))
            return wanted.ranges.get(TARGET, KeyRanges())
        finally:
            session.close()

    def read(
        self, statement: str, ranges: KeyRanges, staged: Mapping[str, Staged] = {}
    ) -> Iterator[pa.RecordBatch]:
        """Yields the answer of a statement that needs no rows of the table with keys outside `ranges`.

        The table is read as of one moment, now, unless its rows are among the staged ones. Raises the errors
        of `reading.sql.statements.sql`, and `QueryOvertaken` if a file was collected while the answer was
        read.
        """
        interruption = Interruption()
        rows = interruptible_call(
            lambda: self._batches(statement, ranges, staged, interruption), interruption.set
        )
        try:
            yield from batches_ahead(rows, interruption.set)
        except FileGone as error:
            raise QueryOvertaken(
                f"files of table {self.context.table.name!r} were collected while an edit read them; run it "
                "again, or raise the table's property gc_delay_seconds"
            ) from error

    def _batches(
        self,
        statement: str,
        ranges: KeyRanges,
        staged: Mapping[str, Staged],
        interruption: Interruption,
    ) -> Iterator[pa.RecordBatch]:
        """Returns the batches of an answer whose first rows are ready."""
        session = self.sessions(interruption)
        try:
            rows = self._opened(session, statement, ranges, staged, interruption)
        except BaseException:
            session.close()
            raise

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                yield from rows.batches
            finally:
                session.close()

        return batches()

    def _opened(
        self,
        session: Session,
        statement: str,
        ranges: KeyRanges,
        staged: Mapping[str, Staged],
        interruption: Interruption,
    ) -> Rows:
        if TARGET in staged:
            views = {name: one.select() for name, one in staged.items()}
            return session.rows(views, statement, (), self.moment)
        moments = Moments({TARGET: self.context}, None)
        parsed = session.parsed(statement)
        files = TableFiles(session, parsed, moments, self.moment, interruption, None)
        others = {name: one.select() for name, one in staged.items()}
        for left in reversed(range(REPLANS_MAX)):
            [reads] = files.planned([{TARGET: ranges}])
            target = files.select(TARGET, {TARGET: ranges}, searches=self.searches)
            views = {TARGET: target.of(reads[TARGET]), **others}
            try:
                return files.rows(reads, views, statement, (), {TARGET: ranges})
            except FileGone:
                if not left:
                    raise
        raise AssertionError

    def of_staged(self, statement: str, staged: Mapping[str, Staged]) -> pa.Table:
        """Returns the answer of a statement that reads staged rows alone."""
        session = self.sessions(Interruption())
        try:
            views = {name: one.select() for name, one in staged.items()}
            rows = session.rows(views, statement, (), self.moment)
            return pa.Table.from_batches(rows.batches, rows.schema)
        finally:
            session.close()
