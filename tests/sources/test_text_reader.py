"""The reader of CSV. It gives the same cells, or the same error, for a table and for a row table."""

from __future__ import annotations

import bz2
import gzip
import inspect
import zipfile
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import InvalidData
from dormouse.rows.change import digest_of_changes
from dormouse.rows.changes import LoadCsv
from dormouse.rows.csv_loads import loads
from dormouse.rows.csv_preview import preview_csv
from dormouse.sources import text_reader
from dormouse.sources.data_files import Files
from dormouse.sources.text_format import TextFormat, TextOptions, text_format
from dormouse.sources.text_reader import TextFile
from dormouse.verbs.rows import RowUploadRequest
from tests.stored import wait_until
from tests.support.rows import Column
from tests.support.writing import open_source

Cells = list[list[str | None]]
Write = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def made(content: bytes) -> Path:
        path = tmp_path / "x.csv"
        path.write_bytes(content)
        return path

    return made


def of_table(path: Path, how: dict[str, Any]) -> Cells:
    names = {"separator": "delimiter", "null": "null_texts"}
    options = {names.get(name, name): value for name, value in how.items()}
    columns = [dm.Field(name, dm.STRING, nullable=name != "k") for name in ("k", "v")]
    batches = open_source(Files(str(path), **options), dm.Schema(columns[:1], [], columns[1:])).batches
    return [list(row.values()) for batch in batches for row in batch.to_pylist()]


def of_row_table(path: Path, how: dict[str, Any]) -> Cells:
    columns = (Column("k", "STRING", 1_000), Column("v", "JSON" if "json" in how else "STRING", None))
    batches = loads(LoadCsv(path, **how), columns)
    rows = [zip(*(b.cells[name].to_pylist() for name in ("k", "v")), strict=True) for b in batches]
    return [list(row) for batch in rows for row in batch]


TARGETS = [of_table, of_row_table]


@pytest.mark.parametrize("read", TARGETS)
@pytest.mark.parametrize(
    ("content", "how"),
    [
        (b'k,v\na,"b\nc"\nd,\n', {}),
        (b'\xef\xbb\xbfk,v\r\na,"b\nc"\r\n\r\nd,', {}),
        (b'k,v\ra,"b\nc"\rd,\r', {}),
        ('k,v\na,"b\nc"\nd,\n'.encode("utf-16"), {}),
        ('k,v\na,"b\nc"\nd,\n'.encode("utf-16-be"), {"encoding": "utf-16-be"}),
        (b'k;v\na;"b\nc"\nd;\n', {}),
        (b"k|v\na|'b\nc'\nd|\n", {"separator": "pipe", "quote": "'"}),
        (b'k\tv\na\t"b\nc"\nd\t\n', {"separator": "tab"}),
        (b'# notes, "open\n#\nk,v\na,"b\nc"\nd,\n', {"skip_lines": 2, "quote": '"'}),
        (b'a,"b\nc"\nd,\n', {"header": False, "quote": '"'}),
        (b'k,v\na,"b\nc"\nd,NA\n', {"null": ["NA"]}),
        (b'k,v\na,"b\nc"\nd,?\n', {"null": ["NA", "?"]}),
    ],
)
def test_tables_and_row_tables_read_the_same_cells(
    write: Write, read: Callable[..., Cells], content: bytes, how: dict[str, Any]
) -> None:
    assert read(write(content), how) == [["a", "b\nc"], ["d", None]]


@pytest.mark.parametrize("read", TARGETS)
def test_quotes_are_escaped_by_an_escape_character_or_doubled(
    write: Write, read: Callable[..., Cells]
) -> None:
    path = write(b'k,v\na,"b\\"c"\nd,"e""f"\ng,h\\,i\n')
    assert read(path, {"escape": "\\", "quote": '"'}) == [["a", 'b"c'], ["d", 'e"f'], ["g", "h,i"]]


@pytest.mark.parametrize("read", TARGETS)
@pytest.mark.parametrize("suffix", ["gz", "bz2", "zip"])
def test_a_compressed_file_is_unpacked(tmp_path: Path, read: Callable[..., Cells], suffix: str) -> None:
    text, path = b"k,v\na,b\n", tmp_path / f"x.csv.{suffix}"
    if suffix == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.csv", text)
    else:
        path.write_bytes(gzip.compress(text) if suffix == "gz" else bz2.compress(text))
    assert read(path, {}) == [["a", "b"]]


