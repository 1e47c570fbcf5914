"""Values of row tables: checks, errors that name a value, and equal rules for arrays and single values."""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dormouse as dm
from dormouse.cli.parsing import read_json
from dormouse.errors import InvalidColumn, InvalidInput, InvalidRow
from dormouse.rows.changes import parse_changes
from dormouse.rows.columns import TYPES, check_columns, text_value, value_of
from dormouse.rows.values import array_of, of_text, to_python, with_default
from dormouse.service.declared import parse_json
from dormouse.sources.text_format import text_format
from tests.support.rows import Column

ZONE = timezone(timedelta(hours=2))
FILE = f"file:{'0' * 32}:12:{'a' * 64}:Föto 1.jpg"
BAD: list[tuple[Column, Any, str]] = [
    (dm.Column("n", "INTEGER"), "x", "row 2, column 'n' (INTEGER): 'x' is not a whole number"),
    (dm.Column("n", "INTEGER"), 1.5, "row 2, column 'n' (INTEGER): 1.5 is not a whole number"),
    (dm.Column("n", "INTEGER"), 2.0**53 + 2, "9007199254740994.0 is not a whole number"),
    (dm.Column("n", "INTEGER"), math.inf, "row 2, column 'n' (INTEGER): inf is not a whole number"),
    (dm.Column("n", "INTEGER"), True, "row 2, column 'n' (INTEGER): True is not a whole number"),
    (dm.Column("n", "INTEGER"), 1 << 63, f"row 2, column 'n' (INTEGER): {1 << 63} does not fit 64 bits"),
    (dm.Column("x", "DOUBLE"), 2**53 + 1, "9007199254740993 is not exact in a double"),
    (dm.Column("x", "DOUBLE"), 10**400, "is larger than any double"),
    (dm.Column("x", "DOUBLE"), "1", "row 2, column 'x' (DOUBLE): '1' is not a number"),
    (dm.Column("s", "STRING", 3), "four", "'four' has 4 characters, and may have 3"),
    (dm.Column("s", "STRING"), 4, "row 2, column 's' (STRING): 4 is not text"),
    (dm.Column("s", "STRING"), "\ud800", "has half a surrogate pair"),
    (dm.Column("s", "STRING"), "a\0b", "has a NUL character"),
    (dm.Column("s", "STRING", enum=["a", "b"]), "c", "'c' is none of 'a', 'b'"),
    (dm.Column("d", "DATE"), "yesterday", "is not a date, like 2024-01-31T12:00:00Z"),
    (dm.Column("b", "BOOLEAN"), 1, "row 2, column 'b' (BOOLEAN): 1 is neither true nor false"),
    (dm.Column("e", "ENTITY"), "", "row 2, column 'e' (ENTITY): '' is empty"),
    (dm.Column("e", "ENTITY"), "no table", "is no reference to a table or a row"),
    (dm.Column("e", "ENTITY"), "t:0", "is no reference to a table or a row"),
    (dm.Column("l", "LINK"), "javascript:alert(1)", "is no link"),
    (dm.Column("l", "LINK"), "https://a.org/b c", "is no link"),
    (dm.Column("l", "LINK"), "https://a.org\n", "is no link"),
    (dm.Column("l", "LINK"), "https:///etc/passwd", "is no link"),
    (dm.Column("f", "FILE"), "abc", "is no reference to a file: put the file first"),
    (dm.Column("f", "FILE"), f"{FILE}\n", "is no reference to a file: put the file first"),
    (dm.Column("d", "DATE"), datetime(2024, 1, 1), "has no time zone: give it one"),
    (dm.Column("l", "LINK"), "x" * 1_001, "has 1,001 characters, and may have 1,000"),
    (dm.Column("x", "DOUBLE"), 2**53 + 1, "is not exact in a double"),
    (dm.Column("j", "JSON"), {1}, "is not a JSON value"),
    (dm.Column("j", "JSON"), [math.nan], "is not a JSON value"),
]
GOOD: list[tuple[Column, Any, Any]] = [
    (dm.Column("n", "INTEGER"), -(1 << 63), -(1 << 63)),
    (dm.Column("n", "INTEGER"), 1.0, 1),
    (dm.Column("n", "INTEGER"), math.nan, None),
    (dm.Column("s", "STRING"), math.nan, None),
    (dm.Column("j", "JSON"), math.nan, None),
    (dm.Column("d", "DATE"), pd.NaT, None),
    (dm.Column("x", "DOUBLE"), "-Infinity", -math.inf),
    (dm.Column("x", "DOUBLE"), 3, 3.0),
    (dm.Column("x", "DOUBLE"), 10**23, 1e23),
    (dm.Column("d", "DATE"), 1_700_000_000_000, 1_700_000_000_000),
    (dm.Column("d", "DATE"), datetime(2024, 1, 1, 2, tzinfo=ZONE), 1_704_067_200_000),
    (dm.Column("d", "DATE"), date(2024, 1, 1), 1_704_067_200_000),
    (dm.Column("d", "DATE"), datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC), -1),
    (dm.Column("j", "JSON"), {"a": [1, None, "é"]}, {"a": [1, None, "é"]}),
    (dm.Column("s", "STRING"), "é" * 50, "é" * 50),
    (dm.Column("d", "DATE"), "2024-01-01T00:00:00", 1_704_067_200_000),
    (dm.Column("f", "FILE"), FILE, FILE),
    *((dm.Column("e", "ENTITY"), one, one) for one in ("t", "my-table:17", "t:17:3")),
    *(
        (dm.Column("l", "LINK"), one, one)
        for one in ("HTTPS://ü.org/a?b=c#d", "mailto:a@b.org", "s3://bucket/key")
    ),
]
TEXTS: list[tuple[str, str, Any]] = [
    ("INTEGER", " 12 ", 12), ("INTEGER", "+5", 5), ("INTEGER", "007", 7), ("INTEGER", "0x10", InvalidRow),
    ("INTEGER", "1_0", InvalidRow), ("INTEGER", "１", InvalidRow),
    ("INTEGER", "9223372036854775808", InvalidRow),
    ("DOUBLE", "1e3", 1000.0), ("DOUBLE", "Infinity", math.inf), ("DOUBLE", "one", InvalidRow),
    ("BOOLEAN", "TRUE", True), ("BOOLEAN", "0", False), ("BOOLEAN", "yes", InvalidRow),
    ("DATE", "2024-01-01", 1_704_067_200_000), ("DATE", "2024-01-01T00:00:00Z", 1_704_067_200_000),
    ("DATE", "2024-01-01T02:00:00+02:00", 1_704_067_200_000), ("DATE", "-5", -5),
    ("DATE", "2024-13-01", InvalidRow),
    ("JSON", ' {"a": 1}', {"a": 1}), ("JSON", "NaN", InvalidRow), ("JSON", "{", InvalidRow),
    ("STRING", " a ", " a "), ("STRING", "", ""), ("LINK", "", InvalidRow), ("INTEGER", "", None),
    ("DOUBLE", "1e400", InvalidRow), ("DOUBLE", "-1e400", InvalidRow), ("DOUBLE", "-inf", -math.inf),
    ("INTEGER", "0x0A", InvalidRow), ("DOUBLE", "1e-400", InvalidRow), ("DOUBLE", "0e5", 0.0),
    ("DOUBLE", "123456789012345678.12", InvalidRow), ("DOUBLE", "9007199254740993", InvalidRow),
    ("DOUBLE", "18446744073709551616", 2.0**64), ("DOUBLE", "0.1234567890123456789", 0.12345678901234568),
]  # fmt: skip


