"""Edits in processes that are killed just before one of their exchanges with the database.

Each edit adds 1 to `v` of the rows with k < 4, in one table or in both.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

import dormouse as dm
from tests.support.api import Instance

KEYED, EVERY = "keyed", "every"
KEYS = (1, 2, 3)
ONES = {"k": [*KEYS], "v": [1, 1, 1]}
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
    """The parent of editing processes, which it forks so that each begins at once."""

    def __init__(self, dsn: str, objects: str) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", "from tests.killed_edits import serve; serve()", dsn, objects],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def is_killed(self, what: str, edit_id: str, value: int, number: int) -> bool:
        """Runs an edit; returns whether it was killed before its exchange `number`, or ended first."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(f"{what};{edit_id};{value};{number}\n")
        self._parent.stdin.flush()
        status = int(self._parent.stdout.readline())
        assert status in (0, signal.SIGKILL), status
        return status != 0

    def close(self) -> None:
        self._parent.kill()
        self._parent.communicate()


def serve() -> None:
    """Runs as the parent process: forks a process for each line that it reads."""
    dsn, objects = sys.argv[1:3]
    for line in sys.stdin:
        what, edit_id, value, number = line.rstrip("\n").split(";")
        child = os.fork()
        if child == 0:
            done = 1
            try:
                with dm.connect(dsn, objects) as instance:
                    _die_at(int(number))
                    _RUN[what](instance, edit_id, int(value))
                    done = 0
                    os._exit(0)
            finally:
                os._exit(done)
        _, status = os.waitpid(child, 0)
        print(status, flush=True)


def _die_at(number: int) -> None:
    wait, seen = psycopg.Connection.wait, [0]

    def counted(conn: Any, *args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        if seen[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return wait(conn, *args, **kwargs)

    psycopg.Connection.wait = counted  # type: ignore[method-assign]
