"""Hundreds of pending deletions: every reader returns the rows that a list of rows has left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from tests.support.api import Instance

SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG), dm.Field("s", dm.STRING)],
    values=[
        dm.Field("v", dm.LONG, nullable=True),
        dm.Field("x", dm.DOUBLE, nullable=True),
        dm.Field("n", dm.LONG),
    ],
)
Row = dict[str, Any]
NUMBERS = [None, -0.0, 0.0, 1.5, math.nan, -math.inf]
KEPT: dict[str, dm.TableProperties] = {
    "plain": dm.TableProperties(),
    "keyed": dm.TableProperties(keep="newest_row"),
    "newest_by": dm.TableProperties(keep="newest_row", newest_by="n"),
}


def rows_of(chance: Random, low: int, number: int) -> list[Row]:
    keys = [(k, s) for k in range(low, low + 150) for s in "ab"]
    return [
        {
            "k": k,
            "s": s,
            "v": chance.choice([None, *range(40)]),
            "x": chance.choice(NUMBERS),
            # each row differs, so that the newest of a key is known
            "n": chance.randrange(1_000) * 1_000 + number,
        }
        for k, s in keys
    ]


def where_of(chance: Random) -> dict[str, Any]:
    k, s, v, x = chance.randrange(300), chance.choice("ab"), chance.randrange(40), chance.choice(NUMBERS)
    few = [{"k": k, "s": s}] * 6 + [
        {"k": k},
        {"k": [k, k + 7], "s": [s]},
        {"k": dm.Range(k, k + 3)},
        {"k": dm.Range(k, k + 40), "v": v},
        {"k": dm.Range(k, k + 60), "v": [v, None], "x": x},
        {"k": [*range(k, 300, 11)], "v": dm.Range(v, v + 4)},
        {"k": k, "v": [v, None]},
        {"s": s, "x": x, "v": v},
        {"v": v, "k": dm.Range(k, k + 9, max_inclusive=True), "s": dm.Range(max="b")},
        {"x": dm.Range(1.0, 1.2)},
    ]
    return chance.choice(few)


def _meets(item: Any, value: Any) -> bool:
    if isinstance(item, list):
        return any(_meets(one, value) for one in item)
    if isinstance(item, dm.Range):
        return value is not None and value == value and item.contains(value)
    return item == value or (item != item and value is not None and value != value)


def is_of(where: Mapping[str, Any], row: Row) -> bool:
    return all(_meets(wanted, row[name]) for name, wanted in where.items())


class Model:
    """All rows that were ingested, the numbers of those that a deletion matches, and their order."""

    def __init__(self, kind: str) -> None:
        self.kind, self.rows, self.gone = kind, list[Row](), set[int]()

    def delete(self, where: Mapping[str, Any], *, erase: bool = False) -> None:
        found = {number for number, row in enumerate(self.rows) if row and is_of(where, row)}
        if erase:
            # an erased row hides no older row
            for number in found:
                self.rows[number] = {}
        self.gone |= found

    @property
    def left(self) -> list[str]:
        if self.kind == "plain":
            found = [row for number, row in enumerate(self.rows) if number not in self.gone]
        else:
            by_n = self.kind == "newest_by"
            newest: dict[Any, tuple[Any, int]] = {}
            for number, row in enumerate(self.rows):
                if row and (by_n or number not in self.gone):
                    order = (row["n"] if by_n else 0), number
                    newest[row["k"], row["s"]] = max(newest.get((row["k"], row["s"]), order), order)
            found = [self.rows[number] for _, number in newest.values() if number not in self.gone]
        return listed(found)


def listed(rows: list[Row]) -> list[str]:
    # NaN has one form, and -0.0 and 0.0 are equal
    return sorted(
        repr(
            [
                None if one is None else str(one + 0) if one != "" and not isinstance(one, str) else one
                for one in (row[name] for name in ("k", "s", "v", "x", "n"))
            ]
        )
        for row in rows
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("seed", [1])
def test_readers_return_the_rows_that_hundreds_of_deletions_leave(
    instance: Instance, kind: str, seed: int
) -> None:
    chance, model = Random(seed), Model(kind)
    table = instance.create_table("t", SCHEMA, properties=KEPT[kind])

    def check() -> None:
        names = list(SCHEMA.names)
        wanted = model.left
        assert listed(instance.sql(f"select {', '.join(names)} from t").read_all().to_pylist()) == wanted
        assert listed(table.query(None, names).read_all().to_pylist()) == wanted
        for k in chance.sample(range(300), 5):
            some = [row for row in wanted if row.startswith(f"['{k}',")]
            assert listed(table.query({"k": k}, names).read_all().to_pylist()) == some
            assert (
                listed(instance.sql(f"select {', '.join(names)} from t where k = {k}").read_all().to_pylist())
                == some
            )

    def change(number: int, count: int) -> None:
        for low in (0, 150):
            rows = rows_of(chance, low, number * 2 + low // 150)
            data = pa.Table.from_pylist(
                rows,
                schema=pa.schema(
                    [
                        pa.field("k", pa.int64(), nullable=False),
                        pa.field("s", pa.string(), nullable=False),
                        pa.field("v", pa.int64()),
                        pa.field("x", pa.float64()),
                        pa.field("n", pa.int64(), nullable=False),
                    ]
                ),
            )
            table.ingest(data, engine="local")
            model.rows += rows
        for _ in range(count):
            where = where_of(chance)
            if kind != "plain":
                # a keyed table turns a deletion by values into marks of its current rows
                where = {name: wanted for name, wanted in where.items() if name in "ks"} or {"k": 7}
            table.delete(where)
            model.delete(where)

    change(0, 50)
    check()
    change(1, 70)
    check()
    where = {"k": dm.Range(100, 130)}
    table.erase(where, engine="local", wait_seconds=0.0)
    model.delete(where, erase=True)
    table.add_column(dm.Field("later", dm.LONG, nullable=True))
    check()
    change(2, 20)
    check()
    table.compact(engine="local")
    check()
