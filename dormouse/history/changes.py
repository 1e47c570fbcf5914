"""What was ingested between two moments: the files, and the regions of them, in which each row comes once.

A reference that came with its file from outside says where the rows of an ingest were given to. Its
transaction is kept with it, and with its removal in the log: so however it was split, merged or compacted
away since, each ingested row is found in the region of exactly one such reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any
from uuid import UUID

from dormouse.context import TableContext
from dormouse.errors import CutExpired, InvalidCut
from dormouse.history.moments import expired_by_erasure, now, oldest, position_of
from dormouse.model.cut import Position, When
from dormouse.model.file_reference import FileReference
from dormouse.model.region import Region
from dormouse.partitions.rows import region_from_row
from dormouse.postgres.queries import load

PAGE_REFERENCES = 2_000
BEFORE_ALL = "1:1:"
"""A snapshot in which nothing is visible."""

_QUERIES = load(__package__ or "", "changes")
_NO_FILE = UUID(int=0)


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """A file that came, and which of its rows: those in `region`; None: all of them.

    `row_count` counts these, about, when `count_approximate`; `file_row_count` and `byte_count` are of the
    whole file, None where they are not known.
    """

    filename: str
    partition_id: str
    row_count: int
    count_approximate: bool
    file_row_count: int | None
    byte_count: int | None
    region: Region | None


def beginning(context: TableContext) -> Position:
    """Before the table's first row; `CutExpired` where the history does not reach back so far."""
    rows = context.store.own.rows(_QUERIES["beginning"], operation="look up a table's beginning")
    if not rows:
        raise CutExpired(
            f"the history of table {context.table.name!r} does not reach back to its beginning any more: "
            "read what the table has by a query as of a cut, and its changes after that cut"
        )
    [(since,)] = rows
    return Position(0, BEFORE_ALL, since)


def span(context: TableContext, after: When | None, till: When | None) -> tuple[Position, Position]:
    """Where two moments are: `after` None is before the first row, `till` None is now."""
    start = beginning(context) if after is None else position_of(context, after)
    return start, now(context, start) if till is None else position_of(context, till)


def changes_between(context: TableContext, after: When | None, till: When | None) -> Iterator[ChangedFile]:
    """The files that came after one moment and up to another, streamed; as `pages_between`."""
    return chain.from_iterable(pages_between(context, *span(context, after, till)))


def pages_between(context: TableContext, after: Position, till: Position) -> Iterator[list[ChangedFile]]:
    """The files that came after one moment and up to another, in pages; the first is looked up at once.

    Raises `InvalidCut` when `till` is the earlier one, `CutExpired` when a file was collected: before the
    first page whichever it is, later only when it was collected meanwhile.
    """
    if till.at < after.at:
        raise InvalidCut(
            f"there is nothing after {after.at} and up to {till.at}: give the earlier moment first"
        )
    found = _ChangePages(context, after, till)
    page = found.next_page()
    if not found.is_over and found.is_collected():
        raise found.expired()
    return _following(page, found)


def _following(page: list[ChangedFile], found: _ChangePages) -> Iterator[list[ChangedFile]]:
    while page:
        yield page
        page = [] if found.is_over else found.next_page()
        found.check_log()


class _ChangePages:
    """The pages of one read, one statement each; none keeps a connection or a snapshot until the next."""

    def __init__(self, context: TableContext, after: Position, till: Position) -> None:
        self._context = context
        self._schema = context.schema
        self._own = context.store.own
        self._after = after
        self._values: dict[str, Any] = {
            "after": after.snapshot,
            "till": till.snapshot,
            "limit": PAGE_REFERENCES,
        }
        self._from = (after.snapshot.partition(":")[0], _NO_FILE, "")
        self.is_over = False

    def next_page(self) -> list[ChangedFile]:
        keys = dict(zip(("from_xid", "from_file", "from_partition"), self._from, strict=True))
        rows = self._own.rows(_QUERIES["page"], {**self._values, **keys}, operation="look up changes")
        if rows:
            self._from = rows[-1][:3]
        self.is_over = len(rows) < PAGE_REFERENCES
        return [self._changed_file(*row[2:]) for row in rows]

    def is_collected(self) -> bool:
        """Whether a file of any page is gone; of one page, its rows tell."""
        rows = self._own.rows(_QUERIES["collected"], self._values, operation="look up changes")
        return bool(rows[0][0])

    def check_log(self) -> None:
        """`CutExpired` when the last page may miss what was removed, as the log does not reach back."""
        _check_log(self._context, self._after)

    def _changed_file(
        self,
        partition_id: str,
        filename: str,
        row_count: int,
        is_approximate: bool,
        is_whole: bool,
        byte_count: int | None,
        file_rows: int | None,
        is_known: bool,
        mins: list[bytes | None],
        maxs: list[bytes | None],
    ) -> ChangedFile:
        if not is_known:
            raise self.expired()
        region = None if is_whole else region_from_row(self._schema, mins, maxs)
        return ChangedFile(filename, partition_id, row_count, is_approximate, file_rows, byte_count, region)

    def expired(self) -> CutExpired:
        return expired(self._context, self._after)


def references_at(context: TableContext, position: Position) -> Iterator[FileReference]:
    """Exactly the references of a moment, by partition; streamed.

    `CutExpired` when a file was collected since.
    """
    own, start = context.store.own, ("", _NO_FILE)
    limits = {"snapshot": position.snapshot, "limit": PAGE_REFERENCES}
    while True:
        values = {**limits, "from_partition": start[0], "from_file": start[1]}
        rows = own.looked_up(_QUERIES["references_at"], values, operation="look up references")
        _check_log(context, position)
        for partition_id, _, filename, row_count, is_approximate, is_whole in rows:
            if filename is None:
                raise expired(context, position)
            yield FileReference(
                filename=filename,
                partition_id=partition_id,
                row_count=row_count,
                count_approximate=is_approximate,
                only_contains_data_for_this_partition=is_whole,
            )
        if len(rows) < PAGE_REFERENCES:
            return
        start = rows[-1][:2]


def _check_log(context: TableContext, position: Position) -> None:
    values = {"at": position.at}
    own = context.store.own
    rows = own.looked_up(_QUERIES["reaches_back"], values, operation="look up a table's history")
    if rows != [(True,)]:
        raise expired(context, position)


def expired(context: TableContext, position: Position) -> CutExpired:
    """Why what was at a moment, or came since, cannot be read."""
    since = oldest(context)
    if since <= position.at and (erased := expired_by_erasure(context, position.at)) is not None:
        return erased
    return CutExpired(
        f"the history of table {context.table.name!r} does not reach back to {position.at} any more, but to "
        f"{since}: files of then were collected; name a cut to keep its files, or raise the table's property "
        "history_retention_seconds",
        since,
    )
