"""CSV files in which some rows have only ROW_ID and ROW_VERSION: these rows are deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from dormouse.errors import InvalidData
from dormouse.rows.changes import LoadCsv
from dormouse.rows.csv_loads import loads
from dormouse.sources import text_reader
from tests.support.rows import Column

COLUMNS = (Column("name", "STRING"),)
HEAD = b"ROW_ID,ROW_VERSION,name\n"


def deleted(path: Path, content: bytes) -> list[int]:
    path.write_bytes(HEAD + content)
    return [int(i) for one in loads(LoadCsv(path), COLUMNS) if one.deletes is not None for i in one.ids]


@pytest.mark.parametrize("content", [b"1,1,x\n2,1", b"2,1", b"1,1,x\r\n1,1\n2,1", b"1,1,x\n2,10"])
@pytest.mark.parametrize("block_bytes", [1 << 20, *range(70, 110, 8)])
def test_a_file_that_breaks_off_in_a_row_deletes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, block_bytes: int
) -> None:
    """The end of the file is read in another block in some cases."""
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", (block_bytes, 1 << 20))
    with pytest.raises(
        InvalidData, match=r"the file ends in the middle of it: it has 2 cells, not 3 .* no line end"
    ):
        deleted(tmp_path / "rows.csv", content)


@pytest.mark.parametrize(
    ("content", "ids"),
    [(b"1,1,x\n2,1\n", [2]), (b"2,1\r", [2]), (b"2,1\r\n1,1,x", [2]), (b"1,1\n2,1\n\n", [1, 2])],
)
def test_the_last_row_is_deleted_where_its_line_ends(tmp_path: Path, content: bytes, ids: list[int]) -> None:
    assert deleted(tmp_path / "rows.csv", content) == ids


@pytest.mark.parametrize(
    "content",
    [
        b"ROW_ID,ROW_VERSION\n1,1",
        b"ROW_VERSION,ROW_ID\n1,1\n1,1",
        b'ROW_ID,ROW_VERSION\r\n"1","1"',
        b"name,ROW_VERSION,ROW_ID\nx,1,1",
    ],
)
@pytest.mark.parametrize("block_bytes", [1 << 20, *range(70, 110, 8)])
def test_a_file_that_breaks_off_in_the_id_of_a_row_changes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, block_bytes: int
) -> None:
    """A truncated id may be the id of another row."""
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", (block_bytes, 1 << 20))
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidData, match=r"line \d: the file ends without a line end, so its last"):
        list(loads(LoadCsv(path), COLUMNS))


@pytest.mark.parametrize("content", [b"1,1\n2,1\n", b"1,1\r\n2,1\r", b'"1","1"\n"2","1"\n'])
def test_a_file_of_only_ids_and_versions_deletes_rows_whose_lines_end(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"ROW_ID,ROW_VERSION\n" + content)
    assert [len(one) for one in loads(LoadCsv(path), COLUMNS)] == [2]


def test_a_file_of_cells_needs_no_last_line_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"ROW_ID,ROW_VERSION,name\n1,1,a\n2,1,b")
    assert [len(one) for one in loads(LoadCsv(path), COLUMNS)] == [2]


def test_the_number_of_consecutive_short_rows_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_reader, "SHORT_ROWS_MAX", 100)
    short = b"".join(b"%d,1\n" % n for n in range(1, 101))
    assert len(deleted(tmp_path / "rows.csv", short)) == 100
    with pytest.raises(InvalidData, match="more than 100 rows of 2 cells follow each other"):
        deleted(tmp_path / "rows.csv", short + b"101,1\n")
