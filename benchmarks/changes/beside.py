"""Edits during compactions of the same table: those that are refused, and the duration of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from time import perf_counter

from benchmarks.changes.edits import even, fill_even, merged
from benchmarks.changes.plan import Plan
from benchmarks.changes.sides import (
    EDITED,
    VALUES,
    Dormouse,
    DuckLake,
    Rows,
    Side,
    opened,
    rows_of,
    seconds_of,
)
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.report import percentile
from benchmarks.peers.peer import Refused

BESIDE_SECONDS_MAX = 12.0
"""The longest time for one kind of edit during compactions, in which slow edits are tried less often."""
TABLE_SHARE = 20
"""The table has one part in twenty of the plan's rows."""


def beside(plan: Plan, tell: Tell) -> Figures:
    """Counts the edits that are refused during compactions, and measures the others.

    PyIceberg has no compaction, so its thread only loads rows.
    """
    refused: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    found: Figures = {}
    for name, made in EDITED.items():
        with opened(made) as [side]:
            tell(f"{side.label}: edits during compactions")
            fill_even(side, "t", plan.rows // TABLE_SHARE)
            for kind, edit in BESIDE.items():
                if made is Dormouse and kind == "upsert":
                    continue  # its table keeps every row
                taken = _edit_beside(side, plan, edit)
                tried[side.name] += len(taken)
                refused[side.name] += taken.count(None)
                if accepted := [seconds for seconds in taken if seconds is not None]:
                    found[f"{kind}_beside_ms_{name}"] = round(percentile(accepted, 50) * 1_000, 3)
    for name, count in tried.items():
        found |= {f"failed_{name}": refused[name], f"tried_{name}": count}
    return found


Edit = Callable[[Side, int, Plan], None]
"""A function that makes the edit of a number: each edits other rows."""


def _delete(side: Side, number: int, _: Plan) -> None:
    side.delete("t", Rows(number * 200, number * 200 + 1))


def _upsert(side: Side, number: int, _: Plan) -> None:
    side.upsert("t", even(rows_of(number * 1_000, 1_000)))


def _update(side: Side, number: int, _: Plan) -> None:
    side.update("t", Rows(number * 2_000, (number + 1) * 2_000), VALUES + number)


def _merge(side: Side, number: int, plan: Plan) -> None:
    side.merge("t", merged(number, plan.rows // TABLE_SHARE))


BESIDE: dict[str, Edit] = {"delete": _delete, "upsert": _upsert, "update": _update, "merge": _merge}


def _edit_beside(side: Side, plan: Plan, edit: Edit) -> list[float | None]:
    """Makes edits while a thread compacts; returns the seconds of each, or None if it was refused."""
    over, taken = Event(), list[float | None]()

    def compact() -> None:
        number = 0
        while not over.is_set():
            number += 1
            with suppress(Refused):
                # a connection of DuckDB may be used by one thread only
                if not isinstance(side, DuckLake):
                    side.load("t", rows_of(2 * plan.rows + 1_000 * number, 1_000))
                side.compact("t")

    thread = Thread(target=compact)
    thread.start()
    began = perf_counter()
    try:
        while len(taken) < plan.beside and perf_counter() - began < BESIDE_SECONDS_MAX:
            try:
                taken.append(seconds_of(edit, side, len(taken), plan))
            except Refused:
                taken.append(None)
    finally:
        over.set()
        thread.join()
    return taken
