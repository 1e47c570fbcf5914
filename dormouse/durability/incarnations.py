"""The records of incarnations and milestones in the database and in the object store."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psycopg

from dormouse.errors import NotAnInstance
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup

# The identity of a process, by which another process can find out if it still runs.

_STARTED = 19  # in /proc/<pid>/stat, counted from the state, which follows the name in parentheses


@dataclass(frozen=True, slots=True)
class Process:
    """A process of some host. Fields that are not known are empty."""

    host: str = ""
    boot: str = ""
    namespace: str = ""
    pid: int = 0
    started: str = ""

    def is_gone(self) -> bool:
        """Returns True only if the process has certainly ended.

        This is certain only for a process of this host, of the host's present boot, and of this namespace of
        ids.
        """
        # the boot id alone is not enough: machines that were cloned from one snapshot share it
        here = (socket.gethostname(), boot(), namespace())
        if not (self.boot and self.namespace) or (self.host, self.boot, self.namespace) != here:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        state, started = _state_of(self.pid)
        return state in {"Z", "X"} or bool(started and self.started and started != self.started)

    def __str__(self) -> str:
        where = f" on host {self.host}" if self.host else ""
        return f"process {self.pid or '?'}{where}"


def this_process() -> Process:
    """Returns the calling process."""
    return process_here(os.getpid())


def process_here(pid: int) -> Process:
    """Returns the process that now has the given id in this process's namespace of ids."""
    return Process(socket.gethostname(), boot(), namespace(), pid, _state_of(pid)[1])


def boot() -> str:
    """Returns the id of the host's present boot, or an empty text if the id is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def namespace() -> str:
    """Returns this process's namespace of process ids, or an empty text if the namespace is not known."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _state_of(pid: int) -> tuple[str, str]:
    """Returns the state of a process, and its start time in ticks since the boot.

    Unknown values are empty texts.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], fields[_STARTED]
    except (OSError, IndexError):
        return "", ""


# The records of an object store about its owner: incarnations, milestones, and announced deletions.

FOLDER = "owner"
NOW = f"{FOLDER}/now"

_INCARNATION = re.compile(rf"{FOLDER}/(\d{{1,18}})\.json")
_MILESTONE = re.compile(rf"{NOW}/milestone-(\d{{1,18}})-(\d{{1,18}})\.json")
_DELETION = re.compile(rf"{NOW}/deletion-(\d{{1,18}})-[0-9a-f]+\.json")


@dataclass(frozen=True, slots=True)
class Records:
    """The records of ownership in the store, as one listing of the store found them."""

    last: int = 0
    """The number of the last incarnation, or 0 if there is none."""

    milestones: tuple[tuple[int, int], ...] = ()
    """Pairs of the number of an incarnation and the number of a milestone in it."""

    deletions: tuple[tuple[int, str], ...] = ()
    """Pairs of the number of an incarnation and the name of an announcement of a deletion in it."""

    @property
    def milestone(self) -> int:
        """The number of the last milestone of the last incarnation, or 0 if there is none."""
        return max((milestone for number, milestone in self.milestones if number == self.last), default=0)


def records(objects: ObjectStore) -> Records:
    """Lists the store's records of ownership and returns them."""
    last = 0
    milestones: list[tuple[int, int]] = []
    deletions: list[tuple[int, str]] = []
    for name, _ in objects.list(FOLDER):
        if match := _INCARNATION.fullmatch(name):
            last = max(last, int(match[1]))
        elif match := _MILESTONE.fullmatch(name):
            milestones.append((int(match[1]), int(match[2])))
        elif match := _DELETION.fullmatch(name):
            deletions.append((int(match[1]), name))
    return Records(last, tuple(milestones), tuple(deletions))


def incarnation_name(number: int) -> str:
    return f"{FOLDER}/{number}.json"


def milestone_name(number: int, milestone: int) -> str:
    return f"{NOW}/milestone-{number}-{milestone}.json"


