"""Queries by key over files that the tests write, compared with the same rows."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import combinations, count, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from query_lake import COUNTS, NOON, SCHEMA, Lake, NewLake, expected, four_leaves, ordered, tuples

from dormouse.errors import InvalidQuery, InvalidRange
from dormouse.postgres import ConnectionSupplier
from dormouse.reading.table_view import explain
from tests.support.model import BYTES, DOUBLE, INT, LONG, STRING, Field, Range, Region, Schema
from tests.support.reading import arrow_schema, query


@pytest.fixture
def new_lake(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> NewLake:
    return lambda schema=SCHEMA, **more: Lake(dsn, supplier, tmp_path / "a [b]*?%20é", schema, **more)


@pytest.fixture(scope="module")
def lake(own_database: tuple[str, ConnectionSupplier], tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Returns one lake for all tests, which only read it."""
    folder = tmp_path_factory.mktemp("lake") / "a [b]*?%20é"
    return four_leaves(lambda **more: Lake(*own_database, folder, SCHEMA, **more))


def test_all_rows_come_once_and_in_key_order(lake: Lake) -> None:
    found = tuples(query(lake.context))
    assert [row[:3] for row in found] == [row[:3] for row in expected(lake, lambda _: True)]
    assert ordered(found) == expected(lake, lambda _: True)


@pytest.mark.parametrize(
    ("where", "condition"),
    [
        ({"Name": "a\x00"}, lambda r: r["Name"] == "a\x00"),
        ({"Name": ""}, lambda r: r["Name"] == ""),
        ({"Name": "o'\""}, lambda r: r["Name"] == "o'\""),
        ({"number": -(2**63)}, lambda r: r["number"] == -(2**63)),
        ({"number": Range(1, 2**63 - 1)}, lambda r: 1 <= r["number"] < 2**63 - 1),
        ({"number": Range(1, None, min_inclusive=False)}, lambda r: r["number"] > 1),
        ({"Name": Range("a", "p")}, lambda r: "a" <= r["Name"] < "p"),
        ({"Name": Range(None, "p", max_inclusive=True)}, lambda r: r["Name"] <= "p"),
        (Region(Name=Range("g", "o"), number=-50), lambda r: "g" <= r["Name"] < "o" and r["number"] == -50),
        ({"Name": ["p", "a", "p", "none"]}, lambda r: r["Name"] in ("a", "p")),
        ({"number": [Range(-60, 0), -1, 50]}, lambda r: -60 <= r["number"] < 0 or r["number"] == 50),
        ({"Name": []}, lambda r: False),
        ({"time": -(2**31)}, lambda r: r["time"] == -(2**31)),
        ({"time": Range(-1, 1), "number": 0}, lambda r: -1 <= r["time"] < 1 and r["number"] == 0),
        ({"code": [b"\x00", b"\xff"]}, lambda r: r["code"] in (b"\x00", b"\xff")),
        ({"score": 2}, lambda r: r["score"] == 2),
        ({"score": Range(None, 0.0)}, lambda r: r["score"] is not None and r["score"] < 0),
        ({"score": [None, 2.0]}, lambda r: r["score"] in (None, 2.0)),
        ({"score": Range()}, lambda r: r["score"] is not None),
        ({"score": [Range(), None]}, lambda r: True),
        ({"good": True}, lambda r: r["good"]),
        ({"at": NOON}, lambda r: r["at"] == NOON),
        ({"at": None}, lambda r: r["at"] is None),
        ({"tags": None}, lambda r: r["tags"] is None),
        ({}, lambda r: True),
    ],
)
def test_a_query_returns_the_matching_rows(
    lake: Lake, where: Any, condition: Callable[[dict[str, Any]], bool]
) -> None:
    found = tuples(query(lake.context, where))
    assert [row[:3] for row in found] == sorted(row[:3] for row in found)
    assert ordered(found) == expected(lake, condition)


def test_columns_are_in_the_requested_order_with_exact_types(lake: Lake) -> None:
    """Covers columns without the keys, although rows are merged by keys, and queries that find no rows."""
    whole = arrow_schema(SCHEMA)
    for where in ({"Name": "a"}, {"Name": "nobody"}):
        reader = query(lake.context, where, columns=["tags", "Name", "code"])
        assert reader.schema == pa.schema([whole.field(name) for name in ("tags", "Name", "code")])
        table = reader.read_all()
        table.validate(full=True)
        assert table.schema == reader.schema
        assert table.num_rows == len(expected(lake, lambda row, w=where: row["Name"] == w["Name"]))
    numbers = query(lake.context, {"Name": "h"}, columns=["number"]).read_all()["number"].to_pylist()
    assert numbers == sorted(numbers)
    assert numbers


def test_an_empty_table_has_a_schema(new_lake: NewLake) -> None:
    assert query(new_lake().context).read_all() == arrow_schema(SCHEMA).empty_table()


@pytest.mark.parametrize("limit", [0, 1, 7, 600, 10_000])
def test_a_limit_gives_the_first_rows(lake: Lake, limit: int) -> None:
    keys = [row[:3] for row in tuples(query(lake.context, limit=limit))]
    assert keys == [row[:3] for row in expected(lake, lambda _: True)][:limit]


