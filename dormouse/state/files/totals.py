"""What a table consists of: counted whole once, and from then on by what has changed.

What was counted is remembered with the snapshot that it was counted in. References that this did not see are
new, and the log of removals has those that are gone. So a count costs what has changed since the last, and is
always exact; where it cannot be told, as a file was forgotten with its size, all is counted again. So it is
once a day, by collection.

References are lost where they do not add up to what was added less what was removed. A reference that is gone
without a removal is missed in two ways. Of what was counted last, the log of removals tells what should be
there now. Of files that came since, whose removals are all in the log, their partitions must have had all of
their rows. When all is counted again, what does not agree is remembered in the same statement, and reported
until it is accepted: else the new count would hide it.
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
"""Of each statement: more of the same tell nothing more."""
_COUNTED = ("references", "row_count", "files", "byte_count", "partitions", "leaves")
_OF_FILES = ("files", "byte_count")


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is lost, of a partition and file where these are known."""

    partition_id: str | None
    filename: str | None
    detail: str


class Differences:
    """Those of one table."""

    def __init__(self, own: OwnTables) -> None:
        self._own = own

    def remembered(self) -> list[Difference]:
        """What was found when the table was counted again, and nobody has accepted since."""
        return self._own.run(self.remembered_in, read_only=True, operation="look for differences")

    def accept(self) -> int:
        """Takes what is there for right from now on; gives how much was found.

        Files that nothing refers to are collected from now on.
        """
        return self._own.run(self._accept, operation="accept differences")

    def _accept(self, conn: psycopg.Connection[Any]) -> int:
        conn.execute(self._own.on("keep_writers_out"))
        values = {**self._values(), "salt_buckets": self._own.table.properties.salt_buckets}
        if "uncount" in self._own.layout.queries:
            uncounted = [row[0] for row in conn.execute(self._own.on("uncount"), values)]
            conn.execute(self._own.on("recount"), {**values, "file_ids": uncounted})
        while lost := [narrow_id(one.filename or "") for one in self.unreferenced_in(conn)]:
            conn.execute(self._own.on("let_go"), {**values, "file_ids": lost})
        return len(conn.execute(self._own.on("accept_differences"), values).fetchall())

    def remembered_in(self, conn: psycopg.Connection[Any]) -> list[Difference]:
        rows = conn.execute(self._own.on("remembered_differences"), self._values())
        return [
            Difference(partition_id, filename, f"{detail} (found {_at(found_at)})")
            for partition_id, filename, detail, found_at in rows
        ]

    def lost_in(self, conn: psycopg.Connection[Any]) -> list[Difference]:
        """What is lost in the snapshot of a transaction that holds the tables still, as `OwnTables.still`."""
        return [Difference(*row) for row in conn.execute(self._own.on("lost_references"), self._values())]

    def unreferenced_in(self, conn: psycopg.Connection[Any]) -> list[Difference]:
        """The files that nothing refers to, and that collection does not know of."""
        return [Difference(*row) for row in conn.execute(self._own.on("check_files"), self._values())]

    def _values(self) -> Mapping[str, Any]:
        table = self._own.table
        return {
            "table_id": table.table_id,
            "prefixes": list(table.object_prefixes),
            "limit": FOUND_MAX,
        }


