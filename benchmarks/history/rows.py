"""Reads of past rows: look-ups as of a cut and of now, and the changes since a cut and a full scan."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.place import Place
from benchmarks.harness.report import median_ratio
from dormouse.api.table import Table


def measure(place: Place, rows: int, look_ups: int, rounds: int, tell: Tell) -> Figures:
    """Measures reads of a table with `rows` rows before a cut and as many after it.

    Skips the figures of features that the installed Dormouse does not have.
    """
    reads_the_past = "as_of" in inspect.signature(Table.query).parameters
    if not (reads_the_past or hasattr(Table, "changes")):
        return {}
    import dormouse as dm

    with dm.connect(place.dsn, place.objects) as instance:
        schema = dm.Schema([dm.Field("key", dm.LONG)], [], [dm.Field("value", dm.LONG)])
        tell("rows before and after a cut")
        both, late = instance.create_table("both", schema), instance.create_table("late", schema)
        both.ingest(_rows(0, rows))
        past: Any = both.history
        cut = past.record_cut()
        both.ingest(_rows(rows, rows))
        late.ingest(_rows(rows, rows))
        found: Figures = {}
        if reads_the_past:
            tell("look-ups as of a cut")
            found |= _as_of(both, cut, rows, look_ups, rounds)
        if hasattr(both, "changes"):
            tell("changes since a cut")
            found |= _changes(both, late, cut, rows, rounds)
        return found


def _as_of(table: Any, cut: Any, rows: int, look_ups: int, rounds: int) -> Figures:
    chosen, now, then = random.Random(26), list[float](), list[float]()
    for _ in range(rounds):
        keys = [chosen.randrange(rows) for _ in range(look_ups)]
        now.append(_seconds(partial(_look_up, table, keys)))
        then.append(_seconds(partial(_look_up, table, keys, as_of=cut)))
    ms = {name: round(1_000 * min(each) / look_ups, 3) for name, each in (("now", now), ("as_of", then))}
    return {
        **{f"look_up_ms_{name}": each for name, each in ms.items()},
        "as_of_vs_now": round(median_ratio(now, then), 3),
    }


def _look_up(table: Any, keys: list[int], **moment: Any) -> None:
    for key in keys:
        table.query({"key": key}, **moment).read_all()


def _changes(table: Any, same: Any, cut: Any, rows: int, rounds: int) -> Figures:
    """Compares reading the changes since a cut with a scan of a table that has only these rows."""
    scans, changes = list[float](), list[float]()
    for _ in range(rounds):
        scans.append(_seconds(lambda: _counted(same.query(), rows)))
        changes.append(_seconds(lambda: _counted(table.changes(after=cut), rows)))
    return {"changes_vs_scan": round(median_ratio(scans, changes), 3)}


def _counted(reader: Any, rows: int) -> None:
    counted = sum(batch.num_rows for batch in reader)
    if counted != rows:
        raise RuntimeError(f"{counted:,} rows were read instead of {rows:,}")


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _rows(first: int, count: int) -> Any:
    import pyarrow as pa

    keys = pa.array(range(first, first + count), pa.int64())
    return pa.table({"key": keys, "value": keys})
