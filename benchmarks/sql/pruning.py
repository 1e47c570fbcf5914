"""The files that statements on keys read, compared with the files that have wanted rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import dormouse as dm
from benchmarks.harness.command import Figures
from dormouse.api.instance import Instance
from dormouse.model.types import DataType

LEAVES = 64
LEAF_ROWS = 100
DAY = timedelta(days=1)
CONDITIONS = {
    "pruned_longs": [
        "k + 1 = 5", "-k > -150", "k * 2 = 300", "k / 100 = 2", "k // 100 = 2", "abs(k) < 150",
        "k = (select 150)", "k = (select max(k) from pruned_few)", "k > (select max(k) from pruned_few)",
        "k in (select k from pruned_few)", "k in (select k from pruned_few where name = 'x')",
        "k in (select * from range(150, 153))", "coalesce(k, 0) = 150", "k in (select ref from pruned_names)",
        "k = any (select k from pruned_few)", "k in (select ref from pruned_names where name = 'x')",
        "exists (select 1 from pruned_few f where f.k = pruned_longs.k and f.name = 'x')",
    ],
    "pruned_times": [
        "k > now() - interval 5 day", "k > current_timestamp - interval '5 days'", "k > current_date - 5",
        "k < now() - interval 60 day", "k between now() - interval 6 day and now() - interval 5 day",
        "k + interval 5 day > now()", "now() - k < interval 5 day", "k::date = current_date - 5",
        "k::timestamp > localtimestamp - interval 5 day", "date_trunc('day', k) = current_date - 5",
        "epoch(k) > epoch(now()) - 500000", "k at time zone 'UTC' > localtimestamp - interval 5 day",
        "k = (select max(k) from pruned_times)", "k > (select max(k) - interval 1 day from pruned_times)",
        "month(k) = month(current_date)", "strftime(k, '%Y-%m-%d') = (current_date - 5)::varchar",
    ],
    "pruned_dates": [
        "k >= date '2013-05-04' and k < date '2013-05-04' + interval 1 month", "year(k) = 2013",
        "extract(year from k) >= 2024", "k >= timestamp '2024-05-04 12:00:00'", "k + 1 = date '2013-05-04'",
        "date_trunc('month', k) = date '2013-05-01'", "last_day(k) = date '2013-05-31'",
        "k > current_date - interval 3 year", "year(k) = 2013 and month(k) = 5", "k::varchar like '2013-05%'",
        "strftime(k, '%Y') = '2013'", "strftime(k, '%Y-%m') between '2013-05' and '2013-06'",
    ],
}  # fmt: skip
"""Conditions, by the table whose key `k` they restrict."""
STATEMENTS = {
    "select count(*) from pruned_longs join pruned_few using (k)": 3,
    "select count(*) from pruned_longs l join pruned_few f on l.k = f.k where f.name = 'x'": 1,
    "select min(k) from pruned_longs": 1,
    "select max(k) from pruned_longs": 1,
    "select count(*) from pruned_longs": 1,
    "select * from pruned_longs order by k limit 5": 1,
    "select * from pruned_longs order by k desc limit 5 offset 3": 1,
    "select * from pruned_longs where k >= 3000 order by k limit 5": 1,
    "select * from pruned_longs limit 5": 1,
    "select count(*), min(k), max(k) from pruned_longs where k < 3000": 1,
    "select count(*) from pruned_longs l join pruned_names n on l.k = n.ref": 3,
    "select count(*) from pruned_longs l join pruned_names n on l.k = n.ref where n.name = 'x'": 1,
    "select count(*) from pruned_longs semi join pruned_few using (k)": 3,
    "select count(*) from pruned_few left join pruned_longs using (k)": 3,
    "select count(*) from pruned_longs join (values (150), (151)) v(z) on k = z": 1,
    "with few as materialized (from pruned_few) select l.k from pruned_longs l join few using (k)": 3,
    "select f.k, (select max(leaf) from pruned_longs l where l.k = f.k) from pruned_few f": 3,
}
"""Other statements that read the table of whole numbers, with the number of files that suffice."""


def read_vs_needed(instance: Instance) -> Figures:
    """Makes tables of one file a leaf, and returns the largest ratio of files read to files needed."""
    _make(instance)
    conditions = [ratio for name in CONDITIONS for ratio in _of_conditions(instance, name)]
    others = [_read(instance, "pruned_longs", text) / count for text, count in STATEMENTS.items()]
    return {
        "files_read_vs_needed_max": round(max(*conditions, *others), 2),
        "files_read_vs_needed_conditions_max": round(max(conditions), 2),
        "files_read_vs_needed_cases": len(conditions) + len(others),
    }


def _of_conditions(instance: Instance, name: str) -> Iterator[float]:
    for condition in CONDITIONS[name]:
        counted = instance.sql(f"select count(distinct leaf) n from {name} where {condition}").read_all()
        needed = max(1, counted["n"][0].as_py())
        yield _read(instance, name, f"select * from {name} where {condition}") / needed


def _read(instance: Instance, name: str, statement: str) -> int:
    found = instance.explain_sql(statement)
    return found[name].files if name in found else 0


def _make(instance: Instance) -> None:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    rows = range(LEAVES * LEAF_ROWS)
    keys: dict[str, tuple[DataType, list[Any]]] = {
        "pruned_longs": (dm.LONG, list(rows)),
        "pruned_times": (dm.TIMESTAMP, [today + DAY * (n / LEAF_ROWS - LEAVES + 1) for n in rows]),
        "pruned_dates": (dm.DATE, [date(2008, 1, 1) + n * DAY for n in rows]),
    }
    for name, (kind, values) in keys.items():
        schema = dm.Schema([dm.Field("k", kind)], values=[dm.Field("leaf", dm.INT)])
        table = instance.create_table(name, schema, split_points=values[LEAF_ROWS::LEAF_ROWS])
        table.ingest([{"k": value, "leaf": n // LEAF_ROWS} for n, value in enumerate(values)])
    few = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("name", dm.STRING)])
    names = dm.Schema([dm.Field("name", dm.STRING)], values=[dm.Field("ref", dm.LONG)])
    listed = {"x": 50, "y": 150, "z": 3_333}
    instance.create_table("pruned_few", few).ingest([{"k": k, "name": name} for name, k in listed.items()])
    instance.create_table("pruned_names", names).ingest(
        [{"name": name, "ref": k} for name, k in listed.items()]
    )
