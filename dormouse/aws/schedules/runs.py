"""Runs: work for Spark on EMR, listed in an object that Spark's driver reads.

The list is `runs/<run id>.json`: {version, run_id, kind, created_at, tables: [{table, table_id, jobs,
given_up}]}. The list of a compaction has the run's jobs for each table, and the number of the table's jobs
that had been given up by then. The list of a split has the tables to examine. A list is written once. The
report of the run deletes it, or a later run deletes it after a week.

Spark's driver, or the report, adds the empty object `runs/<run id>.begun`. A run without it still waits for
machines. Meanwhile the schedule makes no other run of its kind.
"""

from __future__ import annotations

import json
import logging
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal, get_args

from dormouse.errors import InstanceError, InvalidInput, ObjectAlreadyExists, ObjectNotFound, TableNotFound
from dormouse.model.table import TableRecord
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.state.catalog import Catalog
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.compaction_jobs import CompactionJobs, open_jobs, tables_of_run
from dormouse.state.files.round_reports import LastRounds, jobs_given_up
from dormouse.state.files.store import FileReferenceStore
from dormouse.state.history.due import due_kinds

logger = logging.getLogger(__name__)

FOLDER = "runs"
VERSION = 1
LIST_DAYS_MAX = 7
HEAD_BYTES = 400
_NAMESPACE = uuid.UUID("6f2d3c0e-5a3d-4a58-9d0f-7f2c5f0e3b11")
_HEAD = re.compile(rb'"kind": "([^"]+)", "created_at": "([^"]+)"')
_LIST, _BEGUN = ".json", ".begun"

Kind = Literal["compaction", "split"]
KINDS = get_args(Kind)
State = Literal["SUCCEEDED", "FAILED", "CANCELLED"]


@dataclass(frozen=True, slots=True)
class RunTable:
    """The work of a run for one table: the ids of its compaction jobs, or none in a split.

    `given_up` is the number of the table's jobs that had been given up when the list was made, or None.
    """

    table: str
    table_id: int
    jobs: tuple[str, ...] = ()
    given_up: int | None = None


@dataclass(frozen=True, slots=True)
class RunList:
    """The list of the work of a run."""

    run_id: str
    kind: Kind
    tables: tuple[RunTable, ...] = ()
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def jobs(self) -> int:
        """The number of jobs; in a split, each table counts as one."""
        return sum(len(one.jobs) for one in self.tables) if self.kind == "compaction" else len(self.tables)

    def summary(self, objects: ObjectStore) -> dict[str, Any]:
        """Returns the value that the state machine passes on: {"run_id", "kind", "list", "jobs", "tables"}.

        "list" is the URL of the list, and "jobs" and "tables" are numbers.
        """
        return {
            "run_id": self.run_id,
            "kind": self.kind,
            "list": objects.uri(list_name(self.run_id)),
            "jobs": self.jobs,
            "tables": len(self.tables),
        }


@dataclass(frozen=True, slots=True)
class RunReport:
    """The result of a run.

    `jobs` counts all jobs of the run. `released` counts its unfinished jobs, which later runs can take, and
    `files_released` their files. `given_up` counts the jobs of its tables that were given up since the list
    was made.
    """

    run_id: str
    state: str
    reason: str | None
    jobs: int
    finished: int
    released: int
    files_released: int
    given_up: int


def run_id_for(name: str) -> str:
    """Returns the run id for a name, such as the ARN of an execution. The same name has the same id."""
    return str(uuid.uuid5(_NAMESPACE, name))


def list_name(run_id: str) -> str:
    """Returns the object name of a run's list. Raises `InvalidInput` if the id is not a UUID."""
    try:
        return f"{FOLDER}/{uuid.UUID(run_id)}{_LIST}"
    except (ValueError, AttributeError, TypeError):
        raise InvalidInput(f"run id {run_id!r} is not a UUID") from None


def note_begun(objects: ObjectStore, run_id: str) -> None:
    """Notes that Spark has begun a run, or that the run has ended."""
    with suppress(ObjectAlreadyExists):
        objects.put(_begun_name(list_name(run_id)), b"")


def waiting(
    objects: ObjectStore, kind: Kind, waits_max: timedelta, *, besides: str | None = None
) -> str | None:
    """Returns the id of a run of this kind that has not begun, or None.

    Leaves the run `besides` out. A run that was created longer ago than `waits_max` counts as lost.
    """
    names, since = {name for name, _ in objects.list(FOLDER)}, datetime.now(UTC) - waits_max
    for name in sorted(one for one in names if one.endswith(_LIST) and _begun_name(one) not in names):
        run_id, head = name.removeprefix(f"{FOLDER}/").removesuffix(_LIST), _head(objects, name)
        if head and head[0] == kind and head[1] >= since and run_id != besides:
            return run_id
    return None


