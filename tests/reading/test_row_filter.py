"""Every engine returns the rows that the filter in Python returns, for values of all kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cache, reduce
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datafusion import SessionContext
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame

from dormouse.data.arrow_schema import arrow_type
from dormouse.data.datafusion_session import sorted_session
from dormouse.errors import ObjectAlreadyExists
from dormouse.objects.store import open_store
from dormouse.reading.row_filter import (
    PLAIN,
    Every,
    Fails,
    Filter,
    InRanges,
    IsNull,
    OneOf,
    Some,
    every,
    in_slices,
    is_of,
    meets,
    remains,
    rendered,
    some,
)
from dormouse.reading.scan_session import DATAFUSION
from dormouse.reading.sql.conditions import DUCKDB
from dormouse.reading.where import Condition
from dormouse.spark import frames
from dormouse.spark.frames import SPARK
from tests.support.model import (
    BYTES,
    DATE,
    DECIMAL,
    DOUBLE,
    FLOAT,
    INT,
    LONG,
    STRING,
    TIMESTAMP,
    Field,
    Range,
    Schema,
)
from tests.support.reading import Deletion, KeyRanges, row_sets

MOMENTS = [
    datetime(1, 1, 1, tzinfo=UTC),
    datetime(1582, 10, 4, tzinfo=UTC),
    datetime(1970, 1, 1, 0, 0, 0, 1, UTC),
]
VALUES: dict[str, tuple[Any, list[Any]]] = {
    "n": (LONG, [-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1]),
    "i": (INT, [-(2**31), -1, 0, 7, 2**31 - 1]),
    "x": (DOUBLE, [-math.inf, -1.5, -0.0, 0.0, 5e-324, 1.5, math.inf, math.nan]),
    "f": (FLOAT, [-math.inf, -0.0, 0.0, 1.5, math.nan]),
    "s": (STRING, ["", "a", "a'b", "\0", "é", "z\n", "𐀀", "\uffff"]),
    "b": (BYTES, [b"", b"\0", b"a", b"\xff"]),
    "t": (TIMESTAMP, [*MOMENTS, datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)]),
    "d": (DATE, [date(1, 1, 1), date(1582, 10, 15), date(1970, 1, 1), date(9999, 12, 31)]),
    "c": (DECIMAL(12, 3), [Decimal("-999999999.999"), Decimal("-0.001"), Decimal(0), Decimal("0.100")]),
}
KEY_VALUES: dict[str, list[Any]] = {"k": [-10, 0, 3, 9], "w": ["", "m", "z"]}
FIELDS = {name: Field(name, kind, nullable=True) for name, (kind, _) in VALUES.items()}
KEYS = [Field("k", LONG), Field("w", STRING)]
NUMBER = Field("number", LONG)
SCHEMA = Schema(KEYS, values=[*FIELDS.values()])
ROWS_PER_GROUP = 8


def rows() -> list[dict[str, Any]]:
    """Returns rows sorted by key. Each group of rows has at most two values in a column.

    So engines can skip groups.
    """
    chance = Random(1)
    found: list[dict[str, Any]] = []
    for group in range(24):
        few = {name: chance.sample([*values, None], 2) for name, (_, values) in VALUES.items()}
        for at in range(ROWS_PER_GROUP):
            number = group * ROWS_PER_GROUP + at
            key = {"k": number // 12 - 10, "w": ["", "m", "z"][number // 4 % 3]}
            found.append(key | {name: chance.choice(some) for name, some in few.items()})
    return found


ROWS = rows()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the rows as Parquet with small row groups and statistics; returns the path.

    A second file, `ours`, has no statistics of columns with NaN.
    """
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    schema = pa.schema([pa.field(one.name, arrow_type(one.type)) for one in SCHEMA.fields])
    numbered = pa.schema([*schema, pa.field("number", pa.int64())])
    table = pa.Table.from_pylist([row | {"number": n} for n, row in enumerate(ROWS)], schema=numbered)
    pq.write_table(table, path, row_group_size=ROWS_PER_GROUP)
    # DuckDB relies on minima and maxima, which leave NaN out, so our files have none for numbers with NaN
    exact = [name for name in numbered.names if name not in ("x", "f")]
    pq.write_table(table, path.with_stem("ours"), row_group_size=ROWS_PER_GROUP, write_statistics=exact)
    return path


