"""Reads of a table with pending deletions, compared with reads of the same table without deletions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from time import process_time
from typing import TYPE_CHECKING, Any

import dormouse as dm
from benchmarks.changes.plan import Plan
from benchmarks.changes.sides import Dormouse, opened
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.report import median_ratio, turns

if TYPE_CHECKING:
    import pyarrow as pa

LINES = 4
"""The number of rows of each first key."""
SCHEMA = dm.Schema(
    [dm.Field("orderkey", dm.LONG), dm.Field("linenumber", dm.LONG)],
    values=[
        *(dm.Field(name, dm.DOUBLE) for name in ("quantity", "price", "discount", "tax")),
        *(dm.Field(name, dm.STRING) for name in ("returnflag", "linestatus", "comment")),
        dm.Field("shipdate", dm.DATE),
    ],
)


@dataclass(frozen=True)
class Deleted:
    """A kind of table: a label, and the conditions of its deletions of some orders."""

    label: str
    conditions: Callable[[list[int]], list[dict[str, Any]]]
    deletions: int


def _by_key(orders: list[int]) -> list[dict[str, Any]]:
    return [{"orderkey": order, "linenumber": order % LINES} for order in orders]


def _by_value(orders: list[int]) -> list[dict[str, Any]]:
    return [{"comment": f"comment {order}"} for order in orders]


TABLES = {
    "10_keys": Deleted("10 deletes of a key", _by_key, 10),
    "100_keys": Deleted("100 deletes of a key", _by_key, 100),
    "1000_keys": Deleted("1,000 deletes of a key", _by_key, 1_000),
    "1000_values": Deleted("1,000 deletes of a value", _by_value, 1_000),
    "a_list": Deleted("one delete of 999 keys", lambda orders: [{"orderkey": orders}], 999),
}
READS = {
    "q1": "TPC-H's Q1",
    "q6": "TPC-H's Q6",
    "range": "a range of keys in SQL",
    "rows": "all rows in SQL",
    "scan": "all rows in batches",
    "narrow": "three columns in batches",
    "lookups": "look-ups",
}
_SQL = {
    "q1": "select returnflag, linestatus, sum(quantity), sum(price), sum(price * (1 - discount)), "
    "sum(price * (1 - discount) * (1 + tax)), avg(quantity), avg(price), avg(discount), count(*) "
    "from {table} where shipdate <= date '1998-09-02' group by 1, 2 order by 1, 2",
    "q6": "select sum(price * discount) from {table} where shipdate >= date '1994-01-01' and "
    "shipdate < date '1995-01-01' and discount between 0.05 and 0.07 and quantity < 24",
    "range": "select count(*), sum(tax) from {table} "
    "where orderkey >= {middle} and orderkey < {middle} + 4000",
    "rows": "select * from {table}",
}


def rows_of(count: int) -> pa.Table:
    """Returns rows like those of TPC-H's table `lineitem`."""
    import numpy as np
    import pyarrow as pa

    chance = np.random.default_rng(1)
    numbers = np.arange(count)
    columns = {
        "orderkey": numbers // LINES,
        "linenumber": numbers % LINES,
        "quantity": chance.integers(1, 51, count).astype(float),
        "price": np.round(chance.random(count) * 100_000, 2),
        "discount": chance.integers(0, 11, count) / 100,
        "tax": chance.integers(0, 9, count) / 100,
        "returnflag": np.array(["A", "N", "R"])[chance.integers(0, 3, count)],
        "linestatus": np.array(["O", "F"])[chance.integers(0, 2, count)],
        "comment": [f"comment {number}" for number in chance.integers(0, count, count)],
        "shipdate": np.datetime64("1992-01-01") + chance.integers(0, 2_526, count),
    }
    return pa.table({name: pa.array(column) for name, column in columns.items()})


def deleted(plan: Plan, tell: Tell) -> Figures:
    """Measures the CPU time of reads with pending deletions, divided by that without deletions.

    Each read runs twice, and the second counts, as memory that a read of another table has returned to the
    system is slow. The first of all reads finds the deleted rows, and counts by itself.
    """
    found: Figures = {}
    with opened(Dormouse) as [side]:
        instance: dm.Instance = side.instance
        data = rows_of(plan.rows)
        for name in ("none", *TABLES):
            tell(f"reads with deletions: {name}")
            table = instance.create_table(f"t_{name}", SCHEMA)
            table.ingest(data, engine="local")
            if name != "none":
                kind = TABLES[name]
                orders = Random(kind.deletions).sample(
                    range(plan.rows // LINES), min(kind.deletions, plan.rows // LINES // 4)
                )
                for where in kind.conditions(orders):
                    table.delete(where)
        for read, what in READS.items():
            tell(what)
            times: dict[str, list[float]] = {}
            for number, name in turns(("none", *TABLES), plan.rounds):
                first, second = (_seconds(instance, read, f"t_{name}", plan.rows) for _ in range(2))
                times.setdefault(name, []).append(second)
                if read == "q1" and number == 0 and name != "none":
                    found[f"first_with_{name}_vs_none"] = round(first / times["none"][0], 3)
            for name in TABLES:
                found[f"{read}_with_{name}_vs_none"] = round(median_ratio(times[name], times["none"]), 3)
    return found


def _seconds(instance: dm.Instance, read: str, table: str, rows: int) -> float:
    """Returns the CPU seconds of a read."""
    began = process_time()
    _read(instance, read, table, rows)
    return process_time() - began


def _read(instance: dm.Instance, read: str, table: str, rows: int) -> None:
    if read in _SQL:
        instance.sql(_SQL[read].format(table=table, middle=rows // LINES // 2)).read_all()
    elif read == "lookups":
        for order in range(0, rows // LINES, max(1, rows // LINES // 20)):
            instance.table(table).query({"orderkey": order}).read_all()
    else:
        columns = ["orderkey", "quantity", "tax"] if read == "narrow" else None
        instance.table(table).query(None, columns).read_all()