def new_deletion_name(number: int) -> str:
    """Returns a unique name for an announcement of a deletion. `number` is that of the incarnation."""
    return f"{NOW}/deletion-{number}-{secrets.token_hex(8)}.json"


def read_record(objects: ObjectStore, name: str, key: str) -> tuple[str, str]:
    """Returns the id that a record has under `key`, and a text with the time and host of the record.

    Raises `ObjectNotFound` and `NotAnInstance`.
    """
    try:
        fields = json.loads(objects.get(name))
        return str(fields[key]), str(fields["made"])
    except (ValueError, KeyError, TypeError):
        raise NotAnInstance(f"{objects.url}/{name} was not written by Dormouse") from None


def written_now() -> str:
    """Returns a text with the present time and the name of this host, for a new record."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by {socket.gethostname()}"


KEPT = 100
"""The number of earlier incarnations that the database and the store keep."""

Reason = Literal["made", "start", "adoption"]
_ENDPOINT = re.compile(r"([^.]+)\.cluster-(?:ro-)?[^.-]+\.[^.]+\.rds\.amazonaws\.com(?:\.cn)?")
_QUERIES = load(__file__, "incarnations")


@dataclass(frozen=True, slots=True)
class Incarnation:
    """An incarnation as the database has recorded it.

    - `confirmed`: True if the store also has this incarnation.
    - `here`: True if the incarnation was made in this database, and not in one of which this is a copy.
    - `seconds`: the age of its last milestone.
    - `moved`: True if something may have been committed since that milestone.
    """

    number: int
    uuid: str
    confirmed: bool
    reason: str
    here: bool
    milestone: int
    milestone_id: str | None
    seconds: float
    moved: bool

    @property
    def waits(self) -> bool:
        """True if it is an adoption that waits for deletions of the previous owner."""
        return self.reason == "adoption" and not self.confirmed


def known(supplier: Supplier) -> list[Incarnation]:
    """Returns the last incarnations that the database has, the latest first."""
    return run_lookup(supplier, _latest(KEPT), operation="read incarnations")


def last_adopted(supplier: Supplier) -> int:
    """Returns the number of the incarnation that the last adoption began, or 0 if there was no adoption."""
    return int(run_lookup(supplier, rows_of(_QUERIES["adopted"]), operation="read incarnations")[0][0])


def on_disk(conn: psycopg.Connection[Any]) -> None:
    """Makes the commit of the transaction wait for the disk, even if the role's settings would not.

    This is needed because the store will refer to the result of the transaction.
    """
    conn.execute(_QUERIES["on_disk"].on())


def intend(
    conn: psycopg.Connection[Any], number: int, reason: Reason, began_xid: int | None = None
) -> Incarnation:
    """Records an incarnation that the store does not have yet, and returns it.

    Must be called in a transaction.

    Raises psycopg's `UniqueViolation` if another process records an incarnation with the same number.
    """
    on_disk(conn)
    values = {"number": number, "reason": reason, "cluster": cluster_of(conn.info.host)}
    conn.execute(_QUERIES["intend"].on(), {**values, "began_xid": began_xid})
    return _latest(1)(conn)[0]


def settle(conn: psycopg.Connection[Any], number: int, *, ours: bool) -> None:
    """Confirms an intended incarnation if it is `ours`, and deletes it otherwise.

    Must be called in a transaction.

    The incarnation is not `ours` if another database has written its number to the store.
    """
    conn.execute(_QUERIES["confirm" if ours else "withdraw"].on(), {"number": number, "kept": KEPT})


def cluster_of(host: str) -> str | None:
    """Returns the name of the Aurora cluster to which an endpoint belongs, or None for other hosts."""
    match = _ENDPOINT.fullmatch(host)
    return None if match is None else match[1]


def _latest(limit: int) -> Callable[[psycopg.Connection[Any]], list[Incarnation]]:
    def work(conn: psycopg.Connection[Any]) -> list[Incarnation]:
        values = {"limit": limit, "cluster": cluster_of(conn.info.host)}
        return [Incarnation(*row) for row in conn.execute(_QUERIES["incarnations"].on(), values).fetchall()]

    return work