def ranges_of(name: str) -> st.SearchStrategy[Range]:
    values = VALUES[name][1] if name in VALUES else KEY_VALUES[name]
    picked = st.sampled_from(values)
    exact = picked.map(lambda value: Range(value, value, max_inclusive=True))

    def between(pair: tuple[Any, Any], low: bool, high: bool) -> Range:
        first, last = sorted(pair, key=lambda value: (value != value, 0.0 if value != value else value))
        same = first == last or (first != first and last != last)
        return Range(first, last, low or same, high or same)

    return st.one_of(
        exact,
        st.builds(between, st.tuples(picked, picked), st.booleans(), st.booleans()),
        st.builds(lambda value, inclusive: Range(min=value, min_inclusive=inclusive), picked, st.booleans()),
        st.builds(lambda value, inclusive: Range(max=value, max_inclusive=inclusive), picked, st.booleans()),
    )


@st.composite
def conditions(draw: st.DrawFn) -> Condition:
    name = draw(st.sampled_from(list(FIELDS)))
    ranges = draw(st.lists(st.one_of(ranges_of(name), st.just(Range())), max_size=4))
    return Condition(FIELDS[name], tuple(ranges), draw(st.booleans()))


@st.composite
def slices(draw: st.DrawFn) -> KeyRanges:
    names = draw(st.lists(st.sampled_from(["k", "w"]), unique=True))
    return KeyRanges({name: draw(st.lists(ranges_of(name), min_size=1, max_size=3)) for name in names})


@st.composite
def deletions(draw: st.DrawFn) -> Deletion:
    return Deletion(1, "", draw(slices()), tuple(draw(st.lists(conditions(), max_size=2))))


def exact(values: Sequence[Any]) -> tuple[Range, ...]:
    return tuple(Range(value, value, max_inclusive=True) for value in values)


@st.composite
def alike(draw: st.DrawFn) -> list[Deletion]:
    """Draws many deletions, most of which have a form that several others have too."""
    chance = draw(st.randoms(use_true_random=False))
    # few kinds at once, or no row would be left
    kinds, found = chance.sample(range(12), 2), list[Deletion]()
    for number in range(draw(st.integers(20, 300))):
        low = chance.randint(-12, 9)
        word, value = chance.choice(KEY_VALUES["w"]), chance.choice(VALUES["n"][1])
        x, kind = chance.choice(VALUES["x"][1]), chance.choice(kinds)
        keys: dict[str, Sequence[Range]] = {"k": exact([low]), "w": exact([word])}
        if kind < 4:
            keys = {"k": [exact([low]), exact([low, low + 7]), [Range(low, low + 1)], [Range(max=-11)]][kind]}
        conditions = [
            *([Condition(FIELDS["n"], exact([value]), chance.random() < 0.2)] if kind in (5, 6) else []),
            *(
                [Condition(FIELDS["x"], exact([x]) if x == x else (Range(x, x, True, True),))]
                if kind == 6
                else []
            ),
            *(
                [
                    Condition(
                        FIELDS["i"],
                        (Range(*sorted(chance.sample(VALUES["i"][1], 2))),),
                        chance.random() < 0.1,
                    )
                ]
                if kind in (7, 8)
                else []
            ),
            *([Condition(FIELDS["x"], exact([x]))] if kind == 10 else []),
            *([Condition(FIELDS["s"], exact(chance.sample(VALUES["s"][1], 2)))] if kind == 11 else []),
        ]
        keys = {} if kind in (5, 8, 10, 11) else keys
        found.append(Deletion(number, "", KeyRanges(keys), tuple(conditions)))
    return found


