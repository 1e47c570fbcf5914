"""Consumers: named positions in a table's history, from which each change is read and acknowledged once.

A reader can move a consumer only if it read from the consumer's current position. If two readers read the
same changes, one of them is refused. A consumer keeps the files and the removal log from its position on. It
expires when it acknowledges nothing for `consumer_expiry_seconds`. Reading from an expired consumer raises an
error, so that no change is skipped.
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
    """The state of a consumer. All times have a time zone.

    - `version`: the number of acknowledgements so far.
    - `position_at`: the time of its position.
    - `held_until`: the time until which it keeps files; None when there is no hold.
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
    """A consumer, with its distance from the present.

    - `rows_behind`: the rows ingested since its position.
    - `seconds_behind`: the age of its position; 0 when there are no rows, deletions or restores to read.

    Both are None when the consumer is expired. An erasure of rows that it has not read yet makes it expire,
    too.
    """

    name: str
    position_at: datetime
    acknowledged_at: datetime
    expires_at: datetime | None
    is_expired: bool
    rows_behind: int | None
    seconds_behind: float | None


class Consumers:
    """The consumers of one table, stored in the database."""

    def __init__(self, context: TableContext) -> None:
        self._context = context
        self._table = context.table

    def create(self, name: str, begin: Position | None) -> None:
        """Creates a consumer that begins at a moment, or now; does nothing if a consumer of this name exists.

        Raises `CutExpired` when its beginning can no longer be read.
        """
        # a wrong clock may have moved the oldest readable moment into the future; this corrects it
        restart_leases(self._context.supplier)
        if not self._change("create", name, self._moment(begin)) and self.find(name) is None:
            raise CutExpired(
                f"consumer {name!r} cannot begin at {begin and begin.at}: the history of table "
                f"{self._table.name!r} does not reach back so far; begin at a later moment",
                table=self._table.name,
            )

    def find(self, name: str) -> ConsumerState | None:
        """Returns the state of a consumer; None when there is none. Raises `InvalidName`."""
        _check_name(name)
        return next(iter(self._states(name)), None)

    def get(self, name: str) -> ConsumerState:
        """Returns the state of a consumer; raises `InvalidInput` when there is none."""
        state = self.find(name)
        if state is None:
            raise self._missing(name)
        return state

    def all(self) -> list[ConsumerState]:
        """Returns all consumers, by name. Raises `TableNotFound`."""
        states = self._states(None)
        if not states:
            oldest(self._context)  # raises if the table was dropped
        return states

    def statuses(self) -> list[ConsumerStatus]:
        """Returns the status of each consumer, sorted by name.

        The cost grows with the number of changes since their positions.
        """
        return [self._status(state) for state in self.all()]

    def checked(self, state: ConsumerState) -> Position:
        """Returns the consumer's position; raises `ConsumerExpired` if changes after it may be missing."""
        if state.snapshot is None:
            raise self._not_all(
                state, "is from before the database was copied by pg_dump, which keeps no positions"
            )
        if state.is_expired:
            raise self._expired(state)
        return Position(state.epoch, state.snapshot, state.position_at)

    def acknowledge(self, read: ConsumerState, till: Position) -> ConsumerState:
        """Moves a consumer from the state `read` to the position `till`; returns its new state.

        Repeating the call changes nothing. Raises:

        - `ConsumerOvertaken` when another reader has moved the consumer;
        - `ConsumerExpired` when it has expired;
        - `InvalidInput` when it was dropped.
        """
        values = {**self._moment(till), "version": read.version, "created_at": read.created_at}
        self._change("acknowledge", read.name, values)
        now = self.find(read.name)
        if now is None or now.created_at != read.created_at:
            raise self._missing(read.name)
        # moved by this reader, by an earlier try; two reads that end at the same microsecond count as one
        if now.version == read.version + 1 and (now.snapshot, now.position_at) == (till.snapshot, till.at):
            return now
        if now.version != read.version:
            raise ConsumerOvertaken(
                f"another reader of consumer {read.name!r} of table {self._table.name!r} has acknowledged "
                "what this one read: discard the results of this read, and read again",
                table=self._table.name,
                consumer=read.name,
            )
        self.checked(now)
        raise self._expired(now)  # it expired just before, or `checked` would have raised

    def drop(self, name: str) -> None:
        """Deletes a consumer; raises `InvalidInput` when there is none."""
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
            except CutExpired:  # an erasure removed what it would read
                is_expired = True
        held_until = state.held_until if state.is_held else None
        return ConsumerStatus(
            state.name, state.position_at, state.acknowledged_at, held_until, is_expired, rows, seconds
        )

    def _missing(self, name: str) -> InvalidInput:
        names = ", ".join(repr(each.name) for each in self.all())
        return InvalidInput(
            f"table {self._table.name!r} has no consumer {name!r}; it has {names or 'none'}: "
            f"table.consumer({name!r}) makes it"
        )

    def _expired(self, state: ConsumerState) -> ConsumerExpired:
        return self._not_all(
            state,
            f"is expired: it acknowledged last at {state.acknowledged_at}, longer ago than "
            f"consumer_expiry_seconds, and changes since {state.position_at} may be missing",
        )

    def _not_all(self, state: ConsumerState, why: str) -> ConsumerExpired:
        table, name = self._table.name, state.name
        text = f"consumer {name!r} of table {table!r} {why}. {self.how_to_go_on(name)}"
        return ConsumerExpired(text, table=table, consumer=name)

    @staticmethod
    def how_to_go_on(name: str) -> str:
        """Returns advice, for an error message, on how to replace a consumer that missed changes."""
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
        """Runs a statement on a consumer; returns True if it changed the consumer."""
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