def create(
    supplier: Supplier,
    objects: ObjectStore,
    run_id: str,
    *,
    jobs_max: int,
    run_seconds: float,
    seconds_max: float = float("inf"),
) -> RunList:
    """Creates compaction jobs for all tables, assigns up to `jobs_max` to the run, and writes their list.

    The run owns the jobs for `run_seconds`. After `seconds_max`, no more jobs are created. Each run has its
    own order of tables, so that no table is always last. If there are too many jobs, each table gets a fair
    share. Returns the same list for the same run id. Without jobs, it writes no list.
    """
    with suppress(ObjectNotFound):
        return read_list(objects, list_name(run_id))
    remove_old_lists(objects)
    tables = {one.table_id: one for one in Catalog(supplier, WriteAttempts(supplier, objects)).tables()}
    _make_jobs(supplier, run_id, tables, jobs_max, time.monotonic() + seconds_max)
    handed = _hand_over(supplier, run_id, tables, jobs_max, run_seconds)
    made = RunList(run_id, "compaction", tuple(handed))
    return write_list(objects, made) if handed else made


def write_list(objects: ObjectStore, run: RunList) -> RunList:
    """Writes a run's list. Returns the existing list if the run has one already."""
    name = list_name(run.run_id)
    try:
        objects.put(name, encode(run))
    except ObjectAlreadyExists:
        return read_list(objects, name)
    return run


def read_list(objects: ObjectStore, name: str) -> RunList:
    """Returns the list of this name. Raises `ObjectNotFound`, or `InvalidInput` for an unknown format."""
    return decode(objects.get(name), name)


def report(
    supplier: Supplier, objects: ObjectStore, run_id: str, state: str, reason: str | None = None
) -> RunReport:
    """Releases the unfinished jobs of an ended run, and deletes its list. The call can be repeated."""
    name, jobs, given_up, listed = list_name(run_id), 0, 0, None
    with suppress(ObjectNotFound):
        listed = read_list(objects, name)
        jobs, given_up = listed.jobs, _given_up_since(supplier, listed)
    tables = {one.table_id: one for one in Catalog(supplier, WriteAttempts(supplier, objects)).tables()}
    released = files = 0
    for table_id in tables_of_run(supplier, run_id):
        with suppress(TableNotFound, KeyError):
            done = _jobs_of(supplier, tables[table_id]).release_run(run_id)
            released, files = released + done.jobs, files + done.files
            if state == "FAILED" and done.jobs and listed:
                _tell_of_failure(LastRounds(supplier, tables[table_id]), listed, reason)
    remove_list(objects, run_id)
    finished = max(0, jobs - released)
    return RunReport(run_id, state, reason, jobs, finished, released, files, given_up)


def _tell_of_failure(rounds: LastRounds, run: RunList, reason: str | None) -> None:
    """Records the failure of a run that ended before it could record the result of any round."""
    known = (one.ended_at for one in rounds.read()[0] if one.kind == "compaction")
    if not any(ended_at and ended_at >= run.created_at for ended_at in known):
        with rounds.round("compaction") as current:
            current.errors.append(f"the run {run.run_id} failed: {reason or 'EMR shows the reason'}")


def _given_up_since(supplier: Supplier, listed: RunList) -> int:
    before = {one.table_id: one.given_up for one in listed.tables if one.given_up is not None}
    now = jobs_given_up(supplier, before)
    # the counts of a cleared table begin at 0 again
    return sum(max(0, now.get(table_id, 0) - count) for table_id, count in before.items())


def remove_list(objects: ObjectStore, run_id: str) -> None:
    """Deletes the list of an ended run. A run of splits owns no jobs, so its report does nothing else."""
    name = list_name(run_id)
    for failed, error in objects.delete([name, _begun_name(name)]):
        logger.warning("%s stays for a week: %s", failed, error)


def remove_old_lists(objects: ObjectStore, days_max: float = LIST_DAYS_MAX) -> int:
    """Deletes the lists of runs that were never reported. Returns the number of deleted lists."""
    oldest = datetime.now(UTC) - timedelta(days=days_max)
    names = {name for name, _ in objects.list(FOLDER)}
    lists = {name for name in names if name.endswith(_LIST)}
    old = [name for name in sorted(lists) if (head := _head(objects, name)) and head[1] < oldest]
    kept = {_begun_name(name) for name in lists.difference(old)}
    objects.delete([name for name in names if name.endswith(_BEGUN) and name not in kept])
    return len(old) - len(objects.delete(old))