@pytest.mark.parametrize(
    ("where", "columns", "message"),
    [
        ({"nmae": 1}, None, "unknown column 'nmae'; did you mean 'Name'?"),
        ({"name": 1}, None, "unknown column 'name'; did you mean 'Name'?"),
        ("Name", None, "where must be a dict or a dm.Region, not 'Name'"),
        (None, ["Name", "zzz"], "unknown column 'zzz'; known: Name, number"),
        (None, ["Name", "Name"], "column 'Name' is named twice"),
        (None, [], "columns is empty"),
        (None, "Name", "columns must be a list of names, not 'Name'"),
        (None, [1], "unknown column 1"),
        ({"Name": 1}, None, "'Name' is string, but 1 is int"),
        ({"Name": None}, None, "'Name' is never null"),
        ({"Name": "\ud800"}, None, "lone surrogate"),
        ({"number": "1"}, None, "'number' is long, but '1' is str"),
        ({"number": True}, None, "'number' is long, but True is bool"),
        ({"number": 2**63}, None, "'number' is long; 9223372036854775808 does not fit"),
        ({"number": Range("a", "b")}, None, "'number' is long, but 'a' is str"),
        ({"number": [1, 1.5]}, None, "'number' is long, but 1.5 is float"),
        ({"time": 2**31}, None, "'time' is int; 2147483648 does not fit"),
        ({"good": 1}, None, "'good' is boolean, but 1 is int"),
        ({"score": "x"}, None, "'score' is double, but 'x' is str"),
        ({"at": "yesterday"}, None, "'at' is timestamp, but 'yesterday' is str"),
        ({"tags": "x"}, None, "'tags' is list<string>, which has no order"),
    ],
)
def test_a_mistake_is_one_clear_line(lake: Lake, where: Any, columns: Any, message: str) -> None:
    with pytest.raises(InvalidQuery, match=re.escape(message)) as error:
        query(lake.context, where, columns)
    assert len(str(error.value).splitlines()) == 1


def test_a_range_without_values_is_refused(lake: Lake) -> None:
    for item in (Range(5, 5), Range(5, 1), Range(5, 5, min_inclusive=False, max_inclusive=True)):
        with pytest.raises(InvalidRange, match=r"range of 'number' from 5 to . is empty"):
            query(lake.context, {"number": item})
    for limit in (-1, True, 1.5, "x"):
        with pytest.raises(InvalidQuery, match="limit must be a whole number of rows"):
            query(lake.context, limit=limit)  # type: ignore[arg-type]
    with pytest.raises(InvalidQuery, match="leave it out for all rows"):
        query(lake.context, limit=2**70)
    assert query(lake.context, limit=2**63 - 1).read_all().num_rows == lake.all.num_rows


@pytest.mark.few(1)
@pytest.mark.parametrize("columns", [None, ["n"], ["word", "last"]])
def test_rows_of_equal_key_are_aggregated_before_columns_are_chosen(
    new_lake: NewLake, columns: list[str] | None
) -> None:
    lake = new_lake(COUNTS, split_points=["m"], aggregate="sum(n), min(low), max(last)")
    rng = random.Random(2)
    for n in range(4):
        rows = [
            {
                "word": rng.choice("abmz"),
                "seen": rng.randrange(4),
                "n": 1,
                "low": rng.random(),
                "last": str(i),
            }
            for i in range(200)
        ]
        lake.add(rows, one_file=n % 2 == 0)
    every = "select word, seen, sum(n)::bigint as n, min(low) as low, max(last) as last from t group by all"
    chosen = ", ".join(columns or COUNTS.names)
    assert tuples(query(lake.context, columns=columns)) == lake.expect(
        f"select {chosen} from ({every}) order by word, seen"
    )
    assert tuples(query(lake.context, {"n": Range(40, None), "word": "a"}, columns)) == lake.expect(
        f"select {chosen} from ({every}) where n >= 40 and word = 'a' order by word, seen"
    )


def test_old_rows_are_filtered_before_they_are_aggregated(new_lake: NewLake) -> None:
    lake = new_lake(COUNTS, aggregate="sum(n), min(low), max(last)", filter="age_off(seen, 60000)")
    now = int(datetime.now(UTC).timestamp() * 1000)
    for seen in (now, now - 120_000):
        lake.add([{"word": "a", "seen": seen, "n": 1, "low": None, "last": str(seen)}] * 3)
    assert tuples(query(lake.context)) == [("a", now, 3, None, str(now))]


def test_only_files_that_can_hold_the_keys_are_read(lake: Lake) -> None:
    summary = explain(lake.context, {"Name": "g", "number": 3})
    assert (summary.partitions, summary.partitions_total) == (1, 4)
    assert (summary.files, summary.files_pruned) == (3, 0)
    assert summary.byte_count > 0
    assert explain(lake.context, {"Name": "zz"}).files == 3
    assert explain(lake.context, {"Name": "😁"}).files == 0
    assert explain(lake.context, {"Name": "😁"}).files_pruned == 3


