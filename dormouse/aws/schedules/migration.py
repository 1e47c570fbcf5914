"""Brings a deployment's database up to date: its schema, the roles that work on it, and what they may do.

And makes it the owner of the object store when it came in place of another, as after a restore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dormouse.durability.ownership import Ownership
from dormouse.objects.store import ObjectStore
from dormouse.postgres import ConnectionSupplier, migrate, roles
from dormouse.postgres.migrate import MIGRATIONS, Migration, lacking
from dormouse.postgres.session import GUARDED_PATH
from dormouse.state.catalog import Catalog
from dormouse.state.files.attempts import WriteAttempts


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """The migrations that were applied, and how many things the schema's role owns from now on.

    And the first transaction of those that it took: a copy has those before from the database that it is of.
    """

    applied: tuple[Migration, ...]
    adopted: int
    began_xid: int

    def __str__(self) -> str:
        names = ", ".join(map(str, self.applied)) or "none"
        return f"applied migrations: {names}; things given to {roles.SCHEMA_ROLE}: {self.adopted}"


OLD_DELETIONS_SECONDS = 30.0
"""For those of lambdas that end at this very moment."""

Connecting = Callable[..., ConnectionSupplier]
"""Opens connections to a DSN, as `ConnectionSupplier` does; it takes `search_path`, too."""


def bring_up_to_date(
    dsn: str, connecting: Connecting = ConnectionSupplier, folder: Path = MIGRATIONS
) -> MigrationReport:
    """Migrates the database, and makes its roles; safe to run again, and twice at once.

    `dsn` is of a role that may make roles, and owns the database. Raises InstanceTooNew, and has changed
    nothing then, when the database is newer than this Dormouse; NotAnInstance and InstanceError as `migrate`
    does, also when the role may not do what must be done.
    """
    with (
        closing(connecting(dsn, search_path=GUARDED_PATH)) as supplier,
        roles.alone(supplier) as conn,
        roles.privileged(),
    ):
        began_xid = roles.next_xid(conn)
        lacking(supplier, folder)
        roles.make_roles(conn)
        roles.make_schema(conn)
        adopted = roles.adopt(conn)
        with closing(connecting(roles.acting_as_schema(dsn))) as owner:
            applied = migrate(owner, folder)
            roles.grant(owner)
    return MigrationReport(tuple(applied), adopted, began_xid)


def make_row_databases(dsn: str, names: Sequence[str], connecting: Connecting = ConnectionSupplier) -> str:
    """Makes the databases that are not there in which row tables are indexed, and says who may in them.

    Who runs makes indexes, who reads reads them; what is in them is theirs. `dsn` is of a role that may make
    databases and roles. Safe to run again. Gives what was done.
    """
    for name in names:
        with (
            closing(connecting(dsn, search_path=GUARDED_PATH)) as supplier,
            roles.privileged(),
            supplier.connection() as conn,
        ):
            roles.make_database(conn, name)
        with (
            closing(connecting(roles.in_database(dsn, name), search_path=GUARDED_PATH)) as supplier,
            roles.alone(supplier) as conn,
            roles.privileged(),
        ):
            roles.make_roles(conn)
            roles.let_make_tables(conn)
    return f"databases of row tables: {', '.join(names)}"


def own(
    dsn: str,
    objects: ObjectStore,
    *,
    replaces: bool,
    connecting: Connecting = ConnectionSupplier,
    began_xid: int | None = None,
) -> int | None:
    """Makes a database that a deployment has begun to use the owner of the object store.

    A new one and an empty store become each other's. A copy, and whatever `replaces` another database, adopts
    the store: the number of its incarnation is given. Safe to run again. Raises `NotAnInstance` for a store
    of another instance, and `ObjectStoreIsNotOurs` for one without the database's files. `began_xid`: as of a
    `MigrationReport`, as what brought a copy up to date is nothing that the other has.
    """
    with closing(connecting(roles.acting_as_schema(dsn))) as supplier:
        instance_id = Catalog(supplier, WriteAttempts(supplier, objects)).instance_id()
        ownership = Ownership(supplier, objects)
        refusal = ownership.open(instance_id)
        if not replaces and refusal is None:
            return None
        # AWS has ended by then what a paused instance ran, and with it deletions that nobody took back
        return ownership.adopt(
            instance_id,
            wait_seconds=OLD_DELETIONS_SECONDS,
            force=True,
            # the owner itself, at another address, has gone on meanwhile
            began_xid=None if refusal is None else began_xid,
        )
