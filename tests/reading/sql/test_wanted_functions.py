"""The key ranges that statements need if their conditions compare functions of keys."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta

import duckdb
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dormouse.reading.row_filter import in_slices, rendered
from dormouse.reading.sql.conditions import DUCKDB, literal, type_name
from tests.support.model import DATE, DECIMAL, INT, LONG, TIMESTAMP, Field, Schema
from tests.wanted_ranges import of, shown, wanted

FIELDS = [Field("k", LONG), Field("i", INT), Field("d", DATE), Field("t", TIMESTAMP)]
SCHEMAS = {"f": Schema(FIELDS, values=[Field("x", DECIMAL(4, 1), True)])}
NUMBERS = [
    ("k + 1 > 5", "k(4,)"),
    ("k * 2 > 5", "k[3,)"),
    ("k * -2 >= 6", "k(,-3]"),
    ("k * 0 = 0", ""),
    ("-k > -150", "k(,149]"),
    ("10 - k > 3", "k(,7)"),
    ("k // 100 = 2", "k[200,299]"),
    ("k // 100 = 0", "k[-99,99]"),
    ("k // -100 = 2", "k[-299,-200]"),
    ("k // 100 < -1", "k(,-200]"),
    ("k / 100 = 2", "k=200"),
    ("k / 100 between 2 and 2.5", "k[200,250]"),
    ("k / 0 = 2", ""),
    ("abs(k) < 150", "k[-149,149]"),
    ("abs(k) = -1", "k none"),
    ("abs(k) > 150", ""),
    ("k // 100 in (2, 5, null)", "k[200,299]+[500,599]"),
    ("(k + 1) // 100 = 2", "k[199,298]"),
    ("i + 1 > 4000000000", "i none"),
    ("i::bigint * 1000 >= 5000", "i[5,)"),
    ("k::double / 10 * 1e300 > 5", ""),
    ("k::float + 1 > 5", ""),
    ("abs(try_cast(k as smallint)) = 5", ""),
    ("try(k + 1) = 5", ""),
    ("k + i = 5", ""),
    ("k + random() > 5", ""),
    ("k % 7 = 3", ""),
]
TIMES = [
    ("t::date = date '2026-03-01'", "t[2026-03-01 00:00:00,2026-03-01 23:59:59.999999]"),
    ("t::date < date '2026-03-01'", "t(,2026-02-28 23:59:59.999999]"),
    ("t::timestamp >= timestamp '2026-03-01 12:00:00'", "t[2026-03-01 12:00:00,)"),
    ("t at time zone 'UTC' >= timestamp '2026-03-01'", "t[2026-03-01 00:00:00,)"),
    ("t at time zone 'Europe/Berlin' >= timestamp '2026-03-01'", ""),
    ("t + interval 5 day > timestamptz '2026-03-06'", "t[2026-03-01 00:00:00.000001,)"),
    ("t - interval 5 minute <= timestamptz '2026-03-06'", "t(,2026-03-06 00:05:00]"),
    ("timestamptz '2026-03-06' - t < interval 5 day", "t[2026-03-01 00:00:00.000001,)"),
    ("year(t) = 2013", "t[2013-01-01 00:00:00,2013-12-31 23:59:59.999999]"),
    ("epoch_ms(t) > 0", "t[1970-01-01 00:00:00.000001,)"),
    ("month(t) = 3 and year(t) = 2013", "t[2013-03-01 00:00:00,2013-03-31 23:59:59.999999]"),
    ("quarter(d) in (1, 4) and year(d) = 2013", "d[2013-01-01,2013-03-31]+[2013-10-01,2013-12-31]"),
    ("month(d) > 12 and d between '1900-01-01' and '2100-12-31'", "d none"),
    ("month(d) > 12", "d(,1899-12-31]+[2101-01-01,)"),
    ("month(t) > 12 and t < '1850-01-01'", "t(,1850-01-01 00:00:00)"),
    ("quarter(d) = 2 and d > '2150-12-31'", "d(2150-12-31,)"),
    ("month(d) <> 3", ""),
    ("strftime(t, '%Y-%m') = '2013-05'", "t[2013-05-01 00:00:00,2013-05-31 23:59:59.999999]"),
    ("strftime('%Y%m%d', t) >= '20130504'", "t[2013-05-04 00:00:00,)"),
    ("strftime(d, '%Y') like '201%'", "d[2010-01-01,2019-12-31]"),
    ("strftime(d, '%m/%Y') = '05/2013'", ""),
    ("strftime(d, '%y-%m') = '13-05'", ""),
    ("strftime(d + 1, '%Y') = '2013'", ""),
    ("t::varchar like '2013-05%'", "t[2013-05-01 00:00:00,2013-05-31 23:59:59.999999]"),
    ("prefix(t::timestamp::varchar, '2013-05-04 1')", "t[2013-05-04 10:00:00,2013-05-04 19:59:59.999999]"),
    ("t::date::varchar > '2013-05-04'", "t[2013-05-05 00:00:00,)"),
    ("d::varchar = '2013-05'", "d none"),
    ("try_cast(d as varchar) = '2013-05-04'", ""),
    ("k::varchar = '5'", ""),
    ("coalesce(k, 0) > 5", "k(5,)"),
    ("coalesce(x, 3) > 5", ""),
    ("coalesce(k + 1, 0) > 5", ""),
    ("t + (x * interval 1 day) > timestamptz '2026-03-06'", ""),
    ("year(d) = 2013", "d[2013-01-01,2013-12-31]"),
    ("extract(year from d) >= 2024 and year(d) < 2025", "d[2024-01-01,2024-12-31]"),
    ("date_part('year', d) in (2001, 2003)", "d[2001-01-01,2001-12-31]+[2003-01-01,2003-12-31]"),
    ("year(d) = 20130", "d none"),
    ("d >= date '2013-05-04' and d < date '2013-05-04' + interval 1 month", "d[2013-05-04,2013-06-03]"),
    ("d > timestamp '2024-05-04 12:00:00'", "d[2024-05-05,)"),
    ("d + 1 = date '2013-05-04'", "d=2013-05-03"),
    ("d - date '2013-05-04' = 1", "d=2013-05-05"),
    ("date '2013-05-04' - d between 1 and 2", "d[2013-05-02,2013-05-03]"),
    ("last_day(d) = date '2013-05-31'", "d[2013-05-01,2013-05-31]"),
    ("d < 'infinity'", ""),
    ("d::varchar = '2013-05-04'", "d=2013-05-04"),
]


def _with_times(text: str) -> str:
    """Returns the ranges of table `f` with times as ISO 8601 prints them."""
    made = text.removeprefix("f").strip()
    for one in ("datetime.datetime(", "datetime.date("):
        while one in made:
            before, _, rest = made.partition(one)
            given, _, rest = rest.partition("datetime.timezone.utc)" if "time(" in one else ")")
            numbers = [int(number) for number in given.removesuffix(", tzinfo=").split(", ")]
            value = datetime(*numbers) if "time(" in one else date(*numbers)  # type: ignore[arg-type]
            made = f"{before}{value}{rest}"
    return made


@pytest.mark.few(60)
@pytest.mark.parametrize(("condition", "expected"), [*NUMBERS, *TIMES])
def test_functions_of_keys_bound_the_ranges(condition: str, expected: str) -> None:
    assert _with_times(of(f"from f where {condition}", schemas=SCHEMAS)).replace("=date", "") == expected


ROWS = 400
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MOMENTS = [
    EPOCH, EPOCH - timedelta(microseconds=1),
    datetime(1, 1, 1, tzinfo=UTC), datetime(2024, 2, 29, 23, tzinfo=UTC),
    datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), datetime(1582, 10, 10, tzinfo=UTC),
    datetime(2026, 1, 31, 12, tzinfo=UTC), datetime(2013, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    datetime(2014, 1, 1, tzinfo=UTC), datetime(1900, 3, 1, tzinfo=UTC), datetime(100, 2, 28, tzinfo=UTC),
]  # fmt: skip
WHOLES = [
    0, 1, -1, 2, -2, 3, 9, 99, 100, 101, -100, -101, 150, 199, 200, -199, (1 << 24) + 1, (1 << 31) - 2,
    -(1 << 31),
    (1 << 53) + 1, -(1 << 53) - 3, (1 << 62) + 1, (1 << 63) - 2, -(1 << 63) + 1, -(1 << 63),
]  # fmt: skip
YEARS = ["2013", "1", "0", "9999", "2000", "10399"]
OPERATORS = st.sampled_from(["=", "<", "<=", ">", ">=", "<>", "is not distinct from", "is distinct from"])
LITERALS = st.one_of(
    st.sampled_from(list(map(str, WHOLES))),
    st.sampled_from(
        ["0.5", "-1.5", "2::double", "1e2", "-0.0::double", "1e300", "1e-300", "'nan'::double", "null",
         "0.01",
         "'inf'::double", "3::float", "100::utinyint", "7::hugeint", "1e18", "9.99::decimal(18,3)"],
    ),
)  # fmt: skip
INTERVALS = st.sampled_from(
    ["interval 1 day", "interval 1 month", "interval '-1 month'", "interval 13 month", "interval 90 minute",
     "interval '1 month -1 day'", "interval 0 day", "interval 1 microsecond", "interval 400 year",
     "interval '-31 days -1 microsecond'"]
)  # fmt: skip
DATES = st.one_of(
    st.dates().map(lambda day: f"date '{day}'"),
    st.sampled_from([f"date '{one.date()}'" for one in MOMENTS] + ["date 'infinity'", "null::date"]),
)
STAMPS = st.one_of(
    st.datetimes().map(lambda one: f"timestamptz '{one}+00'"),
    st.sampled_from([f"timestamptz '{one}'" for one in MOMENTS] + ["timestamptz '-infinity'"]),
)
NUMBER = st.recursive(
    st.sampled_from(["k", "k", "i", "i", "k::double", "k::float", "k::hugeint", "i::decimal(20, 3)",
                     "year(t)",
                     "year(d)", "epoch(t)", "epoch_ms(t)", "epoch_us(t)", "d - date '2013-05-04'",
                     "isoyear(d)",
                     "month(t)", "epoch(d)"]),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), LITERALS),
        st.builds("({} {} {})".format, LITERALS, st.sampled_from(["+", "-", "*", "/", "//"]), inner),
        st.builds("{}({})".format, st.sampled_from(["-", "abs", "floor", "ceil", "round", "trunc"]), inner),
        st.builds("({})::{}".format, inner, st.sampled_from(
            ["bigint", "int", "double", "float", "decimal(18, 2)", "hugeint", "decimal(5, 1)", "utinyint"])),
    ),
    max_leaves=4,
)  # fmt: skip
TIME = st.recursive(
    st.sampled_from(["t", "t", "d", "d", "t::date", "d::timestamp", "t::timestamp", "d::timestamptz"]),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("+-"), INTERVALS),
        st.builds("({} {} {}::int)".format, inner, st.sampled_from("+-"), st.sampled_from(["1", "-40", "0"])),
        st.builds("date_trunc('{}', {})".format, st.sampled_from(
            ["year", "month", "week", "day", "hour", "quarter", "decade", "century", "second"]), inner),
        st.builds("last_day({})".format, inner),
        st.builds("({} at time zone 'UTC')".format, inner),
        st.builds("({})::{}".format, inner, st.sampled_from(["date", "timestamp", "timestamptz"])),
    ),
    max_leaves=3,
)  # fmt: skip
DIFFERENCE = st.one_of(
    st.builds("({} - {})".format, STAMPS, TIME), st.builds("({} - {})".format, TIME, STAMPS)
)
TEXT = st.one_of(
    st.builds("strftime({}, '{}')".format, TIME, st.sampled_from(
        ["%Y", "%Y-%m", "%Y-%m-%d", "%Y%m%d", "%Y-%m-%d %H:%M:%S", "x%Y", "%m", "%Y%j", "%Y %%", "%-d"])),
    st.builds("{}::varchar".format, TIME),
)  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(["''", "'2013'", "'2013-12'", "'20131231'", "'1970-01-01 00:00:00+00'", "'x2014'", "'9'",
                     "'0001-01-01'", "'9999-12-31 23:59:59.999999+00'", "'-'", "null"]),
    st.datetimes().map(lambda one: f"'{one}'"),
)  # fmt: skip
CONDITIONS = st.one_of(
    st.builds("{} {} {}".format, TEXT, OPERATORS, TEXTS),
    st.builds("{} between {} and {}".format, TEXT, TEXTS, TEXTS),
    st.builds("{} like '{}'".format, TEXT, st.sampled_from(["20%", "2013-12%", "x%", "9999%", "1970_0"])),
    st.builds(
        "{}({}) {} {}".format,
        st.sampled_from(["month", "quarter", "extract(month from t) + month"]),
        TIME,
        OPERATORS,
        st.sampled_from(["1", "2", "12", "0", "4.5", "null"]),
    ),
    st.builds("{}({}) in ({}, {})".format, st.sampled_from(["month", "quarter"]), TIME, LITERALS, LITERALS),
    st.builds("coalesce({}, {}) {} {}".format, NUMBER, LITERALS, OPERATORS, LITERALS),
    st.builds("coalesce({}, {}) {} {}".format, TIME, STAMPS, OPERATORS, STAMPS),
    st.builds("{} {} {}".format, NUMBER, OPERATORS, LITERALS),
    st.builds("{} {} {}".format, LITERALS, OPERATORS, NUMBER),
    st.builds("{} between {} and {}".format, NUMBER, LITERALS, LITERALS),
    st.builds("{} in ({}, {}, null)".format, NUMBER, LITERALS, LITERALS),
    st.builds("{} {} {}".format, TIME, OPERATORS, DATES),
    st.builds("{} {} {}".format, STAMPS, OPERATORS, TIME),
    st.builds("{} between {} and {}".format, TIME, DATES, STAMPS),
    st.builds("{} in ({}, {})".format, TIME, DATES, DATES),
    st.builds("{} {} {}".format, DIFFERENCE, OPERATORS, INTERVALS),
    st.builds(
        "year({}) {} {}".format, TIME, OPERATORS, st.sampled_from(["2013", "1", "0", "9999", "2000", "10399"])
    ),
)


@pytest.fixture(scope="module")
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    """Yields a connection with a table of rows, whose keys lie at edges and at random places."""
    chosen = random.Random(1)

    def moment() -> datetime:
        one = chosen.choice(MOMENTS)
        # near an edge, and within the years 1 to 9999
        away = timedelta(
            microseconds=chosen.choice([0, 0, 1, -1, 86_400_000_000, -3_600_000_000, 2_592_000_000_000])
        )
        return min(max(one, MOMENTS[2] + abs(away)), MOMENTS[4] - abs(away)) + away

    def whole(limit: int) -> int:
        return chosen.choice([one for one in WHOLES if -limit <= one < limit])

    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        columns = ", ".join(f"{field.name} {type_name(field.type)}" for field in FIELDS)
        connection.execute(f"CREATE TABLE every_f ({columns}, x DECIMAL(4, 1))")
        for _ in range(ROWS):
            day = moment()
            row = whole(1 << 63), whole(1 << 31), day.date(), moment()
            texts = ", ".join(literal(field, value) for field, value in zip(FIELDS, row, strict=True))
            connection.execute(f"INSERT INTO every_f VALUES ({texts}, 1.5)")
        yield connection


@settings(
    max_examples=4 * settings.default.max_examples, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(condition=CONDITIONS)
@example(condition="d + interval 1 month = timestamp '2026-02-28'")
@example(condition="k / 1 = 9007199254740992::double")
@example(condition="0 < -(k::utinyint)")
@example(condition="k::float - 1 < 16777216")
@example(condition="k::double * 1e300 * 1e10 / 1e300 > 1e15")
@example(condition="year(t - interval 1 day) = 1")
@example(condition="date_trunc('century', t - interval 1 month) >= timestamptz '0001-01-01'")
def test_no_row_that_meets_a_condition_on_a_function_lies_outside_the_ranges(
    database: duckdb.DuckDBPyConnection, condition: str
) -> None:
    # TRY, so that a row whose value is out of its type's range does not end the statement
    meets = f"coalesce(try({condition}), false)"
    try:
        database.execute(f"SELECT * FROM every_f WHERE {condition} LIMIT 0")
        [[rows]] = database.execute(f"SELECT count(*) FROM every_f WHERE {meets}").fetchall()
    except duckdb.Error:
        return
    ranges = wanted(SCHEMAS, f"from f where {condition}").ranges
    inside = rendered(in_slices(SCHEMAS["f"], [ranges["f"]]), DUCKDB) if "f" in ranges else "false"
    [[found]] = database.execute(
        f"SELECT count(*) FROM every_f WHERE ({inside or 'true'}) AND {meets}"
    ).fetchall()
    assert found == rows, shown(ranges)