KEYS = Schema(
    [Field("s", STRING), Field("i", INT), Field("b", BYTES), Field("l", LONG)], [Field("t", STRING)]
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "s": st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
    | st.sampled_from(["", "\x00", "a\x00"]),
    "i": st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 2),
    "b": st.binary(max_size=2) | st.sampled_from([b"", b"\x00", b"\xff"]),
    "l": st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2),
    "t": st.sampled_from(["", "x"]),
}
ROWS = st.lists(st.fixed_dictionaries(VALUES), min_size=1, max_size=30)
_tables = count()


@settings(max_examples=settings.default.max_examples // 4, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_region_of_any_tree_has_duckdbs_rows(new_lake: NewLake, data: st.DataObject) -> None:
    """Covers random keys of all types, splits on random keys before and after the files, and files over many
    leaves.
    """
    lake = new_lake(KEYS, name=f"random{next(_tables)}")
    for _ in range(data.draw(st.integers(1, 3))):
        split_somewhere(lake, data)
        lake.add(data.draw(ROWS), one_file=data.draw(st.booleans()))
    split_somewhere(lake, data)
    kept = data.draw(st.lists(st.sampled_from(KEYS.row_key_names), unique=True))
    ranges = {name: sorted(data.draw(st.tuples(VALUES[name], VALUES[name]))) for name in kept}
    where = {name: Range(low, high, max_inclusive=True) for name, (low, high) in ranges.items()}
    conditions = " and ".join(f"{name} between ? and ?" for name in kept) or "true"
    values = [value for pair in ranges.values() for value in pair]
    assert tuples(query(lake.context, where)) == lake.expect(
        f"select * from t where {conditions} order by s, i, b, l, t", values
    )


def split_somewhere(lake: Lake, data: st.DataObject) -> None:
    leaf = data.draw(st.sampled_from(lake.context.partitions.leaves()))
    name = data.draw(st.sampled_from(KEYS.row_key_names))
    with suppress(InvalidRange):
        lake.context.partitions.split(leaf.partition_id, data.draw(VALUES[name]), name)


DOUBLES = [0.0, -0.0, 1.0, -1.0, 2.0, math.inf, -math.inf, math.nan, None]


def _order(number: float) -> tuple[bool, float]:
    """Returns a sort key for which zeros are equal, and NaN is the largest number and equals itself."""
    return math.isnan(number), 0.0 if math.isnan(number) else number


@pytest.mark.slow
def test_lists_and_ranges_of_doubles_find_what_is_equal_to_them(new_lake: NewLake) -> None:
    schema = Schema([Field("k", LONG)], values=[Field("x", DOUBLE, nullable=True)])
    lake = new_lake(schema)
    lake.add([{"k": k, "x": x} for k, x in enumerate(DOUBLES)])

    def check(wanted: Any, is_wanted: Callable[[tuple[bool, float]], bool]) -> None:
        found = sorted(k for (k,) in tuples(query(lake.context, {"x": wanted}, ["k"])))
        expected = [k for k, x in enumerate(DOUBLES) if x is not None and is_wanted(_order(x))]
        assert found == expected, wanted

    bounds = [0.0, -0.0, 1.0, math.inf, -math.inf, math.nan]
    for length in range(1, 7):
        for some in combinations([*bounds, 2.0], length):
            check(list(some), lambda x, some=some: x in map(_order, some))
    for low, high in product([None, *bounds[:-1]], repeat=2):
        if low is not None and high is not None and _order(low) >= _order(high):
            continue
        if low is not None or high is not None:
            check(
                Range(low, high, max_inclusive=True),
                lambda x, low=low, high=high: (
                    (low is None or x >= _order(low)) and (high is None or x <= _order(high))
                ),
            )


def test_nan_is_found_and_counts_as_the_largest_double(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path
) -> None:
    schema = Schema([Field("k", LONG)], [], [Field("d", DOUBLE, nullable=True)])
    lake = Lake(dsn, supplier, tmp_path, schema)
    lake.add([{"k": k, "d": d} for k, d in enumerate([1.0, math.nan, None, -math.nan])])
    lake.add([{"k": 4, "d": 5.0}])

    def keys_of(wanted: Any) -> list[int]:
        return query(lake.context, {"d": wanted}, ["k"]).read_all()["k"].to_pylist()

    assert keys_of(math.nan) == [1, 3]
    assert keys_of([math.nan, 5.0, None]) == [1, 2, 3, 4]
    assert keys_of(Range(2.0)) == [1, 3, 4]
    assert keys_of(Range(max=2.0)) == [0]
    assert keys_of(Range(0.0, math.inf)) == [0, 4]
    for empty in (Range(5.0, 1.0), Range(1.0, 1.0)):
        with pytest.raises(InvalidRange, match=f"range of 'd' from {empty.min} to 1.0 is empty"):
            keys_of(empty)
    with pytest.raises(InvalidRange, match="NaN cannot bound a range of 'd'"):
        keys_of(Range(1.0, math.nan))
