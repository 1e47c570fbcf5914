"""The payloads and the jobs of an instance, loaded where they are asked for: most programs have neither."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from dormouse.postgres import ConnectionSupplier

if TYPE_CHECKING:
    from dormouse.jobs import JobStore
    from dormouse.objects import ObjectStore
    from dormouse.payloads import PayloadStore
    from dormouse.settings import Settings


class OwnWork:
    """What an instance has of them, made once."""

    _supplier: ConnectionSupplier
    _objects: ObjectStore
    _settings: Settings

    def __init__(self) -> None:
        self._making = Lock()
        self._payloads: PayloadStore | None = None
        self._jobs: JobStore | None = None

    def _check_writable(self) -> None:
        raise NotImplementedError

    @property
    def payloads(self) -> PayloadStore:
        """JSON documents, hot in PostgreSQL for a day, and cold in the object store after it."""
        with self._making:
            if self._payloads is None:
                from dormouse.payloads import PayloadStore
                from dormouse.payloads.copying import PayloadOptions

                self._payloads = PayloadStore(
                    self._supplier,
                    self._objects,
                    self._check_writable,
                    PayloadOptions(hot_seconds=self._settings.payloads_hot_seconds),
                )
            return self._payloads

    @property
    def jobs(self) -> JobStore:
        """Jobs, which workers run sooner or later, and what rounds did."""
        payloads = self.payloads
        with self._making:
            if self._jobs is None:
                from dormouse.jobs import JobStore

                self._jobs = JobStore(self._supplier, self._objects, payloads, self._check_writable)
            return self._jobs

    def _roll_jobs(self) -> None:
        """Makes the days that jobs will end on."""
        from dormouse.jobs.expiry import roll

        roll(self._supplier)

    def _close_jobs(self) -> None:
        if self._jobs is not None:
            self._jobs.close()