@st.composite
def listed(draw: st.DrawFn) -> OneOf:
    """Draws a test of some columns together: most of its rows are in the file."""
    names = draw(st.lists(st.sampled_from([*FIELDS]), unique=True, max_size=3))
    names = [*draw(st.sampled_from([[], ["k"], ["k", "w"]])), *names] or ["k"]
    chance = draw(st.randoms(use_true_random=False))
    rows = [chance.choice(ROWS) for _ in range(draw(st.integers(1, 40)))]
    rows = [row if chance.random() < 0.7 else row | {names[-1]: None} for row in rows]
    rows = [{name: row[name] for name in names} for row in rows]
    rows = [row for row in rows if None not in (row.get("k", 0), row.get("w", ""))] or rows[:1]
    fields = [SCHEMA.field(name) for name in names]
    schema = pa.schema([pa.field(f"c{n}", arrow_type(one.type)) for n, one in enumerate(fields)])
    columns = [[row[name] for row in rows] for name in names]
    return OneOf(row_set(pa.table(columns, schema=schema), tuple(fields)))


def row_set(table: pa.Table, fields: tuple[Field, ...]) -> row_sets.RowSet:
    """Returns a set of rows; its file has other names of columns than the table."""
    sink = pa.BufferOutputStream()
    pq.write_table(table.sort_by([(name, "ascending") for name in table.column_names]), sink)
    content = sink.getvalue().to_pybytes()
    name = row_sets.content_name("data/", content)
    objects = open_store(Path(FOLDER.name).as_uri())
    with suppress(ObjectAlreadyExists):
        objects.put(name, content)
    return row_sets.RowSet((name,), tuple(table.column_names), fields, 1, len(table), objects)


