"""The files of the tables that one statement reads, and runs of DuckDB over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain

import pyarrow as pa

from dormouse.data.transform import Transform
from dormouse.errors import InvalidQuery
from dormouse.model.region import KeyRanges
from dormouse.model.schema import Schema
from dormouse.model.types import Parameters
from dormouse.reading.checked_files import checked_sizes, keeping_columns
from dormouse.reading.planner import Scan
from dormouse.reading.sql.damage import check_after
from dormouse.reading.sql.engine import Session
from dormouse.reading.sql.firsts import KnownRows, known_rows, lies_within
from dormouse.reading.sql.parsed import Parsed
from dormouse.reading.sql.results import ReadFailed, Rows
from dormouse.reading.sql.selects import Select, may_hide_index
from dormouse.reading.sql.subqueries import Reads
from dormouse.reading.sql.wanted import Wanted
from dormouse.reading.streams import Interruption
from dormouse.reading.table_moments import Moments
from dormouse.reading.table_view import plan_query, plan_tables
from dormouse.reading.where import Condition, Question, question

FILES_MAX = 50_000
"""The most files that one statement may read: DuckDB looks up each before it reads the first."""
_FILES_SEEN = 100


class TableFiles:
    """The tables that a statement may read, all as of one moment, and the files that they then have."""

    def __init__(
        self,
        session: Session,
        statement: Parsed,
        moments: Moments,
        moment: int | None,
        interruption: Interruption,
        question: Question | None,
    ) -> None:
        """Prepares the reading.

        `moment` is the current time for the statement, if it uses that. `question` selects the rows of its
        only table that it may read.
        """
        self.session = session
        self.moments = moments
        self.contexts = moments.contexts
        self.moment = moment
        self.has_begun = False
        """True if the reader already has the answer's columns."""
        self._statement = statement
        self._interruption = interruption
        self._question = question

    @property
    def schemas(self) -> dict[str, Schema]:
        return {name: context.schema for name, context in self.contexts.items()}

    def keep_columns(self) -> None:
        """Keeps the columns that the tables have had so far, though they have changed."""
        self.contexts = {name: keeping_columns(one) for name, one in self.contexts.items()}

    def planned(
        self, several: Sequence[Mapping[str, KeyRanges]], files_max: int | None = None
    ) -> list[Reads]:
        """Returns the files that have rows in ranges of tables, for several such ranges, at one moment."""
        named = [(name, ranges) for one in several for name, ranges in one.items()]
        plans = iter(
            plan_tables(
                [(self.contexts[name], ranges) for name, ranges in named],
                files_max=files_max or FILES_MAX,
                filtered_again=self._filters_again,
                begun=self.has_begun,
                at=self.moments.all([name for name, _ in named]),
                bundles=True,
            )
        )
        return [{name: list(chain(*next(plans).groups)) for name in one} for one in several]

    def groups(
        self, wanted: Wanted, leaves_max: int | None = None, *, bundles: bool = False
    ) -> Iterator[Sequence[Scan]]:
        """Yields the files of the only table that is read, in groups, those that are needed first before."""
        [(name, ranges)] = wanted.ranges.items()
        return plan_query(
            self.contexts[name],
            ranges,
            filtered_again=True,
            begun=self.has_begun,
            at=self.moments.of(name),
            descending=wanted.enough is not None and wanted.enough.descending,
            leaves_max=leaves_max,
            bundles=bundles,
        )

    def known_among(self, wanted: Wanted, files: Mapping[str, Iterable[Scan]]) -> KnownRows | None:
        if wanted.ends is None:
            return None
        [(name, ranges)] = wanted.ranges.items()
        return known_rows(self.contexts[name], ranges, wanted.ends, wanted.enough, files[name])

    def views(self, reads: Reads, known: KnownRows | None, wanted: Wanted) -> dict[str, str]:
        """Returns the SELECT of each table over its files; known rows are those of the only table read."""
        views = {name: self.select(name, wanted.ranges).of(reads.get(name, ())) for name in self.contexts}
        for name in reads if known is not None else ():
            more = known.select(self.contexts[name].schema) if known else None
            views[name] += f" UNION ALL {more}" if more else ""
        return views

    def rows(
        self,
        reads: Reads,
        views: Mapping[str, str],
        statement: str,
        parameters: Parameters,
        ranges: Mapping[str, KeyRanges] | None = None,
    ) -> Rows:
        """Runs a statement, which reads all rows with keys in `ranges`; None if it may need fewer."""
        check_size(reads)
        most = ranges is not None and self._reads_most(reads, ranges)
        self._interruption.check()
        with self._naming_files(reads), ExitStack() as checks:
            for name, scans in reads.items():
                checks.enter_context(checked_sizes(self.contexts[name], scans, self._interruption))
            rows = self.session.rows(views, statement, parameters, self.moment, most)

        def batches() -> Iterator[pa.RecordBatch]:
            with self._naming_files(reads):
                yield from rows.batches

        return Rows(rows.schema, batches())

    def select(
        self,
        name: str,
        needed: Mapping[str, KeyRanges],
        ranges: KeyRanges | None = None,
        *,
        searches: bool = False,
    ) -> Select:
        """Returns the maker of a table's SELECT, for a statement that needs rows in `needed`.

        With `ranges`, it selects only rows in these ranges of its columns. For `searches`, see `Select`.
        """
        context = self.contexts[name]
        wanted = self._question or question(context.schema, None, None, None)
        if self._filters_again:
            keys = (Condition(context.schema.field(key), ranges) for key, ranges in wanted.ranges.items())
            wanted = replace(wanted, conditions=(*keys, *wanted.conditions))
        if ranges is not None:
            some = (Condition(context.schema.field(column), items) for column, items in ranges.items())
            wanted = replace(wanted, conditions=(*some, *wanted.conditions))
        now_ms = self.moments.milliseconds(name)
        return Select(
            context,
            wanted,
            now_ms,
            ranges=needed.get(name, KeyRanges()),
            interruption=self._interruption,
            compares_null=self._statement.compares_null,
            joins_outer=self._statement.joins_outer,
            searches=searches,
        )

    @property
    def _filters_again(self) -> bool:
        """Returns whether the wanted keys are one condition on all rows, instead of one for each leaf.

        With a question they are one condition for each leaf, unless DuckDB would then need one scan for each
        leaf.
        """
        return self._question is None or any(may_hide_index(one.schema) for one in self.contexts.values())

    def _reads_most(self, reads: Reads, ranges: Mapping[str, KeyRanges]) -> bool:
        """Returns whether all rows of most files lie in the ranges, by the sizes of some of the files."""
        sizes = {True: 0, False: 0}
        for name, scans in reads.items():
            schema, step = self.contexts[name].schema, 1 + len(scans) // _FILES_SEEN
            for scan in scans[::step]:
                size = step * (scan.byte_count or 1)
                sizes[lies_within(schema, ranges.get(name, KeyRanges()), scan)] += size
        return sizes[True] > sizes[False]

    @contextmanager
    def _naming_files(self, reads: Reads) -> Iterator[None]:
        """Replaces DuckDB's error in the block by one that names the bad file, or the sum that overflowed."""
        try:
            yield
        except InvalidQuery as error:
            for name, scans in reads.items():
                context = self.contexts[name]
                if too_large := Transform.parse(context.schema, context.properties).overflow(str(error)):
                    raise too_large from error
                if isinstance(error, ReadFailed):
                    check_after(context, scans, error)
            raise InvalidQuery(str(error)) from error


def check_size(reads: Reads) -> None:
    """Raises `InvalidQuery` when the statement would read more than `FILES_MAX` files."""
    files = sum(map(len, reads.values()))
    if files > FILES_MAX:
        name = max(reads, key=lambda table: len(reads[table]))
        raise InvalidQuery(
            f"the statement would read {files:,} files, more than {FILES_MAX:,}, most of table {name!r}: "
            "narrow its row keys, or compact the table"
        )
