"""What of a table's references is lost: they do not add up to what was added less what was removed.

A reference that is gone without a removal is missed in two ways. Of what was counted last, the log of
removals tells what should be there now. Of files that came since, whose removals are all in the log, their
partitions must have had all of their rows. When all is counted again, what does not agree is remembered in
the same statement, and told until somebody accepts it: else the new count would hide it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg

from dormouse.model.text import narrow_id
from dormouse.state.files.own_tables import OwnTables

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
