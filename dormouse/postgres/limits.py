"""How long PostgreSQL lets a transaction go on, by kind of work: the one table of these limits.

PostgreSQL itself keeps them, so that a process that is frozen or cut off holds up no other for longer. Each
session has those of SHORT, or of its supplier. A transaction that takes longer names its kind. A limit of
the role or the server is kept when it is lower. All are milliseconds; 0 is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Limits = Mapping[str, int]

_SECOND = 1_000
_MINUTE = 60 * _SECOND
_HOUR = 60 * _MINUTE

IDLE = "idle_in_transaction_session_timeout"
LOCK = "lock_timeout"
STATEMENT = "statement_timeout"
TRANSACTION = "transaction_timeout"
"""Bounds the whole transaction, also while a statement arrives in parts; PostgreSQL 17 and later have it."""

# fmt: off
SHORT = {IDLE: 15 * _SECOND, LOCK: 10 * _MINUTE, STATEMENT: 15 * _MINUTE, TRANSACTION: 30 * _MINUTE}
"""Commits, row changes, cuts, claims, leases: statements that find rows by keys, one after the other."""

COMMIT = {IDLE: 15 * _SECOND, LOCK: 3 * _SECOND, TRANSACTION: 5 * _MINUTE}
"""A committer's batch. One table that is busy must not stop the others, so a wait for a lock is brief."""

ALONE = {IDLE: 15 * _SECOND, LOCK: 10 * _MINUTE, STATEMENT: 6 * _HOUR, TRANSACTION: 12 * _HOUR}
"""Deletions, conversions, drops, changes of columns, migrations. One statement may rewrite a whole table."""

LONG = {IDLE: 60 * _SECOND, LOCK: 10 * _MINUTE, STATEMENT: 6 * _HOUR, TRANSACTION: 12 * _HOUR}
"""Splits, restores, scans, snapshots. The process computes with what it read, between statements."""

PAGED = {IDLE: 10 * _MINUTE, LOCK: 10 * _MINUTE, STATEMENT: 6 * _HOUR, TRANSACTION: 24 * _HOUR}
"""Reads page by page, whose reader does other work between pages. They lock no rows."""

KEPT = {IDLE: 60 * _SECOND, LOCK: 10 * _MINUTE, STATEMENT: 15 * _MINUTE, TRANSACTION: 0}
"""A lock for the length of a job, whose process says every `KEPT_PULSE_SECONDS` that it lives."""
# fmt: on

KEPT_PULSE_SECONDS = 10.0
MIGRATING_IDLE_MS_MAX = 15 * _MINUTE
"""How long a process that keeps others from migrating may be silent between statements."""

PEER_SECONDS_MAX = 60
"""How long either side of a connection waits for the other to acknowledge what it sent.

The server waits as long for a process that reads nothing of a large answer.
"""

PEER_OF_PAGES = "tcp_user_timeout"
"""While pages are copied out, their reader may pause for as long as between pages."""


def peer_parameters() -> dict[str, int]:
    """Returns the libpq parameters by which a client notices a peer that vanished."""
    return {
        "tcp_user_timeout": PEER_SECONDS_MAX * _SECOND,
        "keepalives_idle": PEER_SECONDS_MAX // 2,
        "keepalives_interval": 10,
        "keepalives_count": 3,
    }


def peer_settings() -> dict[str, str]:
    """Returns the settings of a session by which the server notices a client that vanished.

    Over a Unix socket only the last has an effect.
    """
    return {
        "tcp_user_timeout": str(PEER_SECONDS_MAX * _SECOND),
        "tcp_keepalives_idle": str(PEER_SECONDS_MAX // 2),
        "tcp_keepalives_interval": "10",
        "tcp_keepalives_count": "3",
        "client_connection_check_interval": str(10 * _SECOND),
    }


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The limits of one session."""

    usual: Limits = field(default_factory=dict)
    """The limits of a transaction that names no kind of work."""
    highest: Limits = field(default_factory=dict)
    """The limits that no kind of work exceeds: of the role, the server or the supplier; 0 is no limit.

    It has every limit that the server knows, and no other.
    """
    in_force: Limits = field(default_factory=dict)
    """The limits that the session has outside of a transaction."""
    given: frozenset[str] = frozenset()
    """The limits that the supplier was given, whose errors the caller handles."""

    def local(self, kind: Limits | None = None, *, lock_ms: int | None = None) -> str:
        """Returns what follows BEGIN to have the limits of a kind; nothing where the session has them."""
        wanted = self.usual if kind is None else {**self.usual, **kind}
        if lock_ms is not None:
            wanted = {**wanted, LOCK: lock_ms}
        return "".join(f"; set local {name} = {limit}" for name, limit in self._differing(wanted))

    def _differing(self, wanted: Limits) -> Iterator[tuple[str, int]]:
        for name, highest in self.highest.items():
            limit = lower(wanted.get(name, 0), highest)
            if limit != self.in_force[name]:
                yield name, limit


def lower(one: int, other: int) -> int:
    """Returns the lower of two limits, of which 0 is none."""
    return min(one, other) or max(one, other)