FOLDER = TemporaryDirectory()
FILTERS: st.SearchStrategy[Filter] = st.recursive(
    st.one_of(
        listed(),
        conditions().map(meets),
        st.lists(slices(), min_size=1, max_size=3).map(lambda found: in_slices(SCHEMA, found)),
        st.lists(deletions(), max_size=3).map(lambda found: remains(SCHEMA, found)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(every), st.lists(inner, max_size=3).map(some), inner.map(Fails)
    ),
    max_leaves=6,
)


def expected(node: Filter) -> list[int]:
    judge = rendered(node, PLAIN)
    return [number for number, row in enumerate(ROWS) if judge(row)]


@cache
def datafusion_session() -> SessionContext:
    return sorted_session(options={"datafusion.execution.parquet.pushdown_filters": "true"})


@cache
def duckdb_connection() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute("set timezone = 'UTC'")
    return connection


def by_datafusion(file: Path, node: Filter) -> list[int]:
    frame = datafusion_session().read_parquet(str(file))
    frame = frame.filter(rendered(node, DATAFUSION)).select("number")
    return sorted(number for batch in frame.collect() for number in batch.column(0).to_pylist())


def by_duckdb(file: Path, node: Filter) -> list[int]:
    ours = file.with_stem("ours")
    text = f"select number from read_parquet('{ours}') where {rendered(node, DUCKDB)} order by 1"
    return [number for (number,) in duckdb_connection().execute(text).fetchall()]


ZEROS = InRanges(FIELDS["x"], (Range(0.0, 0.0, max_inclusive=True), Range(1.5, 1.5, max_inclusive=True)))
NAN = InRanges(FIELDS["x"], (Range(min=math.nan),))
LARGE = InRanges(FIELDS["f"], (Range(min=1.0),))
SMALL = InRanges(FIELDS["x"], (Range(max=0.0, max_inclusive=True),))
NULLS = Some((IsNull(FIELDS["s"]), InRanges(FIELDS["s"], ())))
MANY_ZEROS = InRanges(FIELDS["x"], tuple(Range(n / 8, n / 8, max_inclusive=True) for n in range(2_000)))
MANY = InRanges(FIELDS["n"], tuple(Range(n, n, max_inclusive=True) for n in range(-3_000, 3_000)))
NOTHING_KNOWN = Fails(
    Every((InRanges(FIELDS["d"], (Range(min=date(1970, 1, 1)),)), Fails(IsNull(FIELDS["d"]))))
)
EXAMPLES = (ZEROS, MANY_ZEROS, NAN, LARGE, SMALL, NULLS, MANY, NOTHING_KNOWN)


@pytest.mark.parametrize("by", [by_datafusion, by_duckdb])
@pytest.mark.parametrize("name", ["x", "f"])
def test_an_engine_treats_nan_as_the_largest_number_at_each_end_of_a_range(
    file: Path, name: str, by: Callable[[Path, Filter], list[int]]
) -> None:
    for low, high in product([None, -math.inf, 1.5, math.nan], repeat=2):
        for low_inclusive, high_inclusive in product([True, False], repeat=2):
            item = Range(low, high, low_inclusive, high_inclusive)
            node = InRanges(FIELDS[name], (item,))
            if item != Range():
                assert (item, by(file, node)) == (item, expected(node))


def test_engines_return_the_rows_of_the_plain_filter(file: Path) -> None:
    def check(node: Filter) -> None:
        wanted = expected(node)
        assert by_datafusion(file, node) == wanted
        assert by_duckdb(file, node) == wanted

    for one in EXAMPLES:
        check = example(one)(check)
    given(FILTERS)(check)()


@pytest.mark.slow
def test_spark_returns_the_rows_of_the_plain_filter(file: Path, spark: Any) -> None:
    frame = frames.reader(spark, Schema(KEYS, values=[*FIELDS.values(), NUMBER]), [file.name]).parquet(
        str(file)
    )

    def check(nodes: list[Filter]) -> None:
        """Runs several filters in one job."""
        found = [
            frame.where(rendered(node, SPARK)).selectExpr(f"{n} as filter", "number")
            for n, node in enumerate(nodes)
        ]
        rows = sorted(map(tuple, reduce(DataFrame.unionAll, found).collect()))
        assert rows == [(n, number) for n, node in enumerate(nodes) for number in expected(node)]

    check([*EXAMPLES])
    several = st.lists(FILTERS, min_size=5, max_size=5)
    settings(max_examples=12)(given(several)(check))()


def test_many_deletions_together_match_the_rows_that_each_of_them_matches(file: Path) -> None:
    @given(
        st.one_of(
            alike(),
            st.lists(deletions(), max_size=60),
            alike().flatmap(lambda some: deletions().map(lambda one: [*some, one])),
        )
    )
    def check(some: list[Deletion]) -> None:
        judges = [rendered(is_of(SCHEMA, one), PLAIN) for one in some]
        left = [number for number, row in enumerate(ROWS) if not any(judge(row) for judge in judges)]
        together = remains(SCHEMA, some)
        assert expected(together) == left
        assert by_datafusion(file, together) == left
        assert by_duckdb(file, together) == left

    check()


def test_plain_filters_have_the_three_values_of_sql() -> None:
    """The values are true, false and unknown. A row counts only if its filter is true."""
    field = FIELDS["n"]
    positive = InRanges(field, (Range(min=1),))
    judged: Sequence[tuple[Filter, list[bool | None]]] = [
        (positive, [True, False, None]),
        (Fails(positive), [False, True, True]),
        (Every(()), [True, True, True]),
        (some([]), [False, False, False]),
        (Every((positive, Fails(IsNull(field)))), [True, False, False]),
        (Some((positive, IsNull(field))), [True, False, True]),
        (Every((positive, positive)), [True, False, None]),
        (Some((positive, positive)), [True, False, None]),
    ]
    for node, wanted in judged:
        judge = rendered(node, PLAIN)
        assert [judge({"n": value}) for value in (1, 0, None)] == wanted