@pytest.mark.parametrize(("column", "value", "said"), BAD)
def test_a_value_that_does_not_fit_is_named(column: Column, value: Any, said: str) -> None:
    with pytest.raises(InvalidRow) as raised:
        array_of(column, [None, value])
    assert said in str(raised.value)
    assert str(raised.value).startswith("row 2, column ")


@pytest.mark.parametrize(("column", "value", "expected"), GOOD)
def test_a_value_that_fits_is_read_back(column: Column, value: Any, expected: Any) -> None:
    assert to_python(column, array_of(column, [value, None])) == [expected, None]


def test_nan_is_kept() -> None:
    assert math.isnan(to_python(dm.Column("x", "DOUBLE"), array_of(dm.Column("x", "DOUBLE"), [math.nan]))[0])


@pytest.mark.parametrize(("kind", "text", "expected"), TEXTS)
def test_texts_of_csv_are_parsed(kind: Any, text: str, expected: Any) -> None:
    column = dm.Column("c", kind)
    texts = pa.array([None, text])
    if expected is InvalidRow:
        with pytest.raises(InvalidRow, match="row 2, column 'c'"):
            of_text(column, texts)
    else:
        assert to_python(column, of_text(column, texts)) == [None, expected]


@given(
    st.sampled_from(TYPES),
    st.lists(st.one_of(st.none(), st.text(max_size=8), st.from_regex(r"-?\d{1,6}|-?\de\d{3}"))),
)
def test_arrays_of_texts_are_parsed_like_single_texts(kind: Any, texts: list[str | None]) -> None:
    column = dm.Column("c", kind)
    texts = [None if text is None else text.replace("\0", "").strip() or None for text in texts]
    try:
        expected: Any = [text_value(column, text, "row") for text in texts]
    except InvalidRow:
        expected = InvalidRow
    try:
        found: Any = of_text(column, pa.array(texts, pa.string())).to_pylist()
    except InvalidRow:
        found = InvalidRow
    if kind in {"BOOLEAN", "DATE", "DOUBLE"} and expected is InvalidRow:
        return  # Arrow accepts some more forms
    assert str(found) == str(expected)


