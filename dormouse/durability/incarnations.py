"""Incarnations as the database has them, with the milestones that it has passed under each."""

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

# Which process this is, so that another may find out whether it still lives.

_STARTED = 19  # in /proc/<pid>/stat, counted from the state, which follows the name in parentheses


@dataclass(frozen=True, slots=True)
class Process:
    """A process of some host; what is empty is not known."""

    host: str = ""
    boot: str = ""
    namespace: str = ""
    pid: int = 0
    started: str = ""

    def is_gone(self) -> bool:
        """Whether it has surely ended: it was of this host, boot and namespace, and is not there any more."""
        # machines that go on from one snapshot have one boot
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
    """The one that asks."""
    return process_here(os.getpid())


def process_here(pid: int) -> Process:
    """Returns the process that has an id in this namespace now."""
    return Process(socket.gethostname(), boot(), namespace(), pid, _state_of(pid)[1])


def boot() -> str:
    """The id of the host's boot; empty where it is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def namespace() -> str:
    """The namespace in which process ids mean what they mean here; empty where it is not told."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _state_of(pid: int) -> tuple[str, str]:
    """Its state, and when it started, in ticks since the boot; empty where it is not told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], fields[_STARTED]
    except (OSError, IndexError):
        return "", ""


# What an object store says of its owner: incarnations, how far the last has come, deletions under way.

FOLDER = "owner"
NOW = f"{FOLDER}/now"

_INCARNATION = re.compile(rf"{FOLDER}/(\d{{1,18}})\.json")
_MILESTONE = re.compile(rf"{NOW}/milestone-(\d{{1,18}})-(\d{{1,18}})\.json")
_DELETION = re.compile(rf"{NOW}/deletion-(\d{{1,18}})-[0-9a-f]+\.json")


@dataclass(frozen=True, slots=True)
class Records:
    """What one listing of the store gives; numbers are 0 for what there is none of."""

    last: int = 0
    """The last incarnation."""

    milestones: tuple[tuple[int, int], ...] = ()
    """The incarnation and the number of each."""

    deletions: tuple[tuple[int, str], ...] = ()
    """Of those announced, the incarnation and the object's name."""

    @property
    def milestone(self) -> int:
        """The last one of the last incarnation."""
        return max((milestone for number, milestone in self.milestones if number == self.last), default=0)


def records(objects: ObjectStore) -> Records:
    """The store's records, of now."""
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
    """A name that no other deletion has."""
    return f"{NOW}/deletion-{number}-{secrets.token_hex(8)}.json"


def read_record(objects: ObjectStore, name: str, key: str) -> tuple[str, str]:
    """The id under `key`, and when it was made, and where. Raises `ObjectNotFound`, `NotAnInstance`."""
    try:
        said = json.loads(objects.get(name))
        return str(said[key]), str(said["made"])
    except (ValueError, KeyError, TypeError):
        raise NotAnInstance(f"{objects.url}/{name} is not Dormouse's") from None


def written_now() -> str:
    """When a record is made, and where."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by {socket.gethostname()}"


KEPT = 100
"""Incarnations of before that both halves remember."""

Reason = Literal["made", "start", "adoption"]
_ENDPOINT = re.compile(r"([^.]+)\.cluster-(?:ro-)?[^.-]+\.[^.]+\.rds\.amazonaws\.com(?:\.cn)?")
_QUERIES = load(__file__, "incarnations")


@dataclass(frozen=True, slots=True)
class Incarnation:
    """As the database has it; `here`: made in this very database.

    `seconds`: how old the last milestone is; `moved`: something may have been committed since.
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
        """Whether it is an adoption that waits for deletions of the owner of before."""
        return self.reason == "adoption" and not self.confirmed


def known(supplier: Supplier) -> list[Incarnation]:
    """The last ones, the latest first."""
    return run_lookup(supplier, _latest(KEPT), operation="look at incarnations")


def last_adopted(supplier: Supplier) -> int:
    """The number of the incarnation that the last adoption began; 0: there was none."""
    return int(run_lookup(supplier, rows_of(_QUERIES["adopted"]), operation="look at incarnations")[0][0])


def on_disk(conn: psycopg.Connection[Any]) -> None:
    """The transaction waits for the disk, whatever the role asks, as the store will know of it."""
    conn.execute(_QUERIES["on_disk"].on())


def intend(
    conn: psycopg.Connection[Any], number: int, reason: Reason, began_xid: int | None = None
) -> Incarnation:
    """In a transaction: one that the store does not have yet. Raises `UniqueViolation`."""
    on_disk(conn)
    values = {"number": number, "reason": reason, "cluster": cluster_of(conn.info.host)}
    conn.execute(_QUERIES["intend"].on(), {**values, "began_xid": began_xid})
    return _latest(1)(conn)[0]


def settle(conn: psycopg.Connection[Any], number: int, *, ours: bool) -> None:
    """In a transaction: the store has one that was intended, or gave its number to another."""
    conn.execute(_QUERIES["confirm" if ours else "withdraw"].on(), {"number": number, "kept": KEPT})


def cluster_of(host: str) -> str | None:
    """The name of the Aurora cluster whose endpoint for writers or readers this is; None for other hosts."""
    match = _ENDPOINT.fullmatch(host)
    return None if match is None else match[1]


def _latest(limit: int) -> Callable[[psycopg.Connection[Any]], list[Incarnation]]:
    def work(conn: psycopg.Connection[Any]) -> list[Incarnation]:
        values = {"limit": limit, "cluster": cluster_of(conn.info.host)}
        return [Incarnation(*row) for row in conn.execute(_QUERIES["incarnations"].on(), values).fetchall()]

    return work