def encode(run: RunList) -> bytes:
    tables = [
        {"table": one.table, "table_id": one.table_id, "jobs": list(one.jobs), "given_up": one.given_up}
        for one in run.tables
    ]
    # kind and time stand early in the list: searches read only the beginning
    head = {"version": VERSION, "run_id": run.run_id, "kind": run.kind}
    return json.dumps({**head, "created_at": run.created_at.isoformat(), "tables": tables}).encode()


def decode(data: bytes, name: str) -> RunList:
    try:
        found = json.loads(data)
        if found["version"] > VERSION:
            raise InvalidInput(f"{name} was written by a newer Dormouse: deploy the newer archive too")
        if found["kind"] not in ("compaction", "split"):
            raise InvalidInput(f"{name} is a list of {found['kind']!r}, which is not known here")
        tables = (
            RunTable(
                str(one["table"]), int(one["table_id"]), tuple(map(str, one["jobs"])), one.get("given_up")
            )
            for one in found["tables"]
        )
        created_at = datetime.fromisoformat(found["created_at"])
        return RunList(str(uuid.UUID(found["run_id"])), found["kind"], tuple(tables), created_at)
    except InvalidInput:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise InvalidInput(f"{name} is not the list of a run") from None


def _begun_name(list_name: str) -> str:
    return f"{list_name.removesuffix(_LIST)}{_BEGUN}"


def _head(objects: ObjectStore, name: str) -> tuple[str, datetime] | None:
    """Returns the kind of a list and the time of its creation, or None if it is no list."""
    with suppress(ObjectNotFound, ValueError), objects.reader(name) as file:
        found = _HEAD.search(file.read(HEAD_BYTES))
        return (found[1].decode(), datetime.fromisoformat(found[2].decode())) if found else None
    return None


def _make_jobs(
    supplier: Supplier, run_id: str, tables: dict[int, TableRecord], jobs_max: int, until: float
) -> None:
    """Creates jobs for tables that have fewer than `jobs_max` open jobs, until the time `until`."""
    waiting = open_jobs(supplier, run_id)
    order = sorted(tables.values(), key=lambda one: one.table_id)
    random.Random(run_id).shuffle(order)  # noqa: S311 no secret
    for number, (table, kinds) in enumerate(zip(order, due_kinds(supplier, order), strict=True)):
        if time.monotonic() >= until:
            logger.warning("no time to make jobs for %d of %d tables", len(order) - number, len(order))
            return
        room = jobs_max - waiting.get(table.table_id, 0)
        if room > 0 and "compaction" in kinds:
            _for_table(table, partial(_make_jobs_of, supplier, table, room))


def _make_jobs_of(supplier: Supplier, table: TableRecord, jobs_max: int) -> None:
    """Creates jobs for one table.

    Records a finished round of compaction if the table then has no open job.
    """
    jobs = _jobs_of(supplier, table)
    with LastRounds(supplier, table).round("compaction") as current:
        made = jobs.create(jobs_max)
        jobs.create_of_deleted(max(0, jobs_max - made))
        current.goes_on = jobs.count()[0] > 0


def _hand_over(
    supplier: Supplier, run_id: str, tables: dict[int, TableRecord], jobs_max: int, run_seconds: float
) -> Iterable[RunTable]:
    """Assigns waiting jobs to the run, beginning with the table that has the fewest.

    Returns the run's work by table. If a table needs less than its fair share of `jobs_max`, the other tables
    get the rest.
    """
    held = tables_of_run(supplier, run_id)
    waiting = open_jobs(supplier, run_id)
    given_up = jobs_given_up(supplier, waiting)
    order = sorted(waiting.keys() & tables.keys(), key=lambda one: (waiting[one], one))
    room = jobs_max - sum(held.values())
    handed = []
    for number, table_id in enumerate(order):
        table, share = tables[table_id], -(-max(0, room) // (len(order) - number))
        jobs = _for_table(table, partial(_jobs_of(supplier, table).hand_over, run_id, share, run_seconds))
        if jobs:
            room -= 0 if table_id in held else len(jobs)
            handed.append(RunTable(table.name, table_id, tuple(jobs), given_up.get(table_id, 0)))
    return handed


def _for_table(table: TableRecord, work: Callable[[], Any]) -> Any:
    """Calls `work` for one table. A failure is logged, and does not stop the work for other tables."""
    try:
        return work()
    except TableNotFound:
        logger.info("table %s was dropped meanwhile", table.name)
    except InstanceError:
        raise
    except Exception:
        logger.exception("no compaction jobs of table %s in this run", table.name)
    return None


def _jobs_of(supplier: Supplier, table: TableRecord) -> CompactionJobs:
    return CompactionJobs(supplier, table, FileReferenceStore(supplier, table))
