"""The maintenance of an instance in a folder or on the user's servers; a deployed instance has schedules.

For one table after another, maintenance records a cut of the history, splits, merges, compacts, applies the
retention and collects garbage. It skips tables that have no such work. Once a day it does work of the whole
instance, such as the metadata backup. It records a failure with the table or the instance, and continues with
the other work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dormouse.errors import (
    InstanceLocked,
    InstanceReadOnly,
    MaintenanceTakenOver,
    TableNotFound,
    not_installed,
    one_line,
)
from dormouse.model.table import TableProperties
from dormouse.model.text import of_one_key
from dormouse.postgres.connection import Supplier
from dormouse.postgres.lease import SessionLock, restart_leases
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction
from dormouse.state.files.attempts import NO_TABLE
from dormouse.state.history.due import KINDS, Kind, due_kinds
from dormouse.state.partitions import REST_SECONDS

if TYPE_CHECKING:
    from dormouse.payloads.store import PayloadStore

# Rounds of maintenance of the whole instance, not of a table.

AGAIN_SECONDS = 3_600.0
"""The seconds after which a round that failed is tried again."""

_QUERIES = load(__file__, "maintaining")


@dataclass(frozen=True, slots=True)
class InstanceRound:
    """The last round of one kind.

    `error` is the reason of a failure, or None. `well_at` is the time of the last round that succeeded.
    """

    kind: str
    began_at: datetime
    ended_at: datetime
    error: str | None
    well_at: datetime | None


class InstanceRounds:
    """The records of the rounds of an instance."""

    def __init__(self, supplier: Supplier) -> None:
        self._supplier = supplier

    def read(self) -> list[InstanceRound]:
        """Returns the last round of each kind."""
        rows = run_lookup(self._supplier, rows_of(_QUERIES["rounds"]), operation="read rounds")
        return [InstanceRound(*row) for row in rows]

    def is_due(self, kind: str, every_seconds: float) -> bool:
        """Returns whether a round is due, `every_seconds` after the last or an hour after a failed round."""
        values = {"kind": kind, "every_seconds": every_seconds, "again_seconds": AGAIN_SECONDS}
        work = rows_of(_QUERIES["is_due"], values)
        return bool(run_lookup(self._supplier, work, operation="read rounds")[0][0])

    def run(self, kind: str, work: Callable[[], object]) -> None:
        """Does the work of a round, and records its duration and error. Raises the error of the work."""
        began = time.monotonic()
        try:
            work()
        except Exception as error:
            self._record(kind, began, one_line(error))
            raise
        self._record(kind, began, None)

    def divide(self, kind: str, into: Sequence[str]) -> None:
        """Replaces the record of one kind of round by records of several kinds.

        If the last round of the old kind failed, the last rounds of all new kinds count as failed.
        """
        values = {"kind": kind, "into": list(into)}
        run_transaction(
            self._supplier, rows_of(_QUERIES["divide"], values), operation="divide a kind of rounds"
        )

    @contextmanager
    def alone(self) -> Iterator[SessionLock]:
        """Keeps other processes from maintaining the instance while the block runs.

        Raises `InstanceLocked` if another process already maintains the instance.
        """
        taken_over = partial(
            MaintenanceTakenOver,
            "the connection to the database was lost for a moment, and another process maintains this "
            "instance now, so this one ends",
        )
        with SessionLock(self._supplier, _QUERIES["alone"], lost=taken_over) as lock:
            if not lock.take():
                raise InstanceLocked("another process already maintains this instance")
            yield lock

    def _record(self, kind: str, began: float, error: str | None) -> None:
        values = {"kind": kind, "seconds": time.monotonic() - began, "error": error}
        run_transaction(self._supplier, rows_of(_QUERIES["record"], values), operation="record a round")


CYCLE_SECONDS = 30.0
COLLECTION_SECONDS = 600.0
DAY_SECONDS = 86_400.0
HOUR_SECONDS = 3_600.0
LINES_MAX = 100
"""The most failures, and the most partitions, that a report keeps."""

logger = logging.getLogger(__name__)


class Maintained(Protocol):
    """The methods of a table that maintenance calls."""

    @property
    def name(self) -> str: ...
    @property
    def properties(self) -> TableProperties: ...
    @property
    def context(self) -> Any: ...
    @property
    def history(self) -> Any: ...
    def split(self) -> Any: ...
    def merge(self, *, rest_seconds: float) -> Any: ...
    def compact(self) -> Any: ...
    def collect_garbage(self) -> Any: ...
    def status(self) -> Any: ...


@dataclass(slots=True)
class Maintenance:
    """The totals of all maintenance that a process has done.

    - `tables_idle`: how often a table was skipped, because it had no work.
    - `failures`: the last 100 failures, one line each.
    - `one_key_partitions`: a line for each of the last 100 full leaves that cannot be split, because all
      their rows have one key.
    """

    cycles: int = 0
    partitions_split: int = 0
    partitions_merged: int = 0
    jobs_run: int = 0
    files_deleted: int = 0
    tables_idle: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    one_key_partitions: list[str] = field(default_factory=list)


class Maintainer:
    """A maintainer of the tables that `tables` returns.

    With each collection of garbage it runs `tidying`, once a day the work that `daily` returns, and once an
    hour the work that `hourly` returns. Without `compacts`, it leaves splits, merges and compactions to
    another program.
    """

    def __init__(
        self,
        supplier: Supplier,
        tables: Callable[[], Sequence[Maintained]],
        tidying: Mapping[str, Callable[[], object]],
        daily: Callable[[], Mapping[str, Callable[[], object]]],
        hourly: Callable[[], Mapping[str, Callable[[], object]]],
        tell: Callable[[str], object] = lambda line: None,
        after_cycle: Callable[[Maintenance], object] = lambda done: None,
        *,
        compacts: bool = True,
    ) -> None:
        self._compacts = compacts
        self._after_cycle = after_cycle
        self._supplier = supplier
        self._rounds = InstanceRounds(supplier)
        self._alone: SessionLock | None = None
        self._tables = tables
        self._tidying = tidying
        self._due = [(DAY_SECONDS, daily), (HOUR_SECONDS, hourly)]
        self._tell = tell
        self._collected_at: dict[int, float] = {}
        """The time of the last collection of each table, and of the last tidying."""
        self.done = Maintenance()

    def run(self, stop: threading.Event, *, once: bool = False, cycle_seconds: float = CYCLE_SECONDS) -> None:
        """Maintains the instance until `stop` is set, or with `once` for one cycle.

        Raises `InstanceReadOnly`, and `InstanceLocked` if another process maintains the instance. Raises
        `MaintenanceTakenOver` if this process lost its database session and another process then took over.
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
        tables = self._tables()
        self._check_alone()  # also if no table has work
        records = [table.context.table for table in tables]
        for table, record, kinds in zip(tables, records, due_kinds(self._supplier, records), strict=True):
            if stop.is_set():
                return
            if kinds & self._wanted(record.table_id, all_is_due=all_is_due):
                self._table(table, record.table_id, all_is_due=all_is_due)
            else:
                self.done.tables_idle += 1
        if self._collects(NO_TABLE, all_is_due=all_is_due):
            for kind, work in self._tidying.items():
                self._try(kind, work)
            self._collected_at[NO_TABLE] = time.monotonic()
        for seconds, rounds in self._due:
            for kind, work in rounds().items():
                if not stop.is_set() and self._rounds.is_due(kind, seconds):
                    self._try(kind, lambda kind=kind, work=work: self._rounds.run(kind, work))  # type: ignore[misc]

    def _wanted(self, table_id: int, *, all_is_due: bool) -> frozenset[Kind]:
        """Returns the kinds of work that this process would do for a table now."""
        left_out: set[Kind] = set() if self._compacts else {"split", "merge", "compaction"}
        if not self._collects(table_id, all_is_due=all_is_due):
            left_out.add("collection")
        return KINDS - left_out

    def _collects(self, table_id: int, *, all_is_due: bool) -> bool:
        since = time.monotonic() - self._collected_at.get(table_id, float("-inf"))
        return all_is_due or since >= COLLECTION_SECONDS

    def _table(self, table: Maintained, table_id: int, *, all_is_due: bool) -> None:
        name = table.name  # read once, as each access asks the database
        self._try(f"{name}: cut", table.history.record_if_due)
        if self._compacts:
            self._compact(table, name)
        if self._collects(table_id, all_is_due=all_is_due):
            self._collected_at[table_id] = time.monotonic()
            self._try(f"{name}: retention", table.history.apply_retention)
            if collected := self._try(f"{name}: collection", table.collect_garbage):
                self.done.files_deleted += collected.deleted
                self._note(f"{name}: collection", [f"{file}: {why}" for file, why in collected.failed])

    def _compact(self, table: Maintained, name: str) -> None:
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

    def _merge(self, table: Maintained) -> Any:
        wanted = table.properties.merge_threshold_rows is not None
        return table.merge(rest_seconds=REST_SECONDS) if wanted else None

    def _try(self, what: str, work: Callable[[], Any]) -> Any:
        """Returns the result of `work`.

        If `work` fails, records the failure under the name `what` and returns None.

        Checks first that this process is still the only one that maintains the instance.
        """
        try:
            self._check_alone()
            return work()
        except (InstanceReadOnly, MaintenanceTakenOver):
            raise
        except TableNotFound:  # dropped meanwhile
            return None
        except Exception as error:
            logger.info("%s failed", what, exc_info=True)
            self._note(what, [one_line(error)])
            return None

    def _check_alone(self) -> None:
        if self._alone is not None:
            self._alone.check()

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


