"""Downloads and uploads of row tables: edited rows are updated, never duplicated."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import InvalidData, InvalidInput, InvalidQuery, InvalidRow, RowConflict
from dormouse.rows.batches import BLOCK_ROWS_MAX
from tests.serving import http_get, serving
from tests.support.api import Instance
from tests.support.rows import RowTable

COLUMNS = [
    dm.Column("name", "STRING", size_max=100),
    dm.Column("n", "INTEGER", default=7),
    dm.Column("x", "DOUBLE"),
    dm.Column("day", "DATE"),
    dm.Column("ok", "BOOLEAN"),
    dm.Column("data", "JSON"),
]


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    return instance.create_row_table("samples", COLUMNS)


def cells(table: RowTable) -> list[dict[str, Any]]:
    return [row for batch in table.current() for row in batch.to_pylist()]


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


ROWS = [
    {
        "name": 'a "quoted"\r\nname, of lines',
        "n": -(1 << 63),
        "x": math.nan,
        "day": 0,
        "ok": True,
        "data": [1],
    },
    {"name": "", "n": (1 << 63) - 1, "x": math.inf, "day": -1, "ok": False, "data": {"ü": "\0"}},
    {"name": None, "n": 0, "x": -math.inf, "day": None, "ok": None, "data": None},
    {"name": " space ", "n": 3, "x": 5e-324, "day": 1_700_000_000_000, "ok": True, "data": "text"},
    {"name": "NA", "n": 3, "x": 0.1 + 0.2, "day": 1, "ok": True, "data": 1.5},
]


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_download_that_is_uploaded_has_the_same_rows(rows: RowTable, tmp_path: Path, suffix: str) -> None:
    """The rows have NaN, infinity, the widest numbers, empty texts, nulls, and texts of several lines."""
    rows.change([dm.Insert(ROWS)])
    before, path = cells(rows), tmp_path / f"rows.{suffix}"
    assert rows.download_csv(path) == len(ROWS)
    done = rows.upload_csv(path)
    assert (done.changed["inserted"], done.changed["deleted"], list(done.row_ids)) == (0, 0, [])
    assert str(cells(rows)) == str(before)
    assert [one.name for one in tmp_path.iterdir() if path.name in one.name] == [path.name]


YEAR_1, YEAR_10000 = -62_135_596_800_000, 253_402_300_800_000


@pytest.mark.slow
def test_a_download_writes_dates_as_a_calendar_does(
    instance: Instance, rows: RowTable, tmp_path: Path
) -> None:
    """The file has dates in ISO 8601. An upload reads each date as the same time, and changes nothing."""
    written = {
        0: '"1970-01-01T00:00:00.000Z"',
        -1: '"1969-12-31T23:59:59.999Z"',
        1_700_000_000_123: '"2023-11-14T22:13:20.123Z"',
        YEAR_1: '"0001-01-01T00:00:00.000Z"',
        YEAR_10000 - 1: '"9999-12-31T23:59:59.999Z"',
        None: "",
        YEAR_1 - 1: f'"{YEAR_1 - 1}"',
        YEAR_10000: f'"{YEAR_10000}"',
        -(1 << 63): f'"{-(1 << 63)}"',
        (1 << 63) - 1: f'"{(1 << 63) - 1}"',
    }
    path = tmp_path / "rows.csv"
    for days in (list(written)[:6], list(written)):
        rows.change([dm.Insert([{"day": day} for day in days])])
        for sql in (None, "select day, n from samples", "select day from samples"):
            rows.download_csv(path, sql)
            lines = path.read_text("utf-8").splitlines()[1:]
            place = 5 if sql is None else 2
            assert [line.split(",")[place] for line in lines[-len(days) :]] == [written[day] for day in days]
            done = rows.upload_csv(path)
            assert (done.changed, list(done.versions)) == (counts(unchanged=len(lines)), [])
    with serving(instance, job_threads=0, shutdown_seconds_max=10) as url:
        rows.download_csv(path)
        assert http_get(f"{url}/v1/rows/samples/csv").content == path.read_bytes()
    rows.download_csv(path, "select max(day) as last, min(n) as n from samples where day < 1")
    assert path.read_text("utf-8").splitlines() == ['"last","n"', '"1970-01-01T00:00:00.000Z",7']


def counts(**more: int) -> dict[str, int]:
    return {"inserted": 0, "updated": 0, "deleted": 0, "unchanged": 0} | more


def test_download_edit_upload_updates_without_duplicates(rows: RowTable, tmp_path: Path) -> None:
    rows.change([dm.Insert([{"name": f"row {n}", "n": n} for n in range(1, 7)])])
    path = tmp_path / "rows.csv"
    rows.download_csv(path)
    with path.open(newline="") as file:
        header, *lines = list(csv.reader(file))
    at = header.index("name")
    lines[1][at] = "edited"
    lines[2] = lines[2][:2]  # deleted
    lines.append(["", "", "new", *[""] * (len(header) - 3)])
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *lines])
    done = rows.upload_csv(path)
    assert (done.changed["inserted"], done.changed["deleted"]) == (1, 1)
    assert [(row["ROW_ID"], row["name"], row["n"]) for row in cells(rows)] == [
        (1, "row 1", 1),
        (2, "edited", 2),
        (4, "row 4", 4),
        (5, "row 5", 5),
        (6, "row 6", 6),
        (7, "new", 7),  # the default
    ]
    with pytest.raises(RowConflict, match=r"row 2 \(sent 1, now 2\), row 3 \(sent 1, now 3\)"):
        rows.upload_csv(path)
    assert rows.row(3, 1)["name"] == "row 3"


def test_columns_that_a_file_lacks_are_unchanged(rows: RowTable, tmp_path: Path) -> None:
    rows.change([dm.Insert([{"name": "a", "n": 1}, {"name": "b", "n": 2}])])
    rows.upload_csv(write(tmp_path / "rows.csv", "n,ROW_VERSION,ROW_ID\n5,1,2\n"))
    assert [(row["name"], row["n"]) for row in cells(rows)] == [("a", 1), ("b", 5)]


def test_a_file_of_ids_and_versions_deletes(rows: RowTable, tmp_path: Path) -> None:
    rows.change([dm.Insert([{"name": "a"}, {"name": "b"}])])
    done = rows.upload_csv(write(tmp_path / "rows.csv", "ROW_ID,ROW_VERSION\n2,1\n"))
    assert done.changed["deleted"] == 1
    assert [row["name"] for row in cells(rows)] == ["a"]


def test_a_dry_run_returns_what_it_would_do(rows: RowTable, tmp_path: Path) -> None:
    told: list[int] = []
    path = write(tmp_path / "rows.csv", "name\n" + "a\n" * 10)
    done = rows.upload_csv(path, dry_run=True, progress=lambda done, total: told.append(done))
    assert done.changed["inserted"] == 10
    assert told[-1] == 10
    assert (cells(rows), rows.version()) == ([], 0)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("ending", "kind", "said"),
    [
        ("x,1\n", InvalidRow, "line 30,002, column 'n' (INTEGER): 'x' is not a whole number"),
        (
            "1\n",
            InvalidData,
            "line 30,002: the file ends in the middle of it: it has 1 cell, not 2 as the others",
        ),
        ('1,"a', InvalidData, "line 30,002: a quote is opened and never closed"),
        ("1,a,b\n1,a\n", InvalidData, "line 30,002: it has 3 cells, not 2 as the others: '1,a,b'"),
    ],
)
def test_a_fault_in_a_late_block_leaves_nothing(
    rows: RowTable, tmp_path: Path, ending: str, kind: type[Exception], said: str
) -> None:
    """The blocks that were written before the fault do not become part of the table."""
    path = write(tmp_path / "rows.csv", "n,name\n" + "1,a\n" * 30_000 + ending)
    with pytest.raises(kind) as caught:
        rows.upload_csv(path)
    assert str(caught.value).endswith(said)
    assert (cells(rows), rows.version()) == ([], 0)
    assert rows.upload_csv(write(path, "n,name\n" + "1,a\n" * 10)).row_ids == list(range(1, 11))


def test_blocks_have_versions_of_their_own(rows: RowTable, tmp_path: Path) -> None:
    count = 2 * BLOCK_ROWS_MAX + 1
    path = write(tmp_path / "rows.csv", "n\n" + "".join(f"{n}\n" for n in range(count)))
    done = rows.upload_csv(path)
    assert list(done.versions) == [1, 2, 3]
    assert len(done.row_ids) == count
    found = cells(rows)
    assert [(row["ROW_ID"], row["n"]) for row in found] == [(n + 1, n) for n in range(count)]
    assert [found[at]["ROW_VERSION"] for at in (0, BLOCK_ROWS_MAX - 1, BLOCK_ROWS_MAX, -1)] == [1, 1, 2, 3]


def test_a_table_with_the_columns_of_a_preview_accepts_the_file(instance: Instance, tmp_path: Path) -> None:
    text = "Name,first day,share %,ok,code,json\nÄ,2024-01-31,0.5,true,007,[1]\nb,NA,1,false,12,{}\n"
    path = write(tmp_path / "rows.csv", text)
    some = instance.create_row_table("some", [dm.Column("x", "STRING")])
    look = some.preview_csv(path, null="NA")
    assert [str(column) for column in look.columns] == [
        "Name STRING(50)", "first_day DATE", "share DOUBLE", "ok BOOLEAN", "code STRING(50)", "json JSON",
    ]  # fmt: skip
    made = instance.create_row_table("made", look.columns)
    made.upload_csv(path, columns=look.names, null="NA")
    assert made.row(1) == {
        "ROW_ID": 1, "ROW_VERSION": 1, "Name": "Ä", "first_day": 1706659200000, "share": 0.5, "ok": True,
        "code": "007", "json": [1],
    }  # fmt: skip
    assert made.row(2)["first_day"] is None


def test_older_versions_and_snapshots_are_downloaded(rows: RowTable, tmp_path: Path) -> None:
    rows.change([dm.Insert([{"name": "a"}])])
    rows.snapshot("v1")
    rows.change([dm.Update([{"ROW_ID": 1, "ROW_VERSION": 1, "name": "b"}]), dm.DropColumn("data")])
    paths = [tmp_path / f"{n}.csv" for n in range(3)]
    rows.download_csv(paths[0], snapshot="v1")
    rows.download_csv(paths[1], version=1)
    rows.download_csv(paths[2], header=False, separator="|")
    assert paths[0].read_text() == paths[1].read_text()
    assert paths[0].read_text().splitlines()[0].endswith('"data"')
    assert paths[2].read_text().startswith('1|2|"b"')


def test_invalid_downloads(rows: RowTable, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="give a version, or the name of a snapshot"):
        rows.download_csv(tmp_path / "a.csv", version=1, snapshot="v1")
    with pytest.raises(InvalidInput, match=r"cannot write '.*': No such file or directory"):
        rows.download_csv(tmp_path / "none" / "a.csv")
    with pytest.raises(InvalidQuery, match="no version 1; the newest is 0"):
        rows.download_csv(tmp_path / "a.csv", version=1)
    assert list(tmp_path.glob("*.csv")) == []


@pytest.mark.slow
def test_the_rows_of_a_query_are_downloaded_and_uploaded(rows: RowTable, tmp_path: Path) -> None:
    """Rows have their ids, so that an upload updates them. Rows of groups have no ids."""
    rows.change([dm.Insert([{"name": f"row {n}", "n": n, "data": [n]} for n in range(10)])])
    path = tmp_path / "rows.csv"
    assert rows.download_csv(path, "select n, data from samples where n > 6 order by n desc") == 3
    assert path.read_text().splitlines()[:2] == ['"ROW_ID","ROW_VERSION","n","data"', '10,1,9,"[9]"']
    path.write_text(path.read_text().replace('10,1,9,"[9]"', '10,1,90,"[90]"'))
    assert rows.upload_csv(path).changed["inserted"] == 0
    assert rows.row(10) == {
        "ROW_ID": 10, "ROW_VERSION": 2, "name": "row 9", "n": 90, "x": None, "day": None, "ok": None,
        "data": [90],
    }  # fmt: skip
    assert rows.download_csv(path, "select count(*) as c from samples", version=1) == 1
    assert path.read_text() == '"c"\n10\n'