def test_an_explicit_null_is_the_default() -> None:
    column = dm.Column("n", "INTEGER", default=3)
    assert with_default(column, array_of(column, [None, 1])).to_pylist() == [3, 1]
    of_json = dm.Column("j", "JSON", default={"a": 1})
    assert to_python(of_json, with_default(of_json, array_of(of_json, [None]))) == [{"a": 1}]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: dm.Column("row_id", "STRING"), "is reserved"),
        (lambda: dm.Column("ROW_etag", "STRING"), "is reserved"),
        (lambda: dm.Column("_dropped_4", "STRING"), "are reserved"),
        (lambda: dm.Column("two words", "STRING"), "column name 'two words': use letters"),
        (lambda: dm.Column("s", "TEXT"), "'TEXT' is no type; they are INTEGER"),  # type: ignore[arg-type]
        (lambda: dm.Column("s", "STRING", 1_001), "size_max is 1 to 1000 characters, not 1001"),
        (lambda: dm.Column("n", "INTEGER", 5), "only a STRING has a size_max"),
        (lambda: dm.Column("n", "INTEGER", default="x"), "the default, column 'n' (INTEGER): 'x' is not"),
        (lambda: dm.Column("n", "INTEGER", default=4, enum=[1, 2]), "4 is none of 1, 2"),
        (lambda: dm.Column("s", "STRING", enum=[]), "an enum has 1 to 1000 values"),
        (lambda: dm.Column("j", "JSON", enum=[1]), "a JSON has no enum"),
        (lambda: check_columns([dm.Column("a", "JSON"), dm.Column("A", "JSON")]), "must differ"),
        (lambda: check_columns([dm.Column(f"c{n}", "JSON") for n in range(153)]), "at most 152 columns"),
    ],
)
def test_an_invalid_column_is_refused(make: Any, said: str) -> None:
    with pytest.raises(InvalidColumn) as raised:
        make()
    assert said in str(raised.value)


def test_columns_are_read_back_from_json() -> None:
    column = dm.Column("s", "STRING", 9, default="a", enum=["a", "b"], column_id=4)
    assert Column.from_json(column.to_json()) == column
    assert value_of(column, "b", "row 1") == "b"