def not_counted(since: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Where what was counted, and what has changed since, is not what there is."""
    for name in _COUNTED:
        if now[name] != since[name] and not (since["unknown"] and name in _OF_FILES):
            what = name.replace("_count", "s")
            yield Difference(
                None,
                None,
                f"{since[name]:,} {what} should be there, as counted {_at(since['counted_at'])} and changed "
                f"since, and {now[name]:,} are",
            )


def _at(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True, slots=True)
class Totals:
    """Of one table at one moment; `approximate`: references whose rows are estimated."""

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
    """Totals, as of a snapshot and an epoch; `version`: of what was remembered; `whole`: counted anew.

    `looked_at` is not after the snapshot.
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
    """The totals of one table. Each is of one snapshot."""

    def __init__(self, own: OwnTables) -> None:
        self._own = own

    def read(self) -> Totals:
        """The totals; changes nothing, and costs what has changed since they were remembered."""
        return self._count(compares=False).totals

    def current_rows(self) -> int:
        """Returns how many rows a row table has now, as the database counts them. Raises `TableNotFound`."""
        found = self._own.looked_up("current_rows", {}, operation="count the rows of a row table")
        if not found:
            raise TableNotFound.gone(self._own.table.name)
        return int(found[0][0])

    def bring_forward(self, *, daily: bool = False) -> Totals:
        """The totals; remembers them where anything has changed, unless the role may only read.

        `daily`: counts all when that was not done for a day.
        """
        found = self._count(daily=daily, compares=True)
        if found.whole or found.changes:
            with suppress(InstanceForbidden, InstanceReadOnly):
                self._remember(found)
        return found.totals

    def count_again(self) -> None:
        """Counts all, whatever is remembered; differences are remembered."""
        self._remember(self._count_whole(compares=True))

    def _count(self, *, daily: bool = False, compares: bool) -> _Count:
        # read committed: days of the log are dropped, whatever an older snapshot could see of them
        found = self._own.run(self._count_since, operation="count what there is")
        if found is None or (daily and not found[1]):
            return self._count_whole(compares=compares)
        return found[0]

    def _count_since(self, conn: psycopg.Connection[Any]) -> tuple[_Count, bool] | None:
        """By what has changed, and whether all was counted within a day; None where it cannot be told."""
        for row in named_rows(conn.execute(self._own.on("count_since"), self._key())):
            if not row["unknown"]:
                return _count_of(row, changes=int(row["changes"]), whole=False), row["is_fresh"]
        return None

    def _count_whole(self, *, compares: bool) -> _Count:
        """All; `compares`: with what does not agree in the same snapshot."""

        def work(conn: psycopg.Connection[Any]) -> _Count:
            self._own.still(conn)
            allow_scans(conn)
            [now] = named_rows(conn.execute(self._own.on("count_all"), self._key()))
            lost = self._differences(conn, now) if compares else ()
            return _count_of(now, changes=0, whole=True, differences=tuple(lost))

        snapshot = Isolation.REPEATABLE_READ
        return self._own.run(work, isolation=snapshot, read_only=True, operation="count what there is")

    def _differences(self, conn: psycopg.Connection[Any], now: Mapping[str, Any]) -> Iterator[Difference]:
        for since in named_rows(conn.execute(self._own.on("count_since"), self._key())):
            yield from not_counted(since, now)
        differences = Differences(self._own)
        yield from differences.lost_in(conn)
        yield from differences.unreferenced_in(conn)

    def _key(self) -> dict[str, Any]:
        return {"table_id": self._own.table.table_id}

    def _remember(self, found: _Count) -> None:
        values = {
            "till": found.till,
            "epoch": found.epoch,
            "facts": Jsonb(asdict(found.totals)),
            "version": found.version,
            "looked_at": found.looked_at,
            "whole": found.whole,
            "partition_ids": [one.partition_id or "" for one in found.differences],
            "filenames": [one.filename or "" for one in found.differences],
            "details": [one.detail for one in found.differences],
        }
        self._own.rows("remember_totals", values, operation="remember totals")


def named_rows(cursor: psycopg.Cursor[Any]) -> list[dict[str, Any]]:
    """What a statement gives, by the names of its columns."""
    names = [column.name for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _count_of(
    row: Mapping[str, Any], *, changes: int, whole: bool, differences: tuple[Difference, ...] = ()
) -> _Count:
    totals = Totals(*(int(row[field.name]) for field in fields(Totals)))
    kept = {name: row[name] for name in ("till", "epoch", "version", "looked_at")}
    return _Count(totals, **kept, changes=changes, whole=whole, differences=differences)