@pytest.mark.parametrize("read", TARGETS)
@pytest.mark.parametrize(
    ("content", "how", "message"),
    [
        (b"k,v\na,b\nc\nd,e\n", {}, "line 3: it has 1 cell, not 2 as the others: 'c'"),
        (b"k,v\na,b\n\nc,d,e\n", {}, "line 4: it has 3 cells, not 2 as the others: 'c,d,e'"),
        (
            b'k,v\na,"b\nc"\nd,e\nf',
            {},
            "line 5: the file ends in the middle of it: it has 1 cell, not 2 as the",
        ),
        (b'k,v\na,b\nc,"d\ne,f\n', {}, "line 3: a quote is opened and never closed"),
        (b'#,"\nk,v\na,b\nc\nd,e\n', {"skip_lines": 1}, "line 4: it has 1 cell, not 2 as the others: 'c'"),
        (b"k,v\na,\x81\n", {"encoding": "cp1252"}, "line 2: is not cp1252; give its encoding"),
    ],
)
def test_tables_and_row_tables_give_the_same_error(
    write: Write, read: Callable[..., Cells], content: bytes, how: dict[str, Any], message: str
) -> None:
    path = write(content)
    with pytest.raises(InvalidData) as refused:
        read(path, how)
    assert str(refused.value).startswith(f"file '{path}', {message}")


def test_rows_larger_than_a_block_are_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", (1 << 10, 1 << 16))
    rows = [[str(number), "x" * (5_000 if number == 300 else 3)] for number in range(600)]
    path = write(b"k,v\n" + "".join(f"{k},{v}\n" for k, v in rows).encode())
    assert of_table(path, {"null": ["NA"], "header": True}) == rows
    path.write_bytes(path.read_bytes() + b"601,1,2\n")
    with pytest.raises(InvalidData, match="line 602: it has 3 cells, not 2"):
        of_table(path, {})


@pytest.mark.parametrize("text", ["k;v\na;b\n", "k\tv\na\tb\n", "k|v\na|b\n"])
def test_the_separator_is_found_by_the_header_if_no_option_is_given(write: Write, text: str) -> None:
    path = write(text.encode())
    assert [column.name for column in preview_csv(path, text_format()).columns] == ["k", "v"]
    assert of_row_table(path, {}) == of_table(path, {}) == [["a", "b"]]
    with pytest.raises(InvalidData, match="which the table does not have"):
        of_row_table(path, {"quote": "'"})  # with an option given, nothing is guessed


def test_every_door_has_all_options_of_the_text_format() -> None:
    """Only doors whose options are written by hand are checked. The others are generated from the model."""
    options = set(TextFormat.model_fields)
    assert set(TextOptions.__annotations__) == options
    assert options <= {field.name for field in fields(LoadCsv)}
    assert options <= set(RowUploadRequest.model_fields)
    names = {"separator": "delimiter", "null": "null_texts"}
    assert {names.get(name, name) for name in options} <= set(inspect.signature(Files).parameters)
    usual = LoadCsv("x.csv")
    assert text_format(**{name: getattr(usual, name) for name in options}) == TextFormat()


def test_the_last_files_are_kept(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier files are released when a thread of Arrow, too, has let go of them, which may take a while."""
    released: list[bool] = []

    class Released(text_reader._Source):
        def __del__(self) -> None:
            released.append(True)

    kept: deque[object] = deque(maxlen=4)
    monkeypatch.setattr(text_reader, "_LAST", kept)
    monkeypatch.setattr(text_reader, "_Source", Released)
    rows = text_reader.BLOCK_BYTES[0]  # four blocks: a file of less than one is read from memory
    file = TextFile(write(b"k,v\n" + b"1,2\n" * rows), text_format())
    for number in range(10):
        assert sum(batch.num_rows for batch in file.batches()) == rows
        assert len(released) <= max(0, number + 1 - 4)
    wait_until(lambda: len(released) == 6)


def test_the_digest_of_a_load_is_that_of_earlier_versions(write: Write) -> None:
    load = LoadCsv(write(b"n\n1\n"), separator=";", null="NA")
    assert (digest_of_changes([load]) or b"").hex() == "24738460771370e7ac8727feef61ab07"


def test_the_request_of_a_job_is_readable_for_earlier_workers() -> None:
    six = {"separator": ",", "quote": '"', "escape": None, "header": True, "skip_lines": 0, "null": None}
    assert text_format().to_json() == six
    assert text_format(null="NA").to_json() == {**six, "null": "NA"}
    many = text_format(null=["NA", "?"], encoding="latin-1")
    assert many.to_json() == {**six, "null": ["NA", "?"], "encoding": "latin-1"}
    assert text_format(**many.to_json()) == many
