"""Small parts of a statement that are evaluated first, if their values may leave fewer files to read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import pyarrow as pa

from dormouse.data.transform import quoted
from dormouse.errors import InvalidQuery
from dormouse.model.region import KeyRanges, Range, united
from dormouse.model.types import Parameters
from dormouse.reading.checked_files import FileGone
from dormouse.reading.planner import bytes_of
from dormouse.reading.sql.joined import FILES_LEAST, VALUES_MAX, Joined, Source, is_large, smallest_source
from dormouse.reading.sql.parsed import Parsed
from dormouse.reading.sql.subqueries import BYTES_MAX as SUBQUERY_BYTES_MAX
from dormouse.reading.sql.subqueries import FILES_MAX as SUBQUERY_FILES_MAX
from dormouse.reading.sql.subqueries import (
    SUBQUERIES_MAX,
    TRIED,
    Evaluated,
    Reads,
    Subquery,
    stands_alone,
    subqueries,
    with_values,
)
from dormouse.reading.sql.table_files import TableFiles
from dormouse.reading.sql.wanted import Planning, Wanted


class Narrowed:
    """The needs of a statement of each table, and its text, after parts of it were evaluated."""

    def __init__(self, files: TableFiles, statement: Parsed, parameters: Parameters, wanted: Wanted) -> None:
        self._files = files
        self._statement = statement
        self._parameters = parameters
        self._schemas = files.schemas
        self._whole = wanted, statement.run
        self._planned: Reads | None = None
        self.wanted, self.text = self._whole
        self.evaluated: list[Evaluated] = []

    def narrow(self) -> None:
        """Evaluates small parts of the statement, if their values restrict row keys."""
        if self._statement.has_subqueries:
            self._evaluate()
        if self.wanted.joined is not None:
            self._follow(self.wanted.joined)

    def reads(self) -> Reads:
        """Returns the files to read of each table, all of one moment.

        If a part would have other values at that moment, the whole statement is planned.
        """
        if self._planned is not None:
            planned, self._planned = self._planned, None
            return planned
        several = [self.wanted.ranges, *(one.wanted.ranges for one in self.evaluated)]
        reads, *again = self._files.planned(several)
        if all(self._holds(one, now) for one, now in zip(self.evaluated, again, strict=True)):
            return reads
        (self.wanted, self.text), self.evaluated = self._whole, []
        return self.reads()

    @property
    def ranges(self) -> dict[str, KeyRanges]:
        """The ranges of each table that the statement or an evaluated subquery needs."""
        several = [self.wanted.ranges, *(one.wanted.ranges for one in self.evaluated if one.reads_files)]
        names = dict.fromkeys(name for one in several for name in one)
        return {name: united([one[name] for one in several if name in one]) for name in names}

    def _holds(self, evaluated: Evaluated, reads: Reads) -> bool:
        """Returns whether a subquery would be evaluated to the same values over the files that it has now."""
        if evaluated.known is None:
            return reads == evaluated.reads
        return self._files.known_among(evaluated.wanted, reads) == evaluated.known

    def _evaluate(self) -> None:
        """Replaces subqueries by their values, if these may restrict row keys."""
        some = list(islice(subqueries(self._statement), SUBQUERIES_MAX))
        if not some or not self._may_pay(self._may_restrict(some)):
            return
        with self._files.moments.kept():
            values = [(one, self._value(one)) for one in some]
        self.evaluated = [value for _, value in values if value is not None]
        if self.evaluated:
            written = [(one, value.values) for one, value in values if value is not None]
            try:
                wanted, self.text = self._with_values(written)
                # all files are planned together, with those of the subqueries
                self.wanted = replace(wanted, enough=None, ends=None)
            except InvalidQuery:
                self.evaluated = []

    def _may_restrict(self, some: Sequence[Subquery]) -> set[str]:
        """Returns the tables whose needed ranges change if constants take the place of the subqueries."""
        found = set[str]()
        for constant in TRIED:
            try:
                wanted, _ = self._with_values([(one, constant) for one in some])
            except InvalidQuery:
                return set(self.wanted.ranges)
            found |= {
                name for name, ranges in wanted.ranges.items() if self.wanted.ranges.get(name) != ranges
            }
        return found

    def _may_pay(self, names: Collection[str]) -> bool:
        """Returns whether one of the tables has so many files or bytes that some should be left out."""
        trees = [self._files.contexts[name].partitions.cached() for name in names]
        if any(tree is None or tree.leaf_count >= FILES_LEAST for tree in trees) or not names:
            return bool(names)
        with suppress(InvalidQuery, FileGone), self._files.moments.kept():
            [reads] = self._files.planned([self.wanted.ranges])
            if not any(is_large(reads.get(name, ())) for name in names):
                self._planned = reads
                return False
        return True

    def _with_values(self, values: Sequence[tuple[Subquery, str]]) -> tuple[Wanted, str]:
        """Returns the needs and the text of a statement with values in place of subqueries."""
        changed = self._files.session.parsed(with_values(self._statement.text, values))
        # under the original text, for the names of the answer's columns
        changed = replace(changed, text=self._statement.text)
        planning = Planning(self._schemas, changed, self._parameters, self._files.moment)
        return self._files.session.wanted(planning), changed.run

    def _value(self, subquery: Subquery) -> Evaluated | None:
        """Evaluates a subquery; returns None if it cannot stand alone, or reads or returns too much."""
        with suppress(InvalidQuery, FileGone):
            parsed = self._files.session.parsed(subquery.statement)
            if not stands_alone(parsed, self._statement):
                return None
            wanted = self._files.session.wanted(Planning(self._schemas, parsed, (), self._files.moment))
            files_max = SUBQUERY_FILES_MAX if wanted.ends is None else None
            [reads] = self._files.planned([wanted.ranges], files_max)
            known = self._files.known_among(wanted, reads)
            read = reads if known is None else dict.fromkeys(reads, known.scans)
            scans = [scan for some in read.values() for scan in some]
            if len(scans) > SUBQUERY_FILES_MAX or bytes_of(scans) > SUBQUERY_BYTES_MAX:
                return None
            rows = self._files.rows(read, self._files.views(read, known, wanted), parsed.run, ())
            if known is not None and wanted.ends is not None:
                rows = known.counted(rows, wanted.ends)
            values = subquery.values(pa.Table.from_batches(rows.batches, rows.schema))
            return None if values is None else Evaluated(values, wanted, reads, known)
        return None

    def _follow(self, joined: Joined) -> None:
        """Evaluates columns of small tables, if their values may restrict the keys of a larger one."""
        before, tried = self.wanted, set[str]()
        whole: dict[str, KeyRanges] = {}
        with suppress(InvalidQuery, FileGone), self._files.moments.kept():
            reads, self._planned = self._planned, None
            if reads is None:
                [reads] = self._files.planned([before.ranges])
            while len(tried) < SUBQUERIES_MAX and any(map(is_large, reads.values())):
                source = smallest_source(joined, self._schemas, reads, tried)
                if source is None:
                    break
                tried.add(source.name)
                values = self._values(source)
                if values is not None:
                    joined = joined.given(source.name, values).spread(self._schemas)
                    needed = replace(before, ranges={source.table: before.ranges[source.table]})
                    # not its own ranges: only deletions that meet them are applied, and its values do not
                    # exclude deleted rows
                    whole |= needed.ranges
                    self.wanted = replace(before, ranges={**joined.by_table(self._schemas), **whole})
                    self.evaluated.append(Evaluated("", needed, {source.table: reads[source.table]}, None))
            self._planned = None if self.evaluated else reads

    def _values(self, source: Source) -> list[Range] | None:
        """Returns the values of a column; None if there are too many."""
        table, column = quoted(source.table), quoted(source.column)
        statement = f"SELECT DISTINCT {column} FROM {table} WHERE {column} IS NOT NULL LIMIT {VALUES_MAX + 1}"
        views = {
            source.table: self._files.select(source.table, self.wanted.ranges, source.ranges).of(source.scans)
        }
        rows = self._files.rows({source.table: source.scans}, views, statement, ())
        try:
            values = [value for batch in rows.batches for value in batch.column(0).to_pylist()]
        except (ValueError, OverflowError):  # a time that no key can have
            return None
        return None if len(values) > VALUES_MAX else [Range.exactly(value) for value in values]
