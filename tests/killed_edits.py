"""Edits in processes that are killed just before one of their exchanges with the database.

Each edit adds 1 to `v` of the rows with k < 4, in one table or in both.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import psycopg
import pyarrow as pa

import dormouse as dm
from tests import forks
from tests.support.api import Instance

KEYED, EVERY = "keyed", "every"
KEYS = (1, 2, 3)
ONES = {"k": [*KEYS], "v": [1, 1, 1]}
PROGRAM = "from tests.killed_edits import main; main()"
PLUS_ONE = {"v": dm.sql("v + 1")}
MATCHED = [dm.WhenMatched(update={"v": dm.sql("t.v + s.v")}), dm.WhenNotMatched(insert="*")]
Edit = Callable[[Instance, str, int], Any]
"""A function of the instance, the edit's id and the value that the rows have before it."""


def _rows(value: int) -> pa.Table:
    return pa.table({"k": [*KEYS], "v": [value] * 3, "s": ["edited"] * 3})


def _in_both(instance: Instance, edit_id: str, value: int) -> Any:
    with instance.transaction(edit_id) as transaction:
        transaction.update(KEYED, {"k": dm.Range(max=4)}, PLUS_ONE)
        transaction.merge_into(EVERY, ONES, ["k"], MATCHED)
        transaction.ingest(EVERY, {"k": [1_000 + value], "v": [value], "s": ["added"]})


EDITS: Mapping[str, tuple[Edit, tuple[str, ...]]] = {
    "an update of a keyed table": (
        lambda i, edit_id, _: i.table(KEYED).update(dm.sql("k < 4"), PLUS_ONE, edit_id=edit_id),
        (KEYED,),
    ),
    "an update": (
        lambda i, edit_id, _: i.table(EVERY).update({"k": dm.Range(max=4)}, PLUS_ONE, edit_id=edit_id),
        (EVERY,),
    ),
    "a merge into a keyed table": (
        lambda i, edit_id, _: i.table(KEYED).merge_into(ONES, ["k"], MATCHED, edit_id=edit_id),
        (KEYED,),
    ),
    "a merge": (
        lambda i, edit_id, _: i.table(EVERY).merge_into(ONES, ["k"], MATCHED, edit_id=edit_id),
        (EVERY,),
    ),
    "a replacement": (
        lambda i, edit_id, value: i.table(EVERY).replace(
            {"k": dm.Range(max=4)}, _rows(value + 1), ingest_id=edit_id
        ),
        (EVERY,),
    ),
    "an upsert of some columns": (
        lambda i, edit_id, value: i.table(KEYED).upsert(
            {"k": [*KEYS], "v": [value + 1] * 3}, ingest_id=edit_id
        ),
        (KEYED,),
    ),
    "a statement": (
        lambda i, edit_id, _: i.execute(
            f"update {EVERY} set v = v + 1 where k < 4 and s is not null", edit_id=edit_id
        ),
        (EVERY,),
    ),
    "a transaction": (_in_both, (KEYED, EVERY)),
}
BY_VALUES = "a delete by values"
_RUN: Mapping[str, Edit] = {
    **{what: edit for what, (edit, _) in EDITS.items()},
    BY_VALUES: lambda i, _, value: i.table(KEYED).delete({"v": value}),
}


class Editors:
    """Editing processes of an instance, each forked by a parent that has imported Dormouse."""

    def __init__(self, dsn: str, objects: str) -> None:
        self._dsn, self._objects = dsn, objects

    def is_killed(self, what: str, edit_id: str, value: int, number: int) -> bool:
        """Runs an edit; returns whether it was killed before its exchange `number`, or ended first."""
        code = forks.run(PROGRAM, self._dsn, self._objects, what, edit_id, value, number)
        assert code in (0, -signal.SIGKILL), code
        return code != 0


def main() -> None:
    """Runs as an editing process."""
    dsn, objects, what, edit_id, value, number = sys.argv[1:]
    with dm.connect(dsn, objects) as instance:
        _die_at(int(number))
        _RUN[what](instance, edit_id, int(value))
        os._exit(0)  # the exchanges that close the instance are not those of an edit


def _die_at(number: int) -> None:
    wait, seen = psycopg.Connection.wait, [0]

    def counted(conn: Any, *args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        if seen[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return wait(conn, *args, **kwargs)

    psycopg.Connection.wait = counted  # type: ignore[method-assign]
