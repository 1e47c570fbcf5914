"""The database and the object store during one call of a lambda."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from dormouse.durability.ownership import Ownership
from dormouse.errors import InstanceError, InvalidInput
from dormouse.model.loops import tries
from dormouse.objects import ObjectStore
from dormouse.objects.store import GuardedStore
from dormouse.postgres import ConnectionSupplier
from dormouse.postgres.session import SESSION_SETTINGS
from dormouse.settings.lambdas import DatabaseEnvironment
from lambdas.services import Call

CONNECTIONS_MAX = 2
logger = logging.getLogger("dormouse.lambdas")


@contextmanager
def database(
    call: Call[Any], objects: ObjectStore, **limits_ms: int
) -> Iterator[tuple[ConnectionSupplier, ObjectStore]]:
    """Yields connections and the object store, and closes the connections at the end of the call.

    Closed connections let an idle database pause. Waits for a database that is waking up. The store refuses
    deletions if the database is not its owner. `limits_ms` is passed to `ConnectionSupplier.limited`. Raises
    `InstanceIsACopy` or `InstanceTakenOver` if another database owns the store.
    """
    environment: DatabaseEnvironment = call.environment
    name, seconds = f"dormouse-{call.name}", environment.connect_seconds_max
    with connections(environment.dsn, name, seconds, **limits_ms) as supplier:
        ownership = Ownership(supplier, objects)
        ownership.check()
        yield supplier, GuardedStore(objects, ownership.deleting)


@contextmanager
def connections(
    dsn: str, application_name: str, wait_seconds: float, **limits_ms: int
) -> Iterator[ConnectionSupplier]:
    """Yields connections, and closes them at the end.

    Raises `InstanceError` if the database does not answer within `wait_seconds`.
    """
    with closing(connected(dsn, application_name, wait_seconds, limits_ms=limits_ms)) as supplier:
        yield supplier


def connected(
    dsn: str,
    application_name: str,
    wait_seconds: float,
    *,
    final: tuple[type[InstanceError], ...] = (),
    limits_ms: Mapping[str, int] | None = None,
    search_path: str = SESSION_SETTINGS["search_path"],
) -> ConnectionSupplier:
    """Returns connections to a database that answers. The caller must close them.

    Tries for `wait_seconds`. Raises an error of a class in `final` at once, and other errors after the last
    attempt.
    """
    supplier = ConnectionSupplier(
        dsn,
        connections_max=CONNECTIONS_MAX,
        application_name=application_name,
        wait_seconds_max=wait_seconds,
        search_path=search_path,
    ).limited(**(limits_ms or {}))
    try:
        for this in tries(wait_seconds):
            try:
                with supplier.connection():
                    return supplier
            except InstanceError as error:
                if isinstance(error, (InvalidInput, *final)):
                    raise
                failure = error
                logger.info("attempt %d: %s", this.number, error)
        raise failure
    except BaseException:
        supplier.close()
        raise
