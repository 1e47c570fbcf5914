"""A check of tables each day: of all where they are few, else of a share, each of them once a week."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime

from dormouse.catalog import Catalog
from dormouse.durability.checking import Checker
from dormouse.durability.incarnations import last_adopted
from dormouse.durability.unknown import Known
from dormouse.errors import CheckFailed
from dormouse.objects import ObjectStore
from dormouse.postgres.connection import Supplier

KIND = "check"
SHARES = 7
SECONDS_MIN = 60.0
"""With less time left no other table is begun."""


def check_share(
    supplier: Supplier,
    catalog: Catalog,
    objects: ObjectStore,
    known: Known,
    seconds_left: Callable[[], float] = lambda: math.inf,
) -> None:
    """Checks the tables of today, without reading them; `CheckFailed` with what is not as it was written."""
    today, tables = datetime.now(UTC).toordinal() % SHARES, catalog.tables()
    if len(tables) > SHARES:
        tables = [one for one in tables if int(one.uuid, 16) % SHARES == today]
    checker = Checker(
        supplier,
        objects,
        known,
        adopted=last_adopted(supplier),
        go_on=lambda: seconds_left() > SECONDS_MIN,
    )
    report = checker.run(tables, rest=today == 0)
    if report.problems:
        raise CheckFailed(report.problems)
