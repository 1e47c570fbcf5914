"""What was ingested between two moments: the files, and the regions of them, in which each row comes once.

A reference that came with its file from outside says where the rows of an ingest were given to. Its
transaction is kept with it, and with its removal in the log: so however it was split, merged or compacted
away since, each ingested row is found in the region of exactly one such reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from uuid import UUID

from dormouse.errors import CutExpired, InvalidCut
from dormouse.model.cut import Position, When
from dormouse.model.file_reference import FileReference
from dormouse.model.region import Region
from dormouse.postgres.queries import load
from dormouse.state.context import TableContext
from dormouse.state.history.ends import ENDS, Ends, Known, oldest
from dormouse.state.history.moments import end_of, expired_by_erasure, now, position_of
from dormouse.state.trees import region_from_row

PAGE_REFERENCES = 2_000
"""Of the first page. The others are larger: each statement goes through all of the log since the moment."""

PAGE_GROWTH = 16
BEFORE_ALL = "1:1:"
"""A snapshot in which nothing is visible."""

_QUERIES = load(__package__ or "", "changes")
_PAGE, _REFERENCES_AT = (_QUERIES[name].including(ends=ENDS) for name in ("page", "references_at"))
_NO_FILE = UUID(int=0)


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """A file that came, and which of its rows: those in `region`; None: all of them.

    `row_count` counts these, about, when `count_approximate`; `file_row_count` and `byte_count` are of the
    whole file, None where they are not known; `xid` is the transaction that it came with.
    """

    filename: str
    partition_id: str
    row_count: int
    count_approximate: bool
    file_row_count: int | None
    byte_count: int | None
    region: Region | None
    xid: int


def span(context: TableContext, after: When | None, till: When | None) -> tuple[Position, Position]:
    """Where two moments are: `after` None is before the first row, `till` None is now.

    `CutExpired` where the history does not reach back so far.
    """
    ends = ends_between(context, after, till)
    start, end = ends.positions(ends.look_up())
    return start, end


def ends_between(context: TableContext, after: When | None, till: When | None) -> Ends:
    """As `span`, to be found by the statement that looks between them."""
    return Ends(
        context,
        Known.BEGINNING if after is None else end_of(context, after),
        Known.NOW if till is None else end_of(context, till),
    )


def changes_between(context: TableContext, after: When | None, till: When | None) -> Iterator[ChangedFile]:
    """The files that came after one moment and up to another, streamed; as `pages_between`."""
    return chain.from_iterable(_pages(context, ends_between(context, after, till)))


def pages_between(context: TableContext, after: Position, till: Position) -> Iterator[list[ChangedFile]]:
    """The files that came after one moment and up to another, in pages; the first is looked up at once.

    By their transactions, in the order in which these began.

    Raises `InvalidCut` when `till` is the earlier one, `CutExpired` when a file was collected: before the
    first page whichever it is, later only when it was collected meanwhile.
    """
    _check_order(after, till)
    return _pages(context, Ends(context, after, till))


def _check_order(after: Position, till: Position) -> None:
    if till.at < after.at:
        raise InvalidCut(
            f"there is nothing after {after.at} and up to {till.at}: give the earlier moment first"
        )


def _pages(context: TableContext, ends: Ends) -> Iterator[list[ChangedFile]]:
    found = _ChangePages(context, ends)
    page = found.next_page()
    if not found.is_over and found.is_collected():
        raise found.expired()
    return _following(page, found)


def _following(page: list[ChangedFile], found: _ChangePages) -> Iterator[list[ChangedFile]]:
    while page:
        yield page
        page = [] if found.is_over else found.next_page()


class _ChangePages:
    """The pages of one read, one statement each; none keeps a connection or a snapshot until the next."""

    def __init__(self, context: TableContext, ends: Ends) -> None:
        self._context = context
        self._schema = context.schema
        self._own = context.store.own
        self._ends = ends
        self._from: tuple[Any, ...] = ("0", _NO_FILE, "")
        self._limit = PAGE_REFERENCES
        self.is_over = False

    def next_page(self) -> list[ChangedFile]:
        keys = dict(zip(("from_xid", "from_file", "from_partition"), self._from, strict=True))
        rows = self._own.looked_up(
            _PAGE, {**self._ends.values, **keys, "limit": self._limit}, operation="look up changes"
        )
        # the log may have been dropped before: what was removed since is missing then
        self._after, self._till = _there(self._context, self._ends, rows)
        _check_order(self._after, self._till)
        self._ends = Ends(self._context, self._after, self._till)
        rows = [row[1:] for row in rows if row[1] is not None]
        if rows:
            self._from = rows[-1][:3]
        self.is_over = len(rows) < self._limit
        self._limit = PAGE_REFERENCES * PAGE_GROWTH
        return [self._changed_file(int(row[0]), *row[2:]) for row in rows]

    def is_collected(self) -> bool:
        """Whether a file of any page is gone; of one page, its rows tell."""
        values = {"after": self._after.snapshot, "till": self._till.snapshot}
        rows = self._own.rows(_QUERIES["collected"], values, operation="look up changes")
        return bool(rows[0][0])

    def _changed_file(
        self,
        xid: int,
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
        return ChangedFile(
            filename, partition_id, row_count, is_approximate, file_rows, byte_count, region, xid
        )

    def expired(self) -> CutExpired:
        return expired(self._context, self._after)


def references_at(context: TableContext, when: When) -> Iterator[FileReference]:
    """Exactly the references of a moment, by partition; streamed, and the first page is there at once.

    `InvalidCut`; `CutExpired`, also when a file was collected since.
    """
    pages = _reference_pages(context, Ends(context, end_of(context, when)))
    return chain(next(pages), chain.from_iterable(pages))


def _reference_pages(context: TableContext, ends: Ends) -> Iterator[list[FileReference]]:
    start: tuple[Any, ...] = ("", _NO_FILE)
    limit = PAGE_REFERENCES
    while True:
        values = {"limit": limit, "from_partition": start[0], "from_file": start[1]}
        rows = context.store.own.looked_up(
            _REFERENCES_AT, {**ends.values, **values}, operation="look up references"
        )
        [position] = _there(context, ends, rows)
        rows = [row[1:] for row in rows if row[1] is not None]
        yield [_reference(context, position, *row) for row in rows]
        if len(rows) < limit:
            return
        start, ends, limit = rows[-1][:2], Ends(context, position), PAGE_REFERENCES * PAGE_GROWTH


def _reference(
    context: TableContext,
    position: Position,
    partition_id: str,
    _: UUID,
    filename: str | None,
    row_count: int,
    is_approximate: bool,
    is_whole: bool,
) -> FileReference:
    if filename is None:
        raise expired(context, position)
    return FileReference(
        filename=filename,
        partition_id=partition_id,
        row_count=row_count,
        count_approximate=is_approximate,
        only_contains_data_for_this_partition=is_whole,
    )


def _there(context: TableContext, ends: Ends, rows: Sequence[Any]) -> list[Position]:
    """Where the ends of a page are; `CutExpired` where the log of removals does not reach back to them."""
    found = ends.found(rows[0][0] if rows else None)
    positions = ends.positions(found)
    if found[0].since > positions[0].at:
        raise expired(context, positions[0])
    return positions


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
        table=context.table.name,
    )


# How much was ingested between two moments: between cuts by what is known with them, beside them by the
# files.

_SINCE, _BETWEEN = (
    _QUERIES[name].including(ends=ENDS, ingested=_QUERIES["ingested"]) for name in ("since", "between")
)
_COMMITTED_AT = load(__package__ or "", "moments")["committed_at"]


@dataclass(frozen=True, slots=True)
class Size:
    """What was ingested: its rows, and the bytes of its files."""

    row_count: int
    byte_count: int


def size_between(context: TableContext, a: When | None = None, b: When | None = None) -> Size:
    """The rows and bytes that were ingested after one moment and up to another, exact.

    `a` None: from the table's beginning; `b` None: till now. Also of cuts that cannot be read any more,
    unless between them none was recorded for longer than the history is kept.
    Raises `InvalidCut`, when b is before a too, and `CutExpired`.
    """
    ends = ends_between(context, a, b)
    rows = context.store.own.looked_up(_BETWEEN, ends.values, operation="measure changes")
    [(told, row_count, byte_count, is_unknown)] = rows
    # what was ingested till a cut is known also when the cut cannot be read any more
    after, till = ends.positions(ends.found(told), reads=False)
    if till.at < after.at:
        raise InvalidCut(f"{till.at} is before {after.at}: give the earlier moment first")
    if is_unknown:
        raise expired(context, after)
    return Size(int(row_count), int(byte_count))


def size_since(context: TableContext, after: Position) -> Size:
    """What was ingested after a moment till now, told by its files. `CutExpired`."""
    values = {"after": after.snapshot, "at": after.at}
    [(row_count, byte_count, is_unknown)] = context.store.own.rows(
        _SINCE, values, operation="measure changes", scans=True
    )
    if is_unknown:
        raise expired(context, after)
    return Size(int(row_count), int(byte_count))


def portion_since(context: TableContext, after: Position, rows_max: int) -> Position:
    """The latest moment till which no more rows came after another; at least one commit's, which is whole.

    The present where all did, or where the database's clock was set back. `CutExpired`; `InvalidCut` where
    the database does not know when they came.
    """
    own, present = context.store.own, now(context, after)
    query = _QUERIES["portion"].including(committed_at=_COMMITTED_AT)
    values = {"after": after.snapshot, "till": present.snapshot, "limit": rows_max}
    is_known, is_all, at = own.rows(query, values, operation="measure changes", scans=True)[0]
    if is_all:
        return present
    if not is_known:
        raise InvalidCut(
            f"the changes of table {context.table.name!r} cannot be taken in portions: the database does not "
            "know the times of all commits (track_commit_timestamp was off, or they are so old that it has "
            "forgotten them): leave max_rows_per_batch out"
        )
    try:
        # what was visible then had been committed by then; another may have come a moment before
        return position_of(context, max(at, after.at))
    except InvalidCut:
        # the clock was set back, and tells no portion of what came then
        return present
