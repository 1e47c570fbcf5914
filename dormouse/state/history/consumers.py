"""Consumers: named positions in a table's life, from which changes are read and acknowledged, each once.

A position moves only by who read from where it stands: of two readers of one consumer, one is refused. A
consumer holds its files and the log of removals from its position on, until it acknowledged nothing for
`consumer_expiry_seconds`; then it is expired, and says so: nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dormouse.errors import ConsumerExpired, ConsumerOvertaken, CutExpired, InvalidInput, InvalidName
from dormouse.model.cut import Position
from dormouse.model.text import check_printed
from dormouse.postgres.lease import restart_leases
from dormouse.postgres.queries import load
from dormouse.state.context import TableContext
from dormouse.state.files.holds import MARGIN_SECONDS, lock_history
from dormouse.state.history.changes import size_since
from dormouse.state.history.ends import oldest
from dormouse.state.history.retention import has_events_since

NAME_BYTES_MAX = 255
_QUERIES = load(__package__ or "", "consumers")


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """Where a consumer stands: its position was the present at `position_at`. Times are aware.

    `version` counts its acknowledgements. It holds files until `held_until`, None when that is over or not
    known.
    """

    name: str
    version: int
    created_at: datetime
    acknowledged_at: datetime
    position_at: datetime
    epoch: int
    snapshot: str | None
    held_until: datetime | None
    is_held: bool
    age_seconds: float

    @property
    def is_expired(self) -> bool:
        return self.snapshot is None or not self.is_held


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """A consumer, and how far behind it is.

    `rows_behind` were ingested since its position, which was the present `seconds_behind` ago; 0 when there
    is nothing to read, no delete and no restore either; None when it is expired, as also by an erasure.
    """

    name: str
    position_at: datetime
    acknowledged_at: datetime
    expires_at: datetime | None
    is_expired: bool
    rows_behind: int | None
    seconds_behind: float | None


class Consumers:
    """The consumers of one table, as the database has them."""

    def __init__(self, context: TableContext) -> None:
        self._context = context
        self._table = context.table

    def create(self, name: str, begin: Position | None) -> None:
        """Makes a consumer that begins at a moment, or now, unless there is one of the name.

        Raises `CutExpired` when its beginning cannot be read any more.
        """
        restart_leases(self._context.supplier)  # a wrong clock may have let all moments till later go
        if not self._change("create", name, self._moment(begin)) and self.find(name) is None:
            raise CutExpired(
                f"consumer {name!r} cannot begin at {begin and begin.at}: the history of table "
                f"{self._table.name!r} does not reach back to it any more; begin at a later moment",
                table=self._table.name,
            )

    def find(self, name: str) -> ConsumerState | None:
        """A consumer as it stands; None when there is none. Raises `InvalidName`."""
        _check_name(name)
        return next(iter(self._states(name)), None)

    def get(self, name: str) -> ConsumerState:
        """A consumer as it stands; `InvalidInput` when there is none."""
        found = self.find(name)
        if found is None:
            raise self._missing(name)
        return found

    def all(self) -> list[ConsumerState]:
        """By name. Raises `TableNotFound`."""
        states = self._states(None)
        if not states:
            oldest(self._context)  # which refuses a table that is gone
        return states

    def statuses(self) -> list[ConsumerStatus]:
        """By name, with how far each is behind; costs what was ingested since their positions."""
        return [self._status(state) for state in self.all()]

    def checked(self, state: ConsumerState) -> Position:
        """The position; `ConsumerExpired` when its changes may not be all there any more."""
        if state.snapshot is None:
            raise self._not_all(
                state, "is from before the database was copied by pg_dump, which keeps no positions"
            )
        if state.is_expired:
            raise self._expired(state)
        return Position(state.epoch, state.snapshot, state.position_at)

    def acknowledge(self, read: ConsumerState, till: Position) -> ConsumerState:
        """Moves a consumer from where it was read to `till`; gives how it stands now.

        Again after it went through, it changes nothing. Raises `ConsumerOvertaken` when another has moved it,
        `ConsumerExpired`, and `InvalidInput` when it was dropped.
        """
        values = {**self._moment(till), "version": read.version, "created_at": read.created_at}
        self._change("acknowledge", read.name, values)
        now = self.find(read.name)
        if now is None or now.created_at != read.created_at:
            raise self._missing(read.name)
        # two reads that end at one microsecond are one
        if now.version == read.version + 1 and (now.snapshot, now.position_at) == (till.snapshot, till.at):
            return now
        if now.version != read.version:
            raise ConsumerOvertaken(
                f"another reader of consumer {read.name!r} of table {self._table.name!r} has acknowledged "
                "what this one read: drop what was made of it, and read again",
                table=self._table.name,
                consumer=read.name,
            )
        self.checked(now)
        raise self._expired(now)  # a moment ago

    def drop(self, name: str) -> None:
        """`InvalidInput` when there is none."""
        _check_name(name)
        if not self._change("drop", name, {}):
            raise self._missing(name)

    def _status(self, state: ConsumerState) -> ConsumerStatus:
        rows, seconds, is_expired = None, None, state.is_expired
        if not is_expired:
            position = self.checked(state)
            try:
                rows = size_since(self._context, position).row_count
                seconds = state.age_seconds if rows or has_events_since(self._context, position) else 0.0
            except CutExpired:  # what it would read was erased
                is_expired = True
        held_until = state.held_until if state.is_held else None
        return ConsumerStatus(
            state.name, state.position_at, state.acknowledged_at, held_until, is_expired, rows, seconds
        )

    def _missing(self, name: str) -> InvalidInput:
        names = ", ".join(repr(one.name) for one in self.all())
        return InvalidInput(
            f"table {self._table.name!r} has no consumer {name!r}; it has {names or 'none'}: "
            f"table.consumer({name!r}) makes it"
        )

    def _expired(self, state: ConsumerState) -> ConsumerExpired:
        return self._not_all(
            state,
            f"is expired: it acknowledged last at {state.acknowledged_at}, longer ago than "
            f"consumer_expiry_seconds, and what came since {state.position_at} may not be all there any more",
        )

    def _not_all(self, state: ConsumerState, why: str) -> ConsumerExpired:
        table, name = self._table.name, state.name
        said = f"consumer {name!r} of table {table!r} {why}. {self.how_to_go_on(name)}"
        return ConsumerExpired(said, table=table, consumer=name)

    @staticmethod
    def how_to_go_on(name: str) -> str:
        """What to do with a consumer whose changes are not all to be had."""
        return (
            f"To go on: table.drop_consumer({name!r}), record a cut, read the table as of it, and make the "
            f"consumer anew from it: table.consumer({name!r}, from_=cut)"
        )

    def _moment(self, position: Position | None) -> dict[str, Any]:
        return {
            "at": position and position.at,
            "epoch": position and position.epoch,
            "snapshot": position and position.snapshot,
            "margin_seconds": MARGIN_SECONDS,
            "expiry_seconds": self._context.properties.consumer_expiry_seconds,
        }

    def _key(self, name: str) -> dict[str, Any]:
        return {"name": name, "holder": self._holder(name)}

    def _holder(self, name: str) -> str:
        return f"consumer {self._table.table_id}/{name}"

    def _states(self, name: str | None) -> list[ConsumerState]:
        own, values = self._context.store.own, {"name": name, "prefix": self._holder("")}
        rows = own.looked_up(_QUERIES["consumers"], values, operation="look up consumers")
        return [ConsumerState(*row) for row in rows]

    def _change(self, query: str, name: str, values: Mapping[str, Any]) -> bool:
        """Whether it changed something."""
        own = self._context.store.own

        def work(conn: Any) -> bool:
            lock_history(conn, self._table.table_id)
            return bool(own.rows_in(conn, _QUERIES[query], {**values, **self._key(name)}))

        return own.run(work, operation=f"{query} consumer")


def _check_name(name: object) -> None:
    try:
        check_printed("consumer name", name, NAME_BYTES_MAX)
    except InvalidInput as error:
        raise InvalidName(str(error)) from None
