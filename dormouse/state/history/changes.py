"""The files and regions with the rows that were ingested between two moments, each row once.

An ingest adds references that are marked as ingested and that record their transaction. A split, a merge or a
compaction may remove such a reference later; then the removal log keeps both facts. So each ingested row is
in the region of exactly one such reference, even if the row was moved since.
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
"""The number of references on the first page.

Later pages are larger, because each statement reads the whole log since the first moment.
"""

PAGE_GROWTH = 16
BEFORE_ALL = "1:1:"
"""A snapshot in which nothing is visible."""

_QUERIES = load(__package__ or "", "changes")
_PAGE, _REFERENCES_AT = (_QUERIES[name].including(ends=ENDS) for name in ("page", "references_at"))
_NO_FILE = UUID(int=0)


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """A file with ingested rows.

    - `region`: the region that contains the ingested rows; None if all rows of the file were ingested.
    - `row_count`: the number of ingested rows; an estimate if `count_approximate`.
    - `file_row_count`, `byte_count`: the rows and bytes of the whole file; None where they are not known.
    - `xid`: the transaction that added the file.
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
    """Returns the positions of two moments.

    `after` None is the moment before the first row; `till` None is now. Raises `CutExpired` if the history
    does not reach back so far.
    """
    ends = ends_between(context, after, till)
    start, end = ends.positions(ends.look_up())
    return start, end


def ends_between(context: TableContext, after: When | None, till: When | None) -> Ends:
    """Returns two moments that are not looked up yet, with the same defaults as in `span`.

    The statement that reads the changes between the moments looks them up.
    """
    return Ends(
        context,
        Known.BEGINNING if after is None else end_of(context, after),
        Known.NOW if till is None else end_of(context, till),
    )


def changes_between(context: TableContext, after: When | None, till: When | None) -> Iterator[ChangedFile]:
    """Yields the files ingested after one moment and up to another.

    Their order, and the errors, are those of `pages_between`.
    """
    return chain.from_iterable(_pages(context, ends_between(context, after, till)))


def pages_between(context: TableContext, after: Position, till: Position) -> Iterator[list[ChangedFile]]:
    """Yields pages of the files ingested after one moment and up to another; reads the first page at once.

    The files are sorted by the beginning of their transactions.

    Raises `InvalidCut` if `till` is before `after`, and `CutExpired` if a file was collected. All files are
    checked before the first page. So a later page raises an error only for files that were collected in
    between.
    """
    _check_order(after, till)
    return _pages(context, Ends(context, after, till))


def _check_order(after: Position, till: Position) -> None:
    if till.at < after.at:
        raise InvalidCut(
            f"there is nothing after {after.at} and up to {till.at}: give the earlier moment first"
        )


def _pages(context: TableContext, ends: Ends) -> Iterator[list[ChangedFile]]:
    pages = _ChangePages(context, ends)
    page = pages.next_page()
    if not pages.is_over and pages.is_collected():
        raise pages.expired()
    return _following(page, pages)


def _following(page: list[ChangedFile], pages: _ChangePages) -> Iterator[list[ChangedFile]]:
    while page:
        yield page
        page = [] if pages.is_over else pages.next_page()


class _ChangePages:
    """The pages of one read, one statement for each. Nothing is held in the database between two pages."""

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
        # raises if a part of the log since then was dropped, as removed references would be missing
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
        """Returns True if a file of any page was collected.

        With only one page, this call is not needed: a row of the page shows if its file was collected.
        """
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
    """Yields exactly the references of a moment, sorted by partition; reads the first page at once.

    Raises `InvalidCut`. Raises `CutExpired` if the moment can no longer be read or a file was collected
    since.
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
    """Returns the positions of the moments of a page.

    Raises `CutExpired` if the removal log begins after the first moment.
    """
    moments = ends.read(rows[0][0] if rows else None)
    positions = ends.positions(moments)
    if moments[0].since > positions[0].at:
        raise expired(context, positions[0])
    return positions


def expired(context: TableContext, position: Position) -> CutExpired:
    """Returns the error that explains why a moment, or the changes since then, cannot be read."""
    since = oldest(context)
    if since <= position.at and (erased := expired_by_erasure(context, position.at)) is not None:
        return erased
    return CutExpired(
        f"the history of table {context.table.name!r} does not reach back to {position.at}, only to {since}: "
        "files of that time were collected; name a cut to keep its files, or raise the table's property "
        "history_retention_seconds",
        since,
        table=context.table.name,
    )


# The size of what was ingested between two moments. Cuts record running totals; only what was ingested before
# the first cut or after the last one is counted from its files.

_SINCE, _BETWEEN = (
    _QUERIES[name].including(ends=ENDS, ingested=_QUERIES["ingested"]) for name in ("since", "between")
)
_COMMITTED_AT = load(__package__ or "", "moments")["committed_at"]


@dataclass(frozen=True, slots=True)
class Size:
    """The size of what was ingested: its rows, and the bytes of its files."""

    row_count: int
    byte_count: int


def size_between(context: TableContext, a: When | None = None, b: When | None = None) -> Size:
    """Returns the exact rows and bytes that were ingested after moment `a` and up to moment `b`.

    `a` None is the table's beginning; `b` None is now. The moments may be cuts that can no longer be read.
    But then cuts must have been recorded between them at least as often as the history is kept. Raises
    `InvalidCut`, for example if `b` is before `a`, and `CutExpired`.
    """
    ends = ends_between(context, a, b)
    rows = context.store.own.looked_up(_BETWEEN, ends.values, operation="measure changes")
    [(moments, row_count, byte_count, is_unknown)] = rows
    # a cut's running total is known even if the cut itself can no longer be read
    after, till = ends.positions(ends.read(moments), reads=False)
    if till.at < after.at:
        raise InvalidCut(f"{till.at} is before {after.at}: give the earlier moment first")
    if is_unknown:
        raise expired(context, after)
    return Size(int(row_count), int(byte_count))


def size_since(context: TableContext, after: Position) -> Size:
    """Returns the rows and bytes ingested after a moment and until now, counted from files.

    Raises `CutExpired`.
    """
    values = {"after": after.snapshot, "at": after.at}
    [(row_count, byte_count, is_unknown)] = context.store.own.rows(
        _SINCE, values, operation="measure changes", scans=True
    )
    if is_unknown:
        raise expired(context, after)
    return Size(int(row_count), int(byte_count))


def portion_since(context: TableContext, after: Position, rows_max: int) -> Position:
    """Returns the latest position such that at most `rows_max` rows were ingested after `after` and up to it.

    Commits are never divided, so a single commit may have more rows. Returns the present if all rows fit, or
    if the database's clock was set back. Raises `CutExpired`. Raises `InvalidCut` if the database does not
    know the times of commits.
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
        # not before `after`: a commit whose time is a moment before it may be counted here
        return position_of(context, max(at, after.at))
    except InvalidCut:
        # the clock was set back, so no time divides what came then
        return present
