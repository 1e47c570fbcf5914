"""Previews of CSV files: the columns for a table, the first rows, and the faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dormouse.errors import InvalidData
from dormouse.rows import csv_preview
from dormouse.rows.columns import check_columns
from dormouse.rows.csv_preview import CsvPreview, preview_csv
from dormouse.sources.text_format import text_format


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.csv"


def look(file: Path, text: str, rows: int = 10, whole: bool = False, **how: Any) -> CsvPreview:
    file.write_text(text, "utf-8")
    found = preview_csv(file, text_format(**how), rows=rows, whole=whole)
    check_columns(found.columns)
    return found


def types(preview: CsvPreview) -> list[str]:
    return [str(column) for column in preview.columns]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-2", "+3", ""], "INTEGER"),
        (["0", "1"], "INTEGER"),
        (["1", "2.5"], "DOUBLE"),
        (["0.5", "-1e3", "NaN", "-Infinity"], "DOUBLE"),
        (["9223372036854775807"], "INTEGER"),
        (["12345678901234567890", "12345678901234567891"], "STRING(50)"),
        (["9007199254740993", "1.5"], "STRING(50)"),
        (["123456789012345", "1.5", ".5", "1e30", "0 "], "DOUBLE"),
        (["true", "FALSE", ""], "BOOLEAN"),
        (["true", "1"], "STRING(50)"),
        (["2024-01-31", "2024-01-31T12:00:00Z"], "DATE"),
        (["2024-01-31T10:00:00.123456Z"], "STRING(50)"),
        (["2024-01-31T10:00:00,1234"], "STRING(50)"),
        (["2024-01-31 10:00:00.5", "2024-01-31 10:00:00.123"], "DATE"),
        (["2024-01-31T10:00:00.120000+02:00", "2024-01-31T10:00:00Z"], "DATE"),
        (["2024-01-31", "17"], "STRING(50)"),
        (["2024-13-01"], "STRING(50)"),
        (['{"a": 1}', "[1]"], "JSON"),
        (["{a}"], "STRING(50)"),
        (["007", "12"], "STRING(50)"),
        (["1_000"], "STRING(50)"),
        (["0x1f"], "STRING(50)"),
        (["1", "2", "three"], "STRING(50)"),
        (["", ""], "STRING(50)"),
        (["x" * 50], "STRING(50)"),
        (["x" * 51], "STRING(100)"),
        (["x" * 101], "STRING(250)"),
        (["x" * 501], "STRING(1000)"),
        (["[" + "1," * 1_000 + "1]"], "JSON"),
    ],
)
def test_types_are_the_narrowest_that_all_values_have(file: Path, values: list[str], kind: str) -> None:
    cells = ['"' + value.replace('"', '""') + '"' if value else "" for value in values]
    assert types(look(file, "a,b\n" + "".join(f"{cell},1\n" for cell in cells)))[0] == f"a {kind}"


def test_a_type_widens_in_a_later_block(file: Path) -> None:
    rows = "".join(f"{n},{n}\n" for n in range(200_000))
    assert types(look(file, f"a,b\n{rows}1.5,{'x' * 60}\n")) == ["a DOUBLE", "b STRING(100)"]


def test_names_are_made_unique_and_valid(file: Path) -> None:
    header = "name,Name,name,,2nd,a b (c),ROW_ETAG,naïve,ROW_ID,row_version,__x,_dropped_y,x__"
    found = look(file, f"{header}\n" + ",".join("1" for _ in header.split(",")) + "\n")
    assert found.names == (
        "name", "Name_2", "name_3", "column_4", "c_2nd", "a_b_c", "c_ROW_ETAG", "naïve", "ROW_ID",
        "ROW_VERSION", "x", "dropped_y", "x_2",
    )  # fmt: skip
    assert [column.name for column in found.columns] == [
        name for name in found.names if name not in ("ROW_ID", "ROW_VERSION")
    ]
    assert found.has_row_ids


def test_without_a_header_columns_are_numbered(file: Path) -> None:
    found = look(file, "1,a\n2,b\n", header=False)
    assert types(found) == ["column_1 INTEGER", "column_2 STRING(50)"]


def test_the_first_rows_are_shown_and_all_are_counted(file: Path) -> None:
    found = look(file, "a,b\n" + ',""\n' * 30, rows=2)
    assert found.rows == ((None, ""),) * 2
    assert (found.row_count, found.is_whole) == (30, True)
    assert look(file, "a,b\n").rows == ()


@pytest.mark.slow
def test_only_the_beginning_is_read_unless_all_is_wanted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_preview, "LOOK_BYTES_MAX", 1 << 20)
    text = "a\n" + "1\n" * 2_000_000 + "x\n"
    found = look(file, text)
    assert types(found) == ["a INTEGER"]
    assert not found.is_whole
    assert found.row_count < 2_000_000
    found = look(file, text, whole=True)
    assert (types(found), found.is_whole, found.row_count) == (["a STRING(50)"], True, 2_000_001)


def test_rows_of_only_id_and_version_are_no_fault(file: Path) -> None:
    found = look(file, "ROW_ID,ROW_VERSION,n\n1,1,5\n2,1\n")
    assert (types(found), found.row_count) == (["n INTEGER"], 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n1,2,3\n4,5\n", "line 3: it has 3 cells, not 2 as the others: '1,2,3'"),
        (
            f"a,b\n1,2\n3,{'x' * 1_001}\n",
            "line 3: column 'b' has 1,001 characters, and a STRING may have 1,000",
        ),
        (",".join(f"c{n}" for n in range(153)) + "\n", "153 columns; a row table has at most 152"),
    ],
)
def test_files_that_are_too_wide_are_refused(file: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidData, match=r"rows\.csv") as caught:
        look(file, text)
    assert str(caught.value).endswith(said)
