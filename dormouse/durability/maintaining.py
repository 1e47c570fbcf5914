"""Maintenance of an instance of one's own, as schedules do it for a deployed one.

One table after another: a cut of its history, splits, merges, compactions, retention, collection; once a day
what is of the instance, such as the backup of its metadata. What fails is remembered with the table or the
instance, and holds up nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dormouse.durability.instance_rounds import Alone, InstanceRounds
from dormouse.errors import InstanceReadOnly, MaintenanceTakenOver, TableNotFound, one_line
from dormouse.model.properties import TableProperties
from dormouse.postgres.connection import Supplier
from dormouse.postgres.leases import restart_leases
from dormouse.state.partitions.leaves import REST_SECONDS, of_one_key

CYCLE_SECONDS = 30.0
COLLECTION_SECONDS = 600.0
DAY_SECONDS = 86_400.0
HOUR_SECONDS = 3_600.0
LINES_MAX = 100
"""Of failures, and of partitions, that a report keeps."""

logger = logging.getLogger(__name__)


class Maintained(Protocol):
    """A table, as far as it is maintained."""

    @property
    def name(self) -> str: ...
    @property
    def properties(self) -> TableProperties: ...
    @property
    def history(self) -> Any: ...
    def split(self) -> Any: ...
    def merge(self, *, rest_seconds: float) -> Any: ...
    def compact(self) -> Any: ...
    def collect_garbage(self) -> Any: ...
    def status(self) -> Any: ...


@dataclass(slots=True)
class Maintenance:
    """What was done, in all; `failures` are the last, at most a hundred, one line each.

    `one_key_partitions` has a line for each full leaf that was found to have rows of one key, and cannot be
    divided: the last hundred.
    """

    cycles: int = 0
    partitions_split: int = 0
    partitions_merged: int = 0
    jobs_run: int = 0
    files_deleted: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    one_key_partitions: list[str] = field(default_factory=list)


class Maintainer:
    """Maintains the tables that `tables` gives; does once a day, or an hour, what these give by kind."""

    def __init__(
        self,
        supplier: Supplier,
        tables: Callable[[], Sequence[Maintained]],
        daily: Callable[[], Mapping[str, Callable[[], object]]],
        hourly: Callable[[], Mapping[str, Callable[[], object]]],
        tell: Callable[[str], object] = lambda line: None,
        after_cycle: Callable[[Maintenance], object] = lambda done: None,
    ) -> None:
        self._after_cycle = after_cycle
        self._supplier = supplier
        self._rounds = InstanceRounds(supplier)
        self._alone: Alone | None = None
        self._tables = tables
        self._due = [(DAY_SECONDS, daily), (HOUR_SECONDS, hourly)]
        self._tell = tell
        self._collected_at: dict[str, float] = {}
        self.done = Maintenance()

    def run(self, stop: threading.Event, *, once: bool = False, cycle_seconds: float = CYCLE_SECONDS) -> None:
        """Works until `stop` is set, or once.

        Raises `InstanceReadOnly`, `InstanceLocked` when another process does it, and `MaintenanceTakenOver`
        when another process does it since this one lost its session of the database.
        """
        with self._rounds.alone() as alone:
            self._alone = alone
            while not stop.is_set():
                self._try("maintenance", lambda: self._cycle(stop, all_is_due=once))
                self.done.cycles += 1
                self._try("metrics", lambda: self._after_cycle(self.done))
                if once:
                    return
                stop.wait(cycle_seconds)

    def _cycle(self, stop: threading.Event, *, all_is_due: bool) -> None:
        self._try("leases", lambda: restart_leases(self._supplier))
        for table in self._tables():
            if stop.is_set():
                return
            self._table(table, all_is_due=all_is_due)
        for seconds, rounds in self._due:
            for kind, work in rounds().items():
                if not stop.is_set() and self._rounds.is_due(kind, seconds):
                    self._try(kind, lambda kind=kind, work=work: self._rounds.run(kind, work))  # type: ignore[misc]

    def _table(self, table: Maintained, *, all_is_due: bool) -> None:
        name = table.name  # each look at it asks the database
        self._try(f"{name}: cut", table.history.record_if_due)
        if split := self._try(f"{name}: split", table.split):
            self.done.partitions_split += len(split.partitions_split)
            self._note(f"{name}: split", split.errors)
            self._note_one_key(name, split.one_key_partitions)
        if merged := self._try(f"{name}: merge", lambda: self._merge(table)):
            self.done.partitions_merged += len(merged.partitions_merged)
            self._note(f"{name}: merge", merged.errors)
        if compacted := self._try(f"{name}: compaction", table.compact):
            self.done.jobs_run += compacted.jobs_run
            self._note(f"{name}: compaction", compacted.errors if compacted.given_up else ())
        since = time.monotonic() - self._collected_at.get(name, float("-inf"))
        if all_is_due or since >= COLLECTION_SECONDS:
            self._collected_at[name] = time.monotonic()
            self._try(f"{name}: retention", table.history.apply_retention)
            if collected := self._try(f"{name}: collection", table.collect_garbage):
                self.done.files_deleted += collected.deleted
                self._note(f"{name}: collection", [f"{file}: {why}" for file, why in collected.failed])

    def _merge(self, table: Maintained) -> Any:
        wanted = table.properties.merge_threshold_rows is not None
        return table.merge(rest_seconds=REST_SECONDS) if wanted else None

    def _try(self, what: str, work: Callable[[], Any]) -> Any:
        """Returns what `work` returns; notes a failure and returns None.

        Before each it looks whether this process still maintains the instance alone.
        """
        try:
            if self._alone is not None:
                self._alone.check()
            return work()
        except (InstanceReadOnly, MaintenanceTakenOver):
            raise
        except TableNotFound:  # dropped meanwhile
            return None
        except Exception as error:
            logger.info("%s failed", what, exc_info=True)
            self._note(what, [one_line(error)])
            return None

    def _note_one_key(self, table: str, partition_ids: Sequence[str]) -> None:
        for partition_id in partition_ids:
            known = self.done.one_key_partitions
            self.done.one_key_partitions = [*known[-(LINES_MAX - 1) :], f"{table}: {partition_id}"]
            self._tell(f"{table}: {of_one_key(partition_id)}")

    def _note(self, what: str, errors: Sequence[str]) -> None:
        for error in errors:
            self.done.failed += 1
            self.done.failures = [*self.done.failures[-(LINES_MAX - 1) :], f"{what}: {error}"]
            self._tell(self.done.failures[-1])