# Metrics of maintenance, as a file for the textfile collector of Prometheus.

_OF_A_TABLE = {
    "files": "Files that partitions refer to.",
    "references": "References of files in partitions.",
    "unreferenced_files": "Files that wait for collection.",
    "inlined_files": "Files in PostgreSQL, until they are compacted and no history needs them.",
    "inlined_bytes": "Bytes of files in PostgreSQL.",
    "compaction_jobs": "Compaction jobs that are not done.",
    "jobs_given_up": "Compaction jobs that were given up.",
}
_OF_PAYLOADS = {
    "backlog_days": "Past days of payloads that are not offloaded.",
    "backlog_rows": "Payloads that wait to be offloaded, about.",
    "backlog_bytes": "Bytes in PostgreSQL that wait to be offloaded.",
    "failing_days": "Days of payloads whose last work failed.",
    "postgres_bytes": "Bytes of payloads in PostgreSQL.",
    "object_bytes": "Bytes of objects of payloads.",
    "orphaned_bytes": "Bytes of objects of payloads that wait for their deletion.",
    "mismatches": "Payloads that this process read and that differed from what was written.",
}


class Number(NamedTuple):
    """A metric of an instance. Its name is without the prefix that all metrics have."""

    name: str
    what: str
    value: float
    labels: Mapping[str, str] = MappingProxyType({})


