"""The migration of a deployment's database: its schema, its roles and their rights.

The migration also makes the database the owner of the object store, if it replaces another database, for
example after a restore.
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
    """The applied migrations, and the number of database objects that the schema's role took over.

    `began_xid` is the id of the migration's first transaction. If the database is a copy, all earlier
    transactions are those of the original.
    """

    applied: tuple[Migration, ...]
    adopted: int
    began_xid: int

    def __str__(self) -> str:
        names = ", ".join(map(str, self.applied)) or "none"
        return f"applied migrations: {names}; objects given to {roles.SCHEMA_ROLE}: {self.adopted}"


OLD_DELETIONS_SECONDS = 30.0
"""The time to wait for lambdas that are just ending, because they may still delete objects."""

Connecting = Callable[..., ConnectionSupplier]
"""A function that returns connections to a DSN, such as `ConnectionSupplier`. It also takes `search_path`."""


def bring_up_to_date(
    dsn: str, connecting: Connecting = ConnectionSupplier, folder: Path = MIGRATIONS
) -> MigrationReport:
    """Migrates the database and creates its roles. Calls can be repeated, and can be concurrent.

    The role of `dsn` must own the database and be allowed to create roles. Raises `InstanceTooNew`, without
    any change, if the database is newer than this Dormouse. Raises `NotAnInstance` if the database is none of
    Dormouse's, and `InstanceError` if the migration fails or the role lacks a right.
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
    """Creates missing databases for the indexes of row tables, and grants rights in them.

    Returns what was done. The role that runs Dormouse creates and owns indexes, and the reader's role reads
    them. The role of `dsn` must be allowed to create databases and roles. The call can be repeated.
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

    A new database and an empty store are bound to each other. A copy, and a database that `replaces` another,
    adopts the store. Then this returns the number of the new incarnation, otherwise None. The call can be
    repeated.

    `began_xid` comes from the `MigrationReport`, because the migration's transactions are not those of the
    original. Raises `NotAnInstance` for a store of another instance, and `ObjectStoreIsNotOurs` for a store
    that lacks the database's files.
    """
    with closing(connecting(roles.acting_as_schema(dsn))) as supplier:
        instance_id = Catalog(supplier, WriteAttempts(supplier, objects)).instance_id()
        ownership = Ownership(supplier, objects)
        refusal = ownership.open(instance_id)
        if not replaces and refusal is None:
            return None
        # AWS has ended the work of the paused instance, and with it unfinished deletions
        return ownership.adopt(
            instance_id,
            wait_seconds=OLD_DELETIONS_SECONDS,
            force=True,
            # without a refusal this database is the owner itself, at another address
            began_xid=None if refusal is None else began_xid,
        )
