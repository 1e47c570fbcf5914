"""The payloads of an instance, as users hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import date, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from dormouse.errors import DormouseError, InvalidInput
from dormouse.model.properties import SECONDS_MAX
from dormouse.objects import ObjectStore
from dormouse.payloads import cooling, rows, upkeep
from dormouse.payloads.application import ApplicationPayloads
from dormouse.payloads.content import encode_given
from dormouse.payloads.cooling import OffloadReport
from dormouse.payloads.copying import PayloadOptions
from dormouse.payloads.expiry import expire
from dormouse.payloads.keys import PayloadKey, checked
from dormouse.payloads.lookup import Lookup
from dormouse.payloads.objects import KEPT_SECONDS, CollectedObjects, PayloadObjects
from dormouse.payloads.offload import Progress, Tools, within
from dormouse.payloads.reading import Reader
from dormouse.payloads.rebuilding import recover_pointers
from dormouse.payloads.status import PayloadDay, PayloadStatus, days, status
from dormouse.payloads.upkeep import PayloadRound
from dormouse.payloads.verifying import PayloadVerification, verify
from dormouse.postgres.connection import Supplier

if TYPE_CHECKING:
    import psycopg


class PayloadStore:
    """JSON documents by tenant, id, time and kind. Made by `instance.payloads`; threads may share it.

    A key is (tenant, id, inserted_at, kind): tenant, id and kind are text of at most 512 bytes each, and
    `inserted_at` an aware datetime, whose day in UTC is what the payload is kept and expires with.
    """

    def __init__(
        self,
        supplier: Supplier,
        objects: ObjectStore,
        check_writable: Callable[[], object] = lambda: None,
        options: PayloadOptions | None = None,
    ) -> None:
        self._supplier = supplier
        self._objects = objects
        self._options = options or PayloadOptions()
        self._lookup = Lookup(supplier, Reader(objects))
        self._check_writable = check_writable
        self._in_applications = ApplicationPayloads(supplier)

    def put(
        self,
        tenant: str,
        id: str,
        inserted_at: datetime,
        kind: str,
        content: Any,
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> None:
        """Keeps a payload, in place of the one of the same key. `content` is any JSON value, None too.

        With `conn`, a connection of the application to the database of the instance, the payload is kept when
        the transaction of that commits; until then `get` finds it with the same `conn` alone. An error leaves
        that transaction as it was before the call. Kinds that begin with "dormouse." are refused.

        Raises `InvalidPayload`, and `PayloadExpired` for a day that was dropped; with `conn` also
        `InvalidInput`, `InstanceForbidden`, and what psycopg raises of a transaction that must be run again.
        """
        self.put_many([(tenant, id, inserted_at, kind, content)], conn=conn)

    def put_many(
        self,
        payloads: Iterable[tuple[str, str, datetime, str, Any]],
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> None:
        """Keeps (tenant, id, inserted_at, kind, content), all or none; of one key, the last.

        `conn` is as for `put`. Raises as `put`.
        """
        contents: dict[PayloadKey, str] = {}
        for given in payloads:
            key, text = encode_given(given)
            contents[key] = text
        self._check_writable()
        if conn is not None:
            self._in_applications.put(conn, contents)
        elif contents:
            rows.put(self._supplier, contents)

    def get(
        self,
        tenant: str,
        id: str,
        inserted_at: datetime,
        kind: str,
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> Any:
        """Returns the content of a payload; with `conn`, as the transaction of the application sees it.

        That includes what it has put and deleted itself. Objects are read outside of the transaction.

        Raises `InvalidPayload` for a key that cannot be, `PayloadNotFound`, `PayloadExpired` when its day was
        dropped, `PayloadCorrupt` when what is kept of it is not what was written, and `PayloadUnavailable`
        when the object store does not give it now; with `conn` also what `put` raises of it.
        """
        [found] = self.get_many([(tenant, id, inserted_at, kind)], conn=conn).values()
        if isinstance(found, DormouseError):
            raise found
        return found

    def get_many(
        self,
        keys: Iterable[tuple[str, str, datetime, str]],
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> dict[PayloadKey, Any]:
        """Returns the content of each key, or the error that `get` would raise. `conn` is as for `get`.

        Raises `InvalidPayload`, and with `conn` what `put` raises of it.
        """
        wanted = dict.fromkeys(map(checked, keys))
        find = None if conn is None else partial(self._in_applications.places, conn)
        return self._lookup.contents(wanted, find)

    def delete(
        self,
        tenant: str,
        id: str,
        inserted_at: datetime,
        kind: str,
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> None:
        """Deletes a payload, if it is there; with `conn`, when the transaction of the application commits.

        Raises `InvalidPayload`, and with `conn` what `put` raises of it.
        """
        self.delete_many([(tenant, id, inserted_at, kind)], conn=conn)

    def delete_many(
        self,
        keys: Iterable[tuple[str, str, datetime, str]],
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> None:
        """Deletes the payloads that are there, all or none. `conn` is as for `delete`, and so are errors."""
        wanted = set(map(checked, keys))
        self._check_writable()
        if conn is not None:
            self._in_applications.delete(conn, wanted)
        elif wanted:
            rows.delete(self._supplier, wanted)

    def offload(
        self,
        day: date | None = None,
        dry_run: bool = False,
        *,
        seconds_max: float | None = None,
        progress: Progress = lambda day, payloads: None,
    ) -> OffloadReport:
        """Moves the payloads of a day that is over into objects, or of each that is over for
        `DORMOUSE_PAYLOADS_HOT_SECONDS`, while all goes on.

        Others may do the same with other days, or go on where this one ends: after `seconds_max`, or killed.
        A day that is done stays so. With `dry_run`, only what would be done is told.

        Of one day raises `InvalidInput` when it is not over or is not there, `PayloadExpired`,
        `PayloadDayBusy`, `PayloadsDiffer` and `ObjectStoreError`; of many, the report has them.
        """
        if not dry_run:
            self._check_writable()
        return cooling.offload(self._tools(seconds_max, progress), day, dry_run)

    def fold(
        self,
        day: date | None = None,
        *,
        seconds_max: float | None = None,
        progress: Progress = lambda day, payloads: None,
    ) -> OffloadReport:
        """Makes blocks of a day's objects, or of each day that is cold for a week: some hundred rows.

        What is written to such a day later stays inline until it is folded again. Raises as `offload`.
        """
        self._check_writable()
        return cooling.fold(self._tools(seconds_max, progress), day)

    def rehydrate(
        self,
        what: date | Iterable[tuple[str, str, datetime, str]],
        *,
        progress: Progress = lambda day, payloads: None,
    ) -> int:
        """Has the payloads of a day, or of some keys, be in PostgreSQL again; gives how many were not.

        A day stays so for a day at least. Raises `InvalidInput`, `PayloadExpired`, `PayloadDayBusy`; of keys
        what `get` does, when some are warm already.
        """
        self._check_writable()
        if isinstance(what, date):
            return cooling.rehydrate(self._tools(progress=progress), what)
        return self._lookup.warm(dict.fromkeys(map(checked, what)))

    def verify(
        self, day: date, *, rebuild: bool = False, progress: Progress = lambda day, payloads: None
    ) -> PayloadVerification:
        """Reads all objects of a day, and compares the day's pointers or blocks with what they have.

        With `rebuild`, what the database has lost of these is made anew from the objects. Pointers and blocks
        of objects that are gone lead to others then, as far as these have the payloads: `recovered` says how
        many, and `problems` what is lost. What was deleted of payloads whose pointers are all lost is there
        again.
        """
        if rebuild:
            self._check_writable()
        cooling.check_day(day)
        return verify(self._tools(progress=progress), day, rebuild=rebuild)

    def expire(self, before: date, dry_run: bool = False) -> tuple[list[date], list[date]]:
        """Drops the days before one, and then has their objects deleted; with `dry_run` only tells which.

        Gives the days, and those that are worked on or used all the time, and stay for another time. Raises
        `InvalidInput` for days that are not over.
        """
        cooling.check_day(before)
        if before > (today := rows.DAYS.today(self._supplier)):
            raise InvalidInput(f"the days before {before} are not all over: {today} is the last to be given")
        if not dry_run:
            self._check_writable()
        return expire(self._supplier, before, dry_run=dry_run)

    def days(self, *, expired: bool = False) -> list[PayloadDay]:
        """The days that there are payloads of, the oldest first; also those that were dropped."""
        return days(self._supplier, self._options.hot_seconds, expired=expired)

    def status(self) -> PayloadStatus:
        """How much waits to be cooled down, and how the last days went."""
        return status(self.days(), self._known, self._lookup.cold_reads)

    def collect(self, kept_seconds: float = KEPT_SECONDS) -> CollectedObjects:
        """Deletes the objects that no payload has needed for a day, or another time, and that are not held.

        These are objects of expired days, those that a fold replaced, and those of workers that died. Readers
        have a quarter of an hour at least. Raises `InvalidInput`.
        """
        if not 0 <= kept_seconds <= SECONDS_MAX:
            raise InvalidInput(f"kept_seconds must be from 0 to {SECONDS_MAX:,.0f}, not {kept_seconds!r}")
        self._check_writable()
        return self._known.collect(kept_seconds)

    def recover(self) -> list[str]:
        """Leads pointers to objects that are gone to others that have the same payloads, as adoptions do.

        Returns a line for each day that had such pointers: what was found, and what was not.
        """
        self._check_writable()
        return recover_pointers(self._tools())

    def maintain(
        self, *, seconds_max: float | None = None, retention_days: int | None = None
    ) -> PayloadRound:
        """A round of all that is due: days made ahead, days dropped, offloaded and folded, objects deleted.

        What fails is in its `errors`, and holds up nothing else.
        """
        self._check_writable()
        return upkeep.run(self._tools(seconds_max), retention_days)

    @property
    def _known(self) -> PayloadObjects:
        return PayloadObjects(self._supplier, self._objects)

    def _tools(
        self, seconds_max: float | None = None, progress: Progress = lambda day, payloads: None
    ) -> Tools:
        return Tools(self._supplier, self._objects, self._options, progress, within(seconds_max))