def payload_numbers(payloads: PayloadStore) -> Iterator[Number]:
    """Yields the metrics of an instance's payloads."""
    from dormouse.payloads.days import STATES

    now = payloads.status()
    for name, what in _OF_PAYLOADS.items():
        yield Number(f"payload_{name}", what, getattr(now, name))
    days = (now.open_days, now.offloaded_days, now.folding_days, now.folded_days)
    for state, count in zip(STATES, days, strict=True):
        yield Number("payload_days", "Days of payloads, by state.", count, {"state": state})


def write_metrics(
    path: Path,
    tables: Iterable[Any],
    rounds: Iterable[InstanceRound],
    done: Maintenance,
    others: Iterable[Number] = (),
) -> None:
    """Writes the metrics to a file, which is replaced atomically. `tables` are the statuses of the tables.

    Raises `DependencyMissing` and `OSError`.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
    except ImportError:
        raise not_installed("prometheus-client", "service") from None
    registry = CollectorRegistry()

    def gauge(name: str, what: str, *labels: str) -> Any:
        return Gauge(f"dormouse_{name}", what, labels, registry=registry)

    gauge("maintenance_cycles", "Cycles since the process began.").set(done.cycles)
    gauge("maintenance_failures", "Failures since the process began.").set(done.failed)
    numbers = {name: gauge(f"table_{name}", what, "table") for name, what in _OF_A_TABLE.items()}
    failing = gauge("round_failing", "1 if the last round failed, else 0.", "table", "kind")
    well = gauge("round_well_timestamp_seconds", "When a round of the instance last succeeded.", "kind")
    behind = {
        unit: gauge(
            f"consumer_{unit}_behind", f"How far a consumer is behind, in {unit}.", "table", "consumer"
        )
        for unit in ("rows", "seconds")
    }
    expired = gauge("consumer_expired", "1 if a consumer has expired, else 0.", "table", "consumer")
    for table in tables:
        for consumer in table.consumers:
            expired.labels(table.name, consumer.name).set(consumer.is_expired)
            for unit, lag in behind.items():
                if not consumer.is_expired:
                    lag.labels(table.name, consumer.name).set(getattr(consumer, f"{unit}_behind"))
        for name, number in numbers.items():
            number.labels(table.name).set(getattr(table, name))
        for last in table.rounds:
            failing.labels(table.name, last.kind).set(last.error is not None)
    for each in rounds:
        failing.labels("", each.kind).set(each.error is not None)
        if each.well_at is not None:
            well.labels(each.kind).set(each.well_at.timestamp())
    gauges: dict[str, Any] = {}
    for name, what, value, labels in others:
        if name not in gauges:
            gauges[name] = gauge(name, what, *labels)
        (gauges[name].labels(*labels.values()) if labels else gauges[name]).set(value)
    write_to_textfile(str(path), registry)
