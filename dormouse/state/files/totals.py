"""The totals of a table: counted in full once, and later updated from the changes since the last count.

The last count is stored with its snapshot. References that this snapshot did not see are new, and the removal
log contains the references that were removed. So a count is exact, and its cost depends only on the number of
changes. Sometimes it cannot be exact, because a file was forgotten with its size. Then everything is counted
again. Garbage collection also counts everything once a day.

References are lost if they were added and never removed, and yet are missing. Two checks find lost
references:

- The last count and the removal log since then must give the references that exist now.
- If the log is complete since a file was added, the partitions of the file must have had all rows of the
  file.

A full count records the differences that it finds, in the same statement, because the new count would hide
them. They are reported until they are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from dormouse.errors import InstanceForbidden, InstanceReadOnly, TableNotFound
from dormouse.model.text import narrow_id
from dormouse.postgres.session import Isolation
from dormouse.postgres.transaction import allow_scans
from dormouse.state.files.layout import OwnTables

FOUND_MAX = 1_000
"""The most problems that each statement returns."""
_COUNTED = ("references", "row_count", "files", "byte_count", "partitions", "leaves")
_OF_FILES = ("files", "byte_count")


@dataclass(frozen=True, slots=True)
class Difference:
    """A loss that a check or a count has found, with its partition and file where they are known."""

    partition_id: str | None
    filename: str | None
    detail: str


class Differences:
    """The differences that were found in one table."""

    def __init__(self, own: OwnTables) -> None:
        self._own = own

    def remembered(self) -> list[Difference]:
        """Returns the differences that full counts have found and that were not accepted afterwards."""
        return self._own.run(self.remembered_in, read_only=True, operation="find differences")

    def accept(self) -> int:
        """Accepts the current state as right; returns the number of differences that were open.

        From now on, garbage collection deletes the unreferenced files again.
        """
        return self._own.run(self._accept, operation="accept differences")

    def _accept(self, conn: psycopg.Connection[Any]) -> int:
        conn.execute(self._own.on("keep_writers_out"))
        values = {**self._values(), "salt_buckets": self._own.table.properties.salt_buckets}
        if "uncount" in self._own.layout.queries:
            uncounted = [row[0] for row in conn.execute(self._own.on("uncount"), values)]
            conn.execute(self._own.on("recount"), {**values, "file_ids": uncounted})
        while lost := [narrow_id(file.filename or "") for file in self.unreferenced_in(conn)]:
            conn.execute(self._own.on("let_go"), {**values, "file_ids": lost})
        return len(conn.execute(self._own.on("accept_differences"), values).fetchall())

    def remembered_in(self, conn: psycopg.Connection[Any]) -> list[Difference]:
        rows = conn.execute(self._own.on("remembered_differences"), self._values())
        return [
            Difference(partition_id, filename, f"{detail} (found {_at(found_at)})")
            for partition_id, filename, detail, found_at in rows
        ]

    def lost_in(self, conn: psycopg.Connection[Any]) -> list[Difference]:
        """Returns the lost references, as the snapshot of a transaction shows them.

        The transaction must have called `OwnTables.still` before.
        """
        return [Difference(*row) for row in conn.execute(self._own.on("lost_references"), self._values())]

    def unreferenced_in(self, conn: psycopg.Connection[Any]) -> list[Difference]:
        """Returns the unreferenced files that garbage collection does not know."""
        return [Difference(*row) for row in conn.execute(self._own.on("check_files"), self._values())]

    def _values(self) -> Mapping[str, Any]:
        table = self._own.table
        return {
            "table_id": table.table_id,
            "prefixes": list(table.object_prefixes),
            "limit": FOUND_MAX,
        }


def not_counted(since: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Yields a difference for each total in `now` that differs from the same total in `since`.

    `since` are the totals expected from the last count and the changes since then.
    """
    for name in _COUNTED:
        if now[name] != since[name] and not (since["unknown"] and name in _OF_FILES):
            what = name.replace("_count", "s")
            yield Difference(
                None,
                None,
                f"expected {since[name]:,} {what}, by the count of {_at(since['counted_at'])} and the "
                f"changes since, but there are {now[name]:,}",
            )


