"""Checks of tables, in seven shares: of few tables all each day, else one share, so each table once a week.

Each share is a round of its own, so that what one misses is told until it is there again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

from dormouse.durability.checking import Checker
from dormouse.durability.incarnations import last_adopted
from dormouse.durability.maintaining import InstanceRounds
from dormouse.durability.orphans import Known
from dormouse.errors import CheckFailed, DormouseError
from dormouse.model.table import Problem, TableRecord
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.state.catalog import Catalog

KIND = "check"
"""What the rounds' kinds begin with; before there were shares, it was the one kind."""

REST = f"{KIND} rest"
SHARES = 7
SECONDS_MIN = 60.0
"""With less time left no other table is begun."""


def checks(
    supplier: Supplier,
    catalog: Catalog,
    objects: ObjectStore,
    known: Known,
    seconds_left: Callable[[], float] = lambda: math.inf,
) -> Mapping[str, Callable[[], None]]:
    """The checks of today, and those that failed when they were last done, by the kinds of their rounds.

    In any order, so that none takes always the time of the others.
    """
    rounds, tables = InstanceRounds(supplier), catalog.tables()
    shares: dict[str, list[TableRecord]] = {f"{KIND} {number}": [] for number in range(SHARES)}
    kinds = [*shares]
    for table in tables:
        shares[kinds[int(table.uuid, 16) % SHARES]].append(table)
    rounds.divide(KIND, [*kinds, REST])
    today = datetime.now(UTC).toordinal() % SHARES
    due = [one.kind for one in rounds.read() if one.error is not None and one.kind in {*kinds, REST}]
    due += [kind for kind in (kinds if len(tables) <= SHARES else [kinds[today]]) if shares[kind]]
    due += [REST] if today == 0 else []

    def check(kind: str) -> None:
        checker = Checker(supplier, objects, known, adopted=last_adopted(supplier))
        if kind == REST:
            _check_rest(checker, tables, seconds_left)
        else:
            _check_tables(checker, shares[kind], seconds_left)

    return {kind: partial(check, kind) for kind in random.sample(due, len(due))}


def _check_tables(checker: Checker, tables: Sequence[TableRecord], seconds_left: Callable[[], float]) -> None:
    """Without reading them. In any order, so that none is always the one for which no time is left."""
    done, problems = 0, tuple[Problem, ...]()
    for table in random.sample(tables, len(tables)):
        if seconds_left() <= SECONDS_MIN:
            break
        problems = checker.run([table]).problems
        done += 1
    if problems:
        raise CheckFailed(problems)
    if done < len(tables):
        raise DormouseError(f"only {done:,} of {len(tables):,} tables in the time")


def _check_rest(checker: Checker, tables: Sequence[TableRecord], seconds_left: Callable[[], float]) -> None:
    if seconds_left() <= SECONDS_MIN:
        raise DormouseError("no time was left for what is no table's")
    if problems := checker.rest(tables).problems:
        raise CheckFailed(problems)
