"""Scheduled upkeep: daily partitions, old jobs, old payloads, and a list of tables for Spark to split.

A lambda does not split, because a split reads keys from the sketches of files. Upkeep only asks the database
which tables need work: leaves over their threshold, references above leaves, or small leaves to merge.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dormouse.aws.schedules.runs import RunList, RunTable, write_list
from dormouse.aws.schedules.work import Turn
from dormouse.errors import TableNotFound
from dormouse.jobs.claims import RETENTION_DAYS, expire
from dormouse.model.table import TableRecord
from dormouse.objects.store import ObjectStore
from dormouse.payloads.cooling import PayloadRound
from dormouse.payloads.copying import HOT_SECONDS, PayloadOptions
from dormouse.payloads.store import PayloadStore
from dormouse.postgres.connection import Supplier
from dormouse.state.catalog import Catalog
from dormouse.state.files import removal_log
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.round_reports import LastRounds
from dormouse.state.history.due import Kind, due_kinds
from dormouse.state.partitions import REST_SECONDS, PartitionStore, SmallPair, rows_to_merge

KIND = "maintenance"
PAYLOAD_MARGIN_SECONDS = 30.0
"""The time that the work on payloads leaves before the end of the round."""

_SEEN = "seen"
_KINDS: tuple[Kind, ...] = ("split", "merge")
"""The kinds of maintenance that need a list of tables."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Upkeep:
    """The result of upkeep, with the list for a run of splits, if any.

    `whole` is True if there was time for all tables and jobs. `seen` has the state of each table that needs a
    split or merge, and `payloads` the work on payloads.
    """

    run: RunList | None
    whole: bool
    seen: dict[str, str] = field(default_factory=dict)
    payloads: PayloadRound | None = None

    @property
    def memory(self) -> dict[str, dict[str, str]]:
        """The values that the next round needs."""
        return {_SEEN: self.seen}


def keep_up(
    supplier: Supplier,
    objects: ObjectStore,
    turn: Turn,
    run_id: str | None,
    *,
    seconds_left: Callable[[], float],
    payload_retention_days: int | None = None,
    payloads_hot_seconds: float = HOT_SECONDS,
    jobs_retention_days: int = RETENTION_DAYS,
) -> Upkeep:
    """Rolls the removal log, writes the list of tables to split, drops old jobs, and cools payloads.

    A table that was in an earlier list and has not changed since is left out for a day. Its leaves cannot be
    split: they have a single key, or fewer rows than their references say.
    """
    removal_log.roll(supplier)
    done = _look(supplier, objects, turn, run_id, seconds_left)
    whole = _expire_jobs(supplier, objects, seconds_left, jobs_retention_days) and done.whole
    options = PayloadOptions(hot_seconds=payloads_hot_seconds)
    payloads = _cool(supplier, objects, options, seconds_left, payload_retention_days)
    return replace(done, whole=whole, payloads=payloads)


def _expire_jobs(
    supplier: Supplier, objects: ObjectStore, seconds_left: Callable[[], float], retention_days: int
) -> bool:
    """Drops jobs that ended long ago, in half of the time left. Returns whether the time was enough.

    The database role must own the tables of jobs, because old days of jobs are dropped as whole partitions. A
    failure is logged and counts as done.
    """
    half = seconds_left() / 2
    try:
        expire(
            supplier,
            objects,
            PayloadStore(supplier, objects),
            retention_days,
            lambda: seconds_left() <= half,
        )
    except Exception:
        logger.exception("jobs that ended long ago are not dropped")
        return True  # an immediate retry may fail in the same way
    return seconds_left() > half


def _cool(
    supplier: Supplier,
    objects: ObjectStore,
    options: PayloadOptions,
    seconds_left: Callable[[], float],
    retention_days: int | None,
) -> PayloadRound | None:
    """Cools payloads in the time that is left. Returns None if there is no time.

    The list of the run is written before.
    """
    if (seconds := seconds_left() - PAYLOAD_MARGIN_SECONDS) <= 0:
        return None
    store = PayloadStore(supplier, objects, options=options)
    return store.maintain(seconds_max=seconds, retention_days=retention_days)


def _look(
    supplier: Supplier,
    objects: ObjectStore,
    turn: Turn,
    run_id: str | None,
    seconds_left: Callable[[], float],
) -> Upkeep:
    if run_id is None:
        return Upkeep(None, whole=True)
    known = _seen(turn)
    due: list[RunTable] = []
    seen: dict[str, str] = {}
    tables = Catalog(supplier, WriteAttempts(supplier, objects)).tables()
    for table, kinds in zip(tables, due_kinds(supplier, tables), strict=True):
        if seconds_left() <= 0:
            logger.warning("no time to ask all tables for what is to be split")
            return Upkeep(_listed(objects, run_id, due), whole=False, seen={**known, **seen})
        state = None if kinds.isdisjoint(_KINDS) else _state(supplier, table)
        if state is None:
            continue
        seen[str(table.table_id)] = state
        if known.get(str(table.table_id)) != state:
            due.append(RunTable(table.name, table.table_id))
    return Upkeep(_listed(objects, run_id, due), whole=True, seen=seen)


def _seen(turn: Turn) -> dict[str, str]:
    if turn.last is None or turn.why == "a day has passed":
        return {}
    return dict(turn.last.memory.get(_SEEN, {}))


def _listed(objects: ObjectStore, run_id: str, due: list[RunTable]) -> RunList | None:
    return write_list(objects, RunList(run_id, "split", tuple(due))) if due else None


def _small_pairs(partitions: PartitionStore, table: TableRecord) -> list[SmallPair]:
    """Returns pairs of small leaves that can be merged, if they have not changed for a while.

    The list is short, because each round merges some of the pairs.
    """
    if rows_to_merge(table.properties) is None or not partitions.look_for_small_pairs():
        return []
    return [pair for pair in partitions.small_pairs() if pair.rested_seconds >= REST_SECONDS]


def _state(supplier: Supplier, table: TableRecord) -> str | None:
    """Returns a digest that changes with a table's leaves to split or merge, or None if it has none."""
    partitions = PartitionStore(supplier, table)
    try:
        with LastRounds(supplier, table).round("split") as current:
            full = partitions.look_for_full_leaves()
            above = partitions.count_above_leaves()
            pairs = _small_pairs(partitions, table)
            current.goes_on = bool(full or above or pairs)
        if not full and not above and not pairs:
            return None
        digest = hashlib.sha256(f"{above}".encode())
        for leaf in partitions.full_leaves():
            digest.update(f" {leaf.partition_id} {leaf.row_count}".encode())
        for pair in pairs:
            digest.update(f" {pair.partition_id} {pair.row_count}".encode())
        return digest.hexdigest()[:16]
    except TableNotFound:
        return None
    except Exception:
        logger.exception("table %s is not looked at in this round", table.name, extra={"table": table.name})
        return None