def _at(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals of one table in one snapshot.

    `approximate` is the number of references whose rows are only estimated.
    """

    references: int
    row_count: int
    approximate: int
    files: int
    byte_count: int
    unreferenced_files: int
    partitions: int
    leaves: int

    @property
    def rows_exact(self) -> bool:
        return not self.approximate


@dataclass(frozen=True, slots=True)
class _Count:
    """The result of a count: totals in the snapshot `till`, at an epoch.

    `version` is that of the stored totals. `whole` is True for a full count. `looked_at` is a time that is
    not later than the snapshot.
    """

    totals: Totals
    till: str
    epoch: int
    version: int | None
    changes: int
    looked_at: datetime
    whole: bool
    differences: tuple[Difference, ...] = ()


class TableTotals:
    """A counter of one table's totals. Each count reads one snapshot."""

    def __init__(self, own: OwnTables) -> None:
        self._own = own

    def read(self) -> Totals:
        """Returns the totals without storing them.

        The cost grows with the number of changes since totals were last stored.
        """
        return self._count(compares=False).totals

    def current_rows(self) -> int:
        """Returns the current number of rows of a row table, which the database counts.

        Raises `TableNotFound`.
        """
        rows = self._own.looked_up("current_rows", {}, operation="count the rows of a row table")
        if not rows:
            raise TableNotFound.gone(self._own.table.name)
        return int(rows[0][0])

    def bring_forward(self, *, daily: bool = False) -> Totals:
        """Returns the totals, and stores them if anything has changed and the role may write.

        With `daily`, counts everything if the last full count was more than a day ago.
        """
        counted = self._count(daily=daily, compares=True)
        if counted.whole or counted.changes:
            with suppress(InstanceForbidden, InstanceReadOnly):
                self._remember(counted)
        return counted.totals

    def count_again(self) -> None:
        """Counts everything, and stores the totals and the differences found."""
        self._remember(self._count_whole(compares=True))

    def _count(self, *, daily: bool = False, compares: bool) -> _Count:
        # read committed: days of the log may be dropped although an older snapshot could still see them
        counted = self._own.run(self._count_since, operation="count rows and references")
        if counted is None or (daily and not counted[1]):
            return self._count_whole(compares=compares)
        return counted[0]

    def _count_since(self, conn: psycopg.Connection[Any]) -> tuple[_Count, bool] | None:
        """Returns the totals, counted from the changes, and True if the last full count was within a day.

        Returns None if the changes do not suffice.
        """
        for row in named_rows(conn.execute(self._own.on("count_since"), self._key())):
            if not row["unknown"]:
                return _count_of(row, changes=int(row["changes"]), whole=False), row["is_fresh"]
        return None

    def _count_whole(self, *, compares: bool) -> _Count:
        """Counts everything; with `compares`, also finds differences in the same snapshot."""

        def work(conn: psycopg.Connection[Any]) -> _Count:
            self._own.still(conn)
            allow_scans(conn)
            [now] = named_rows(conn.execute(self._own.on("count_all"), self._key()))
            lost = self._differences(conn, now) if compares else ()
            return _count_of(now, changes=0, whole=True, differences=tuple(lost))

        snapshot = Isolation.REPEATABLE_READ
        return self._own.run(work, isolation=snapshot, read_only=True, operation="count rows and references")

    def _differences(self, conn: psycopg.Connection[Any], now: Mapping[str, Any]) -> Iterator[Difference]:
        for since in named_rows(conn.execute(self._own.on("count_since"), self._key())):
            yield from not_counted(since, now)
        differences = Differences(self._own)
        yield from differences.lost_in(conn)
        yield from differences.unreferenced_in(conn)

    def _key(self) -> dict[str, Any]:
        return {"table_id": self._own.table.table_id}

    def _remember(self, count: _Count) -> None:
        values = {
            "till": count.till,
            "epoch": count.epoch,
            "facts": Jsonb(asdict(count.totals)),
            "version": count.version,
            "looked_at": count.looked_at,
            "whole": count.whole,
            "partition_ids": [each.partition_id or "" for each in count.differences],
            "filenames": [each.filename or "" for each in count.differences],
            "details": [each.detail for each in count.differences],
        }
        self._own.rows("remember_totals", values, operation="remember totals")


def named_rows(cursor: psycopg.Cursor[Any]) -> list[dict[str, Any]]:
    """Returns the rows of a statement as dictionaries with the column names as keys."""
    names = [column.name for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _count_of(
    row: Mapping[str, Any], *, changes: int, whole: bool, differences: tuple[Difference, ...] = ()
) -> _Count:
    totals = Totals(*(int(row[field.name]) for field in fields(Totals)))
    kept = {name: row[name] for name in ("till", "epoch", "version", "looked_at")}
    return _Count(totals, **kept, changes=changes, whole=whole, differences=differences)
