"""Which position a moment is: a cut, a cut's name, or a time, as a table's metadata are read.

A time means all that was committed at or before it, by PostgreSQL's own times of commits. So it gives the
same rows whenever it is asked for: a transaction that was slow is of the moment of its commit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from dormouse.backoff import backoff_seconds
from dormouse.context import TableContext
from dormouse.errors import (
    CutExpired,
    InstanceForbidden,
    InstanceReadOnly,
    InvalidCut,
    TableBusy,
    TableNotFound,
)
from dormouse.files.erasures import erased_by
from dormouse.files.holds import is_held, moment_held
from dormouse.model.cut import Cut, Position, When
from dormouse.model.text import is_text
from dormouse.postgres.connection import Isolation
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_transaction

AHEAD_SECONDS_MAX = 60.0
"""How far a client's clock may be ahead of the database's: a time that is not yet past is waited for."""
UNFINISHED_SECONDS_MAX = 60.0
READ_SECONDS = 3_600.0
"""How long a read may take without holding what it reads, where collection comes later than that."""
NAMES_TOLD_MAX = 10
_QUERIES = load(__package__ or "", "moments")


class FoundCut(NamedTuple):
    """A cut, its snapshot, since when its table can be read, and when its epoch was made."""

    cut: Cut
    snapshot: str | None
    since: datetime
    made_at: int | None


def position_of(context: TableContext, when: When) -> Position:
    """Where a moment is.

    Raises `InvalidCut` for a time that is naive, in the future or before the table was made, and for no cut
    of the table; `CutExpired` for one that cannot be read any more, with the oldest that can.
    """
    if isinstance(when, datetime):
        return _position_at(context, when)
    cut, snapshot, since, made_at = find_cut(context, when)
    what = _named(cut)
    if snapshot is None:
        raise CutExpired(
            f"{what} of table {context.table.name!r} was recorded in another database server, whose "
            "transactions cannot be told here: the database came from a logical copy (pg_dump); the oldest "
            f"moment that can be read is {_text(since)}",
            since,
        )
    position = Position(cut.epoch, snapshot, cut.recorded_at, made_at)
    _check_since(context, position.at, since, what)
    return position


def now(context: TableContext, after: Position | None = None) -> Position:
    """The present; nothing is recorded of it, nor held.

    It is not before a position that was known, also when the clock was set back since.
    """
    found = _present(context, _rows(context, "now"))
    return found if after is None else replace(found, at=max(found.at, after.at))


def now_together(contexts: Sequence[TableContext]) -> list[Position]:
    """The present of some tables of one instance, each its position at one moment. `TableNotFound`."""
    if not contexts:
        return []

    def work(conn: Any) -> list[Position]:
        found = [(context, _rows(context, "now", conn)) for context in contexts]
        return [_present(context, rows) for context, rows in found]

    return run_transaction(
        contexts[0].supplier,
        work,
        isolation=Isolation.REPEATABLE_READ,
        read_only=True,
        operation="find a moment",
    )


def find_cut(context: TableContext, which: Cut | str | int) -> FoundCut:
    """A cut of the table, by itself, its name or its id. `InvalidCut`, and `CutExpired`."""
    table = context.table
    if isinstance(which, Cut) and which.table_id != table.table_id:
        raise InvalidCut(f"{_named(which)} is of another table, not of {table.name!r}")
    name = which if isinstance(which, str) else None
    if isinstance(which, datetime):
        raise InvalidCut(f"here only a cut can be named, by itself or its name, and no time such as {which}")
    if isinstance(which, bool) or not (isinstance(which, Cut | int) or is_text(name)):
        raise InvalidCut(f"a moment is a cut, a cut's name, or a time with its zone, not {which!r}")
    number = which.cut_id if isinstance(which, Cut) else which if isinstance(which, int) else 0
    in_range = 0 <= number < 1 << 63
    rows = _rows(context, "cut", name=name, cut_id=number) if in_range else []
    # after the database was restored to a moment before a cut, another may have got its id
    if rows and (not isinstance(which, Cut) or rows[0][2] == which.recorded_at):
        *fields, snapshot, since, made_at = rows[0]
        return FoundCut(Cut(*_in_utc(fields)), snapshot, since, made_at)
    since = oldest(context)
    if isinstance(which, Cut) and which.name is None and which.recorded_at < since:
        check_since(context, which.recorded_at, _named(which))
    names = [repr(row[0]) for row in _rows(context, "names", limit=NAMES_TOLD_MAX + 1)]
    known = ", ".join(names[:NAMES_TOLD_MAX]) + (", …" if len(names) > NAMES_TOLD_MAX else "")
    told = repr(which)
    if isinstance(which, Cut):
        told = f"{which.cut_id if which.name is None else which.name!r} of {_text(which.recorded_at)}"
    raise InvalidCut(
        f"table {table.name!r} has no cut {told}; "
        + (f"its named cuts are {known}" if names else "none of its cuts has a name")
        + ("; a time is written 2026-11-20T14:00, and is an aware datetime in Python" * _like_time(which))
    )


def oldest(context: TableContext, conn: Any = None) -> datetime:
    """The oldest moment that can be read; `conn` is inside a transaction that asks."""
    rows = _rows(context, "since", conn)
    if not rows:
        raise TableNotFound.gone(context.table.name)
    found: datetime = rows[0][0]
    return found


def check_since(context: TableContext, at: datetime, what: str | None = None, conn: Any = None) -> None:
    """`CutExpired` when a moment cannot be read any more."""
    _check_since(context, at, oldest(context, conn), what or f"the moment {_text(at)}")


@contextmanager
def kept(context: TableContext, position: Position) -> Iterator[None]:
    """What a moment needs stays until the end, also when retention ends meanwhile.

    As far as the database may be written to: else a file that is gone says so. Raises `CutExpired`.
    """
    table, supplier = context.table, context.supplier
    kept_seconds = max(table.properties.gc_delay_seconds, table.properties.files_kept_seconds)
    old = datetime.now(UTC) - timedelta(seconds=kept_seconds - READ_SECONDS)
    with ExitStack() as stack:
        if position.at < old and not is_held(supplier, table.table_id, position.snapshot, READ_SECONDS):
            with suppress(InstanceReadOnly, InstanceForbidden):
                held = moment_held(supplier, table.table_id, position.at, position.snapshot)
                if not stack.enter_context(held):
                    check_since(context, position.at)
        yield


def _present(context: TableContext, rows: list[Any]) -> Position:
    if not rows:
        raise TableNotFound.gone(context.table.name)
    return Position(*rows[0])


def expired_by_erasure(
    context: TableContext, at: datetime, files: Sequence[str] | None = None
) -> CutExpired | None:
    """Why a moment cannot be read where files, given by names or ids, were erased since; None: they were not.

    Without files, whether any were.
    """
    found = erased_by(context.store, files, at)
    if found is None or found.ended_at < at:
        return None
    return CutExpired(
        f"the moment {_text(at)} of table {context.table.name!r} cannot be read any more for these keys: "
        f"rows of then were erased for ever from {_text(found.began_at)} on (deletion {found.deletion_id}), "
        f"with the files that had them; other keys can be read, and these from {_text(found.ended_at)} on",
        found.ended_at.astimezone(UTC),
    )


def _position_at(context: TableContext, at: datetime) -> Position:
    if at.tzinfo is None or at.utcoffset() is None:
        raise InvalidCut(
            f"the time {at} has no zone: give one that is aware, such as datetime.now(timezone.utc) or "
            "at.astimezone()"
        )
    since = _when_finished(context, at)
    what = f"the moment {_text(at)}"
    _check_since(context, at, since, what)
    [(epoch, made_at, snapshot, since, times_known, is_once)] = _rows(context, "as_of", at=at) or [
        _raise(TableNotFound.gone(context.table.name))
    ]
    _check_since(context, at, since, what)
    if not times_known:
        raise CutExpired(
            f"{what} of table {context.table.name!r} cannot be told: the database does not know the times of "
            "all commits since the last cut before it (track_commit_timestamp was off, or they are so old "
            "that it has forgotten them): name a cut; times from the next one on can be read"
        )
    if not is_once:
        raise InvalidCut(
            f"{what} of table {context.table.name!r} cannot be told: the database's clock was set back then, "
            "so that it was that time twice; name a cut, or give a later time"
        )
    return Position(epoch or 0, snapshot, at.astimezone(UTC), made_at)


def _when_finished(context: TableContext, at: datetime) -> datetime:
    """Waits until all of a moment can be seen; gives the oldest that can be read."""
    attempt, give_up = 0, float("inf")
    while True:
        attempt += 1
        rows = _rows(context, "range", at=at)
        if not rows:
            raise TableNotFound.gone(context.table.name)
        created, since, clock, tracked, unfinished, *replayed = rows[0]
        _check_time(context, at, created, clock, tracked)
        _check_replayed(at, *replayed)
        ahead = (at - clock).total_seconds()
        if ahead < 0 and not unfinished:
            return since  # type: ignore[no-any-return]
        if ahead < 0:
            give_up = min(give_up, time.monotonic() + UNFINISHED_SECONDS_MAX)
            if time.monotonic() > give_up:
                raise TableBusy(
                    f"a transaction that may be of the moment {_text(at)} has been changing table "
                    f"{context.table.name!r} for {UNFINISHED_SECONDS_MAX:g} s since; try again later"
                )
        time.sleep(max(ahead + 0.001, backoff_seconds(min(attempt, 5))))


def _check_time(
    context: TableContext, at: datetime, created: datetime, clock: datetime, tracked: bool
) -> None:
    table = context.table.name
    if not tracked:
        raise InvalidCut(
            "the database does not note the times of commits (track_commit_timestamp is off), so that a time "
            "tells no moment: set it, restart the server, or name a cut"
        )
    if at < created:
        raise InvalidCut(f"table {table!r} was made at {_text(created)}, after {_text(at)}")
    if (at - clock).total_seconds() > AHEAD_SECONDS_MAX:
        raise InvalidCut(f"the moment {_text(at)} is in the future: it is {_text(clock)}")


def _check_replayed(at: datetime, is_standby: bool, replayed_at: datetime | None) -> None:
    """A standby has what the primary committed up to some time; what it has not may be of any time since."""
    if is_standby and (replayed_at is None or at >= replayed_at):
        till = "no commit yet" if replayed_at is None else f"the commits till {_text(replayed_at)}"
        raise InvalidCut(
            f"the moment {_text(at)} cannot be told here: the database is a standby, which has replayed "
            f"{till}: give an earlier time, or a cut's name, or ask the primary"
        )


def _check_since(context: TableContext, at: datetime, since: datetime, what: str) -> None:
    if at < since:
        raise CutExpired(
            f"{what} of table {context.table.name!r} cannot be read any more; the oldest moment that can is "
            f"{_text(since)}",
            since.astimezone(UTC),
        )


def _like_time(which: object) -> bool:
    return isinstance(which, str) and which[:1].isdecimal()


def _named(cut: Cut) -> str:
    return f"the cut {cut.cut_id}" if cut.name is None else f"the cut {cut.name!r}"


def _text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(" ")


def _in_utc(row: list[Any]) -> list[Any]:
    return [value.astimezone(UTC) if isinstance(value, datetime) else value for value in row]


def _raise(error: Exception) -> Any:
    raise error


def _rows(context: TableContext, statement: str, conn: Any = None, **values: Any) -> list[Any]:
    """What one statement gives, in one round trip."""
    own, query = context.store.own, _QUERIES[statement].including(committed_at=_QUERIES["committed_at"])
    if conn is None:
        return own.looked_up(query, values, operation="find a moment")
    return rows_of(own.on(query), {**values, "table_id": context.table.table_id})(conn)
