"""Updates and merges: their duration in tables that keep every row and in keyed tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.changes.deletes import KINDS, chosen
from benchmarks.changes.plan import Plan
from benchmarks.changes.sides import (
    EDITED,
    FILES,
    OURS,
    PEERS,
    VALUES,
    Rows,
    Side,
    fill,
    opened,
    rows_of,
    seconds_of,
)
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.report import median_ratio, percentile, turns

if TYPE_CHECKING:
    import pyarrow as pa

MATCHED, NEW = 900, 100
"""The rows of a merge whose keys the table has, and those that it does not have."""
MERGED = MATCHED + NEW
MERGE = f"merge_{MERGED}"
UPDATES = {f"update_{kind}": f"update {what}" for kind, what in KINDS.items()}
EDITS = {**UPDATES, MERGE: f"merge {MATCHED} existing rows and {NEW} new ones"}
Times = dict[str, list[float]]
"""The seconds of an edit in each round, by the name of the compared system."""


def updates(plan: Plan, tell: Tell) -> Figures:
    """Measures updates of one column: of one key, of a range, and of 1 % of the rows by a value."""
    found: Figures = {}
    with _edited(plan, tell, fill) as sides:
        for first, (edit, kind) in enumerate(zip(UPDATES, KINDS, strict=True), 1):
            times: Times = {}
            for number, (name, side) in turns([*sides.items()], plan.rounds + 1):
                tell(f"{side.label}: {UPDATES[edit]}")
                rows, table = chosen(kind, number, plan.rows), f"t_{name}"
                before = side.count(table, rows)
                value = first * VALUES + number  # no row has this value yet
                times.setdefault(name, []).append(seconds_of(side.update, table, rows, value))
                _expect(side, table, Rows(value=value), before)
            found |= _figures(edit, times)
    return found | _worst("update", UPDATES, found)


def merges(plan: Plan, tell: Tell) -> Figures:
    """Measures merges whose rows are spread over all keys of the table."""
    times: Times = {}
    with _edited(plan, tell, fill_even) as sides:
        for number, (name, side) in turns([*sides.items()], plan.rounds + 1):
            tell(f"{side.label}: {EDITS[MERGE]}")
            rows, table = merged(number, plan.rows), f"t_{name}"
            times.setdefault(name, []).append(seconds_of(side.merge, table, rows))
            _expect(side, table, Rows(value=VALUES + number), MERGED)
            _expect(side, table, Rows(0, 2 * plan.rows), plan.rows + NEW * (number + 1))
    found = _figures(MERGE, times)
    return found | _worst(MERGE, [MERGE], found)


@contextmanager
def _edited(plan: Plan, tell: Tell, load: Callable[[Side, str, int], None]) -> Iterator[dict[str, Side]]:
    """Opens the compared systems, each with a filled table of its own name."""
    with opened(*EDITED.values()) as made:
        sides: dict[str, Side] = dict(zip(EDITED, made, strict=True))
        for name, side in sides.items():
            tell(f"{side.label}: loading")
            load(side, f"t_{name}", plan.rows)
        yield sides


def fill_even(side: Side, table: str, rows: int) -> None:
    """Loads rows as `fill` does, but with even keys only."""
    for number in range(FILES):
        side.load(table, even(rows_of(rows // FILES * number, rows // FILES)))


def even(rows: pa.Table) -> pa.Table:
    """Returns rows with their keys doubled."""
    import pyarrow.compute as pc

    return rows.set_column(0, "k", pc.multiply(rows["k"], 2))


def merged(number: int, rows: int) -> pa.Table:
    """Returns the rows of a merge, in no order: some with even keys, others with odd keys."""
    import numpy as np
    import pyarrow as pa

    chance = np.random.default_rng(number)
    matched = 2 * (np.arange(MATCHED) * (rows // MATCHED) + number)
    new = 2 * (np.arange(NEW) * (rows // NEW) + number) + 1
    keys = chance.permutation(np.concatenate([matched, new]))
    payload = [chance.bytes(32) for _ in keys]
    return pa.table({"k": keys, "v": np.full(MERGED, VALUES + number), "payload": payload})


def _expect(side: Side, table: str, rows: Rows, wanted: int) -> None:
    """Raises RuntimeError if a new reader does not see exactly `wanted` rows."""
    if (seen := side.count(table, rows)) != wanted:
        raise RuntimeError(f"{side.label} has {seen:,} rows where {rows.sql} after an edit, not {wanted:,}")


def _figures(edit: str, times: Times) -> Figures:
    """Returns the milliseconds of each system, and the ratios of each peer to each of our tables.

    The first round, in which modules are imported and plans are made, does not count.
    """
    counted = {name: each[1:] for name, each in times.items()}
    found: Figures = {
        f"{edit}_ms_{name}": round(percentile(each, 50) * 1_000, 3) for name, each in counted.items()
    }
    for ours in OURS:
        for peer in PEERS:
            ratio = median_ratio(counted[peer.name], counted[ours])
            found[f"{edit}_{ours}_vs_{peer.name}"] = round(ratio, 3)
    return found


def _worst(key: str, edits: Iterable[str], ratios: Figures) -> Figures:
    """Returns the smallest ratio to each peer, of all of some edits and both of our tables."""
    return {
        f"{key}_vs_{peer.name}": min(
            ratios[f"{edit}_{ours}_vs_{peer.name}"] for edit in edits for ours in OURS
        )
        for peer in PEERS
    }