@pytest.mark.parametrize("columns", [5, "name", [1], {"name": 1}])
def test_the_columns_of_a_load_are_names(columns: object) -> None:
    with pytest.raises(InvalidInput, match="change 1: the columns of load_csv are a list of names"):
        parse_changes([{"load_csv": {"path": "rows.csv", "columns": columns}}], str)


def test_a_separator_is_a_character() -> None:
    with pytest.raises(InvalidInput, match="separator must be one ASCII character"):
        text_format(separator=[","])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("DOUBLE", "9007199254740993", "is not exact in a double"),
        ("DOUBLE", "123456789012345678.12", "is not exact in a double"),
        ("DOUBLE", "1e-400", "is smaller than any double"),
        ("DOUBLE", "-1e400", "is larger than any double"),
        ("JSON", '{"a":1,"a":2}', "'a' is named twice"),
        ("JSON", '[{"b":{"a":1,"a":2}}]', "'a' is named twice"),
        ("JSON", "[123456789012345678.12]", "123456789012345678.12 is not exact in a double"),
        ("JSON", "1e400", "1e400 is larger than any double"),
        ("JSON", "1e-400", "1e-400 is smaller than any double"),
    ],
)
def test_text_that_a_cell_would_change_is_refused_with_its_row(kind: Any, text: str, said: str) -> None:
    texts = pa.array(["0", text, "1"])
    with pytest.raises(InvalidRow, match=rf"^row 2, column 'v' \({kind}\): .*{re.escape(said)}"):
        of_text(dm.Column("v", kind), texts)


def test_doubles_have_the_value_of_their_text() -> None:
    texts = [
        "1e23",
        "0.1",
        "9007199254740992",
        "0e-400",
        "-0.0",
        "1.7976931348623157e308",
        "-Infinity",
    ]
    found = of_text(dm.Column("v", "DOUBLE"), pa.array(texts))
    assert found.to_pylist() == [float(text) for text in texts]
    assert of_text(dm.Column("v", "DOUBLE"), pa.array(texts[:4])).to_pylist() == [1e23, 0.1, 2.0**53, 0.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"d": 1e400}', "1e400 is larger than any double"),
        ('{"d": [123456789012345678.12]}', "123456789012345678.12 is not exact in a double"),
        ('{"d": -1e-400}', "-1e-400 is smaller than any double"),
        ('{"d": 1, "d": 2}', "'d' is named twice"),
    ],
)
def test_json_that_would_change_is_refused_by_every_interface(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "changes.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=re.escape(said)):
        read_json(path)
    with pytest.raises(InvalidInput, match=re.escape(said)):
        parse_json(text.encode())


@pytest.mark.parametrize("kind", ["INTEGER", "DOUBLE"])
@pytest.mark.parametrize("blank", ["\u00a0", "\u2007", "\u3000"])
def test_a_number_with_a_blank_beyond_ascii_is_refused(kind: Any, blank: str) -> None:
    """Other tables refuse such a cell, too."""
    column = Column("n", kind)
    assert of_text(column, pa.array([" 5\t"])).to_pylist() == [5]
    with pytest.raises(InvalidRow, match="number"):
        of_text(column, pa.array([f"{blank}5"]))


def test_whole_numbers_are_read_in_the_form_that_pandas_writes_beside_nulls() -> None:
    column = dm.Column("n", "INTEGER")
    assert of_text(column, pa.array(["5.0", "-0.0", None, "7", "9007199254740992.0"])).to_pylist() == [
        5,
        0,
        None,
        7,
        2**53,
    ]
    for text in ("5.5", "5e0", "0x5.0", "9007199254740993.0", "12345678901234567.0", ".0"):
        with pytest.raises(InvalidRow, match=r"^row 2, column 'n' \(INTEGER\): .* is not a whole number"):
            of_text(column, pa.array(["1.0", text]))
