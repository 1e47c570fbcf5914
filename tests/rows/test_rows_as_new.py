"""Downloads that are loaded as new rows, and reads of rows by id and version, through every interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.cli import main
from dormouse.client import connect
from dormouse.client.rows import RemoteRowTable
from dormouse.errors import CommitIdReused, DormouseError, InvalidData, InvalidInput, InvalidRow, RowNotFound
from tests.serving import http_get, serving
from tests.support.api import Instance
from tests.support.rows import RowTable

COLUMNS = [dm.Column("name", "STRING"), dm.Column("x", "DOUBLE"), dm.Column("n", "INTEGER", default=3)]
ROWS: list[dict[str, Any]] = [
    {"name": "a", "x": 1.5, "n": 1},
    {"name": "NaN", "x": float("nan"), "n": 2},
    {"name": None, "x": None, "n": None},
]


@pytest.fixture
def first(instance: Instance) -> RowTable:
    rows = instance.create_row_table("first", COLUMNS)
    rows.change([dm.Insert(ROWS)])
    rows.change([dm.Remove([(1, 1)]), dm.Patch([{"ROW_ID": 2, "ROW_VERSION": 1, "n": 20}])])
    return rows


@pytest.fixture
def second(instance: Instance) -> RowTable:
    return instance.create_row_table("second", COLUMNS)


@pytest.fixture
def download(first: RowTable, tmp_path: Path) -> Path:
    path = tmp_path / "first.csv"
    first.download_csv(path)
    assert path.read_text().startswith('"ROW_ID","ROW_VERSION",')
    return path


@pytest.fixture
def url(instance: Instance) -> Iterator[str]:
    with serving(instance, job_threads=1, shutdown_seconds_max=10) as url:
        yield url


def cells(table: RowTable) -> list[str]:
    return [repr({**row, "ROW_VERSION": None}) for row in table.current().read_all().to_pylist()]


EXPECTED = [
    repr({"ROW_ID": 1, "ROW_VERSION": None, "name": "NaN", "x": float("nan"), "n": 20}),
    repr({"ROW_ID": 2, "ROW_VERSION": None, "name": None, "x": None, "n": 3}),
]


def test_a_download_becomes_new_rows_of_another_table(second: RowTable, download: Path) -> None:
    with pytest.raises(DormouseError):
        second.upload_csv(download)
    assert second.upload_csv(download, as_new=True, dry_run=True).changed["inserted"] == 2
    done = second.upload_csv(download, as_new=True, change_id="one")
    assert (list(done.row_ids), done.changed["inserted"]) == ([1, 2], 2)
    assert second.upload_csv(download, as_new=True, change_id="one") == done
    with pytest.raises(CommitIdReused):
        second.upload_csv(download, change_id="one")
    assert cells(second) == EXPECTED


def test_a_download_becomes_new_rows_of_its_own_table(first: RowTable, download: Path) -> None:
    assert first.upload_csv(download, as_new=True).changed == {
        "inserted": 2, "updated": 0, "deleted": 0, "unchanged": 0,
    }  # fmt: skip
    assert [row["ROW_ID"] for row in first.current().read_all().to_pylist()] == [2, 3, 4, 5]


def test_rows_without_ids_or_with_invalid_versions_are_new_rows(second: RowTable, tmp_path: Path) -> None:
    path = tmp_path / "plain.csv"
    path.write_text("name,n\na,1\n")
    assert second.upload_csv(path, as_new=True).changed["inserted"] == 1
    path.write_text("name,ROW_VERSION,n\nb,not a version,1\n")
    assert second.upload_csv(path, as_new=True).changed["inserted"] == 1
    path.write_text("ROW_ID,ROW_VERSION\n1,1\n")
    with pytest.raises(InvalidData, match="no column of the table"):
        second.upload_csv(path, as_new=True)
    path.write_text("ROW_ID,ROW_VERSION,name\n1,1\n")  # an update would delete this row
    with pytest.raises(InvalidData, match="2 cells"):
        second.upload_csv(path, as_new=True)
    with pytest.raises(InvalidInput, match="as_new"):
        second.upload_csv(path, as_new="yes")  # type: ignore[arg-type]
    assert second.version() == 2


def test_the_command_line_loads_a_download_as_new_rows(
    instance: Instance, dsn: str, second: RowTable, download: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["--dsn", dsn, "--objects", instance.objects.url]
    for table, more in (("second", []), ("third", ["--create"])):
        arguments = ["upload", table, str(download), "--as-new", *more]
        monkeypatch.setattr("sys.argv", ["dormouse", "rows", *arguments, *where])
        assert main() == 0
        assert instance.row_table(table).current().read_all().num_rows == 2
    assert cells(second) == EXPECTED


@pytest.mark.slow
def test_a_client_loads_a_download_as_new_rows(url: str, second: RowTable, download: Path) -> None:
    with connect(url) as client:
        assert client.row_table("second").upload_csv(download, as_new=True).changed["inserted"] == 2
    assert cells(second) == EXPECTED


@pytest.mark.slow
def test_a_client_returns_the_same_rows_by_id_and_version(url: str, first: RowTable) -> None:
    first.change([dm.RenameColumn("n", "m")])
    wanted = [(2, 3), (1, 1), (3, 1), (2, 1), (1, 1)]
    found: list[str] = []
    with connect(url) as client:
        remote = client.row_table("first")
        assert repr(remote.rows(wanted)) == repr(first.rows(wanted))
        many = [(1, 1), (2, 1)] * 400
        assert repr(remote.rows(iter(many))) == repr(first.rows(many))
        assert remote.rows([]) == first.rows([]) == []
        tables: list[RowTable | RemoteRowTable] = [first, remote]
        for table in tables:
            with pytest.raises(RowNotFound, match="row 1 has no version 9") as missing:
                table.rows([(2, 1), (1, 9)])
            found.append(str(missing.value))
            for bad in (7, "12", (1,), (1, 2, 3)):
                with pytest.raises(InvalidRow, match="ROW_VERSION"):
                    table.rows([bad])  # type: ignore[list-item]
            for strange in ((0, 1), ("1", 1), (1, 2**63), (True, 1)):
                with pytest.raises(RowNotFound, match="whole number"):
                    table.rows([strange])
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_service_refuses_invalid_and_overlong_row_numbers(url: str, first: RowTable) -> None:
    for bad in ("9" * 5_000, f"1:{'9' * 5_000}", "1:²", "1:1:1", ":"):
        answer = http_get(f"{url}/v1/rows/first/rows", params={"row": bad})
        assert answer.status_code in (400, 404), answer.text
        assert json.loads(answer.content)["detail"]
