"""The lease of a folder's PostgreSQL: a lock that each of the server's processes holds as long as it lives.

It counts across PID namespaces, containers and hosts, where a process cannot be seen. The file says where the
server runs.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from dormouse.durability.processes import Process, boot, namespace, process_here
from dormouse.embedded.locks import close_lock, open_lock, try_lock
from dormouse.embedded.orphans import described, end_orphans, holders
from dormouse.errors import InstanceLocked

NAME = "postgres.running"
POLL_SECONDS = 0.02
ORPHAN_SECONDS = 1.0
"""How long backends may take to notice that their postmaster died; and how often orphans are looked for."""
ANSWER_SECONDS_MAX = 1
CONTENT_BYTES_MAX = 4096
_SOCKETS = ".s.PGSQL.*[0-9]"


class HeldElsewhere(InstanceLocked):
    """The server runs in another namespace or host, and may be leaving."""


@dataclass(frozen=True)
class Holder:
    """Where the server runs; empty: not known."""

    host: str = ""
    boot: str = ""
    namespace: str = ""
    pid: int = 0
    since: str = ""
    started: str = ""
    """When the server started, in ticks since the boot: a later process with the same id has another time."""

    def is_gone(self) -> bool:
        return Process(self.host, self.boot, self.namespace, self.pid, self.started).is_gone()


def take(data: Path, deadline: float, in_sight: Callable[[], bool]) -> int | None:
    """Wins the lease: a locked descriptor, for the server to inherit; None once a server is in sight.

    Waits for processes of a server that ends, and kills those that never will. Raises `HeldElsewhere` when
    the server runs where it cannot be seen, `InstanceLocked` when a process keeps the lease too long.
    """
    folder = data.parent
    lease = open_lock(folder / NAME)
    won = False
    looks_again = time.monotonic() + ORPHAN_SECONDS
    try:
        while not (won := try_lock(lease)):
            holder = _read(lease)
            elsewhere = _is_elsewhere(holder)
            if not elsewhere and in_sight():
                return None
            if elsewhere:
                raise HeldElsewhere(str(_locked(folder, holder)))
            if time.monotonic() > looks_again:
                end_orphans(data, lease)
                looks_again = time.monotonic() + ORPHAN_SECONDS
            if time.monotonic() > deadline:
                raise _kept(data, lease, holder)
            time.sleep(POLL_SECONDS)
        os.ftruncate(lease, 0)  # until it is signed, the holder is not known
        return lease
    finally:
        if not won:
            close_lock(lease)


def is_held_elsewhere(folder: Path) -> bool:
    """Whether what its postmaster.pid says is of no meaning here: process ids are of another namespace."""
    lease = open_lock(folder / NAME)
    try:
        return not try_lock(lease) and _is_elsewhere(_read(lease))
    finally:
        close_lock(lease)


def is_held_by(folder: Path, pid: int) -> bool:
    """Whether the server that holds it is the one with this process id here."""
    lease = open_lock(folder / NAME)
    try:
        holder = _read(lease)
        signed = (holder.boot, holder.namespace, holder.pid) == (boot(), namespace(), pid)
        return signed and not holder.is_gone() and not try_lock(lease)
    finally:
        close_lock(lease)


def sign(lease: int, pid: int) -> None:
    """Says who holds it: the server with this process id."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    server = process_here(pid)
    holder = Holder(server.host, server.boot, server.namespace, pid, since, server.started)
    os.pwrite(lease, json.dumps(asdict(holder)).encode(), 0)


def check_silent(data: Path, sockets: Path) -> None:
    """A server of an older Dormouse has no lease: one that answers, but cannot be seen, is left alone, too.

    Raises `InstanceLocked`.
    """
    for listening in {*data.glob(_SOCKETS), *sockets.glob(_SOCKETS)}:
        with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
            client.settimeout(ANSWER_SECONDS_MAX)
            client.connect(str(listening))
            raise _locked(data.parent, Holder())


def _read(lease: int) -> Holder:
    try:
        return Holder(**json.loads(os.pread(lease, CONTENT_BYTES_MAX, 0)))
    except (ValueError, TypeError):  # its starter was killed before it signed
        return Holder()


def _is_elsewhere(holder: Holder) -> bool:
    return (holder.boot, holder.namespace) not in {("", ""), (boot(), namespace())}


def _kept(data: Path, lease: int, holder: Holder) -> InstanceLocked:
    """Names the processes that keep the lease although no server of theirs is in sight."""
    folder = data.parent
    if seen := holders(data, lease):
        more = f" and {len(seen) - 1} more" if len(seen) > 1 else ""
        return InstanceLocked(
            f"{folder} is locked by {described(seen[0])}{more}, and cannot be joined: end what locks it"
        )
    if holder.pid and holder.is_gone():
        return InstanceLocked(
            f"{folder} is locked by a process that cannot be seen from here; its PostgreSQL, process "
            f"{holder.pid}, has ended: end the process where it can be seen"
        )
    return HeldElsewhere(str(_locked(folder, holder)))


def _locked(folder: Path, holder: Holder) -> InstanceLocked:
    where = "where it cannot be seen from here"
    if holder.host:
        where = (
            f"on host {holder.host}, as process {holder.pid} of namespace {holder.namespace or '?'} "
            f"(boot {holder.boot or '?'}), since {holder.since}"
        )
    return InstanceLocked(f"{folder} is open elsewhere: its PostgreSQL runs {where}; use it there, or end it")
