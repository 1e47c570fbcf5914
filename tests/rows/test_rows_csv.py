"""CSV files of row tables: the rows that are read, and the error for each fault."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.errors import InvalidData, InvalidInput, InvalidRow
from dormouse.rows.batches import BLOCK_ROWS_MAX, RowBatch
from dormouse.rows.changes import LoadCsv
from dormouse.rows.csv_loads import loads
from dormouse.sources import text_reader
from dormouse.sources.text_format import text_format
from dormouse.sources.text_reader import TextFile, naming
from tests.support.rows import Column

OTHER = "; give its encoding (--encoding), or convert it to UTF-8"
COLUMNS = (Column("name", "STRING"), Column("n", "INTEGER", default=7), Column("x", "DOUBLE"))
Write = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def made(content: bytes) -> Path:
        path = tmp_path / "rows.csv"
        path.write_bytes(content)
        return path

    return made


def read(path: Path, **how: Any) -> list[list[str | None]]:
    with naming(str(path)):
        batches = TextFile(path, text_format(**how)).batches()
        return [list(row) for b in batches for row in zip(*(c.to_pylist() for c in b.columns), strict=True)]


def fault(path: Path, kind: type[Exception] = InvalidData, **how: Any) -> str:
    """Returns the error of a file, without its name."""
    with pytest.raises(kind) as caught:
        read(path, **how)
    return str(caught.value).replace(f"file '{path}'", "it")


@pytest.mark.parametrize(
    ("content", "how", "rows"),
    [
        (b"a,b\n1,2\n", {}, [["1", "2"]]),
        (b"a,b\r\n1,2\r\n3,4", {}, [["1", "2"], ["3", "4"]]),
        (b"a,b\r1,2\r3,4\r", {}, [["1", "2"], ["3", "4"]]),
        (b"\xef\xbb\xbfa,b\n1,2\n", {}, [["1", "2"]]),
        (b'\xef\xbb\xbf"1","2"\n', {"header": False}, [["1", "2"]]),
        (b'a,b\n"x\r\ny","p,""q"""\n', {}, [["x\r\ny", 'p,"q"']]),
        (b'a,b\n"",\n', {}, [["", None]]),
        (b"a,b\n\n1,2\n\n\n3,4\n\n", {}, [["1", "2"], ["3", "4"]]),
        (b"a\n1\n\n2\n", {}, [["1"], [None], ["2"]]),
        (b'# notes, "open\n#\na,b\n1,2\n', {"skip_lines": 2}, [["1", "2"]]),
        (b'a\tb\n1\t"2\t3"\n', {"separator": "tab"}, [["1", "2\t3"]]),
        (b"a;b\n'1;2';3\n", {"separator": ";", "quote": "'"}, [["1;2", "3"]]),
        (b'a,b\n1\\,2,"3\\"4"\n', {"escape": "\\"}, [["1,2", '3"4']]),
        (b'a,b\n1,"2\n', {"quote": None}, [["1", '"2']]),
        (b'a,b\nNA,"NA"\nXNA,\n', {"null": "NA"}, [[None, "NA"], ["XNA", None]]),
        (b"a,b\n", {}, []),
        (b"a,b", {}, []),
        ("näme,b\n1,ö\n".encode(), {}, [["1", "ö"]]),
    ],
)
def test_rows_are_read(write: Write, content: bytes, how: dict[str, Any], rows: list[list[str]]) -> None:
    assert read(write(content), **how) == rows


def test_a_header_may_be_quoted_over_lines(write: Write) -> None:
    assert TextFile(write(b'"a""x","b\nc"\n1,2\n'), text_format()).header == ('a"x', "b\nc")


@pytest.mark.parametrize(
    ("content", "how", "said"),
    [
        (b"", {}, "it is empty: it has no header"),
        (b"\n\r\n", {}, "it is empty: it has no header"),
        (b"", {"header": False}, "it is empty: it has no first row"),
        (b"#\n", {"skip_lines": 3}, "it has 1 line: there is nothing after the 3 to skip"),
        (b"a,\xff\n", {}, f"it: the header is not UTF-8 text: '\\xff'{OTHER}"),
        (b'a,"b\n1,2\n', {}, "it: the header cannot be read: a quote is opened and never closed"),
        (
            b"a," * (1 << 20),
            {},
            "it: the header is longer than 1,048,576 bytes: is a quote opened in it that is never closed?",
        ),
        (
            b"a" * (1 << 20) + b"\n",
            {},
            "it: the header cannot be read: field larger than field limit (131072); is a quote never closed?",
        ),
        (b"a,b\n1,2\n3\n4,5\n", {}, "it, line 3: it has 1 cell, not 2 as the others: '3'"),
        (b"a,b\n\n1,2\n\n3,4,5\n", {}, "it, line 5: it has 3 cells, not 2 as the others: '3,4,5'"),
        (
            b"a,b\n1,2\n3\n",
            {},
            "it, line 3: the file ends in the middle of it: it has 1 cell, not 2 as the others",
        ),
        (
            b"a,b\n1,2\n3",
            {},
            "it, line 3: the file ends in the middle of it: it has 1 cell, not 2 as the others",
        ),
        (b'a,b\n1,2\n3,"x\n', {}, "it, line 3: a quote is opened and never closed"),
        (b'a,b\n1,2\n"3,x\n5,6\n', {}, "it, line 3: a quote is opened and never closed"),
        (b'a\n"x', {}, "it, line 2: a quote is opened and never closed"),
        (b"a,b\n1,2\n3,4\xff\n", {}, f"it, line 3: column 'b': '4\\xff' is not UTF-8 text{OTHER}"),
        (
            b"1,2\n3,4\xff\n",
            {"header": False},
            f"it, line 2: column 'number 2': '4\\xff' is not UTF-8 text{OTHER}",
        ),
    ],
)
def test_each_fault_of_a_file_has_its_error(
    write: Write, content: bytes, how: dict[str, Any], said: str
) -> None:
    assert fault(write(content), **how) == said


@pytest.mark.slow
def test_rows_before_a_faulty_row_are_yielded_and_counted(write: Write) -> None:
    """The file has many blocks, and some blocks begin within a row."""
    rows = [f'{n},"{"x" * (n % 7)}\n"\n' for n in range(300_000)]
    rows[250_000] = "1,2,3\n"
    said = fault(write(("a,b\n" + "".join(rows)).encode()))
    assert said == "it, line 500,002: it has 3 cells, not 2 as the others: '1,2,3'"


@pytest.mark.slow
def test_cells_of_ten_megabytes(write: Write) -> None:
    long = b"x" * 10_000_000
    path = write(b"a,b\n" + b"1,2\n" * 300_000 + b'3,"' + long + b'"\n4,' + long + b"\n5,6\n")
    rows = read(path)
    assert len(rows) == 300_003
    assert [len(row[1] or "") for row in rows[-3:]] == [10_000_000, 10_000_000, 1]
    path.write_bytes(path.read_bytes() + b"7\n")
    assert fault(path).startswith("it, row 300,004: the file ends in the middle of it")


def test_a_quote_that_is_never_closed_ends_the_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", (1 << 12, 1 << 16))
    said = fault(write(b"a,b\n" + b"1,2\n" * 5_000 + b'3,"' + b"x,y\n" * 50_000))
    assert said == (
        "it, line 5,002: it is larger than 65,536 bytes; is a quote opened in it that is never closed?"
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert fault(tmp_path / "none.csv") == "it cannot be read: No such file or directory"
    assert fault(tmp_path) == "it cannot be read: Is a directory"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"separator": ",,"}, "separator must be one ASCII character, not ',,'"),
        ({"separator": "é"}, "separator must be one ASCII character, not 'é'"),
        ({"separator": None}, "separator must be one ASCII character, not None"),
        ({"quote": "\n"}, "quote must not be '\\n': line ends and NUL cannot be used"),
        ({"separator": '"'}, "separator, quote and escape must differ: '\"', '\"'"),
        ({"skip_lines": -1}, "skip_lines must be from 0 to 10,000, not -1"),
        ({"null": ""}, "null must be a text, like NA, not ''"),
        ({"header": 1}, "header must be True or False, not 1"),
    ],
)
def test_invalid_formats(how: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        text_format(**how)
    assert str(caught.value) == said


def test_the_name_of_a_file_implies_its_separator() -> None:
    assert text_format("a.TSV").separator == "\t"
    assert text_format("a.csv").separator == ","
    assert text_format("a.tsv", separator=";", header=False) == text_format(separator=";", header=False)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)


@given(
    st.integers(2, 4).flatmap(
        lambda width: st.lists(st.lists(TEXTS, min_size=width, max_size=width), min_size=1, max_size=20)
    ),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_files_written_by_python_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], ending: str, ends: bool
) -> None:
    """The files are also read in tiny blocks, which must grow for each row."""
    path = tmp_path_factory.getbasetemp() / "written.csv"
    text = io.StringIO()
    csv.writer(text, lineterminator=ending, quoting=csv.QUOTE_ALL).writerows(rows)
    written = text.getvalue() if ends else text.getvalue().removesuffix(ending)
    path.write_bytes(written.encode())
    sizes, text_reader.BLOCK_BYTES = text_reader.BLOCK_BYTES, (512, 1 << 20)
    try:
        assert read(path, header=False) == rows
    finally:
        text_reader.BLOCK_BYTES = sizes


def test_the_last_lines_end_may_lie_across_blocks(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", (128,))
    assert read(write(b"a,%s\r\n" % (b"b" * 60) + b"c,%s\r\n" % (b"d" * 61)), header=False)[1][0] == "c"


def loaded(path: Path, **how: Any) -> list[RowBatch]:
    return list(loads(LoadCsv(path, **how), COLUMNS))


def refused(path: Path, kind: type[Exception] = InvalidData, **how: Any) -> str:
    with pytest.raises(kind) as caught:
        loaded(path, **how)
    return str(caught.value).replace(f"file '{path}'", "it")


def test_rows_to_insert_to_update_and_to_delete(write: Write) -> None:
    """The file has ids: rows without an id are inserted, and rows of only id and version are deleted."""
    path = write(b'ROW_ID,row_version,n,name\n4,9,1,a\n,,,"b"\n5,2\n6,3\n7,1,2,""\n')
    found = loaded(path)
    assert [one.ids.tolist() for one in found] == [[4, 0], [5, 6], [7]]
    assert [one.versions.tolist() for one in found] == [[9, -1], [2, 3], [1]]
    assert [None if one.deletes is None else one.deletes.tolist() for one in found] == [
        None,
        [True] * 2,
        None,
    ]
    assert [{name: cells.to_pylist() for name, cells in one.cells.items()} for one in found] == [
        {"n": [1, None], "name": ["a", "b"]},
        {},
        {"n": [2], "name": [""]},
    ]
    assert [str(one.label(0)) for one in found] == [f"file '{path}', line {n}" for n in (2, 4, 6)]


def test_ids_and_versions_are_written_as_whole_numbers_are(write: Write) -> None:
    [batch] = loaded(write(b"ROW_ID,ROW_VERSION,n\n+5,007,1\n,,2\n"))
    assert (batch.ids.tolist(), batch.versions.tolist()) == ([5, 0], [7, -1])


@pytest.mark.parametrize("count", [2, 30_000])
def test_a_file_of_all_columns_and_rows_to_delete_alone_deletes(
    write: Write, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have one block or many."""
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", (1 << 16, 1 << 20))
    found = loaded(write(b"ROW_ID,ROW_VERSION,n\n" + b"".join(b"%d,1\n" % n for n in range(1, count + 1))))
    assert [int(i) for one in found if one.deletes is not None for i in one.ids] == [*range(1, count + 1)]
    assert max(map(len, found)) <= BLOCK_ROWS_MAX


def test_a_file_of_ids_and_versions_deletes(write: Write) -> None:
    [batch] = loaded(write(b"ROW_ID,ROW_VERSION\n4,9\n5,1\n"))
    assert batch.deletes is not None
    assert batch.deletes.all()
    assert batch.ids.tolist() == [4, 5]


def test_a_file_without_header_has_the_columns_of_the_table_or_those_named(write: Write) -> None:
    path = write(b"a,1,2.5\n")
    assert set(loaded(path, header=False)[0].cells) == {"name", "n", "x"}
    assert set(loaded(write(b"2,1\n"), header=False, columns=["x", "n"])[0].cells) == {"x", "n"}
    assert set(loaded(write(b"a,b\n2,1\n"), columns=["x", "n"])[0].cells) == {"x", "n"}


def test_rows_are_read_in_full_blocks(write: Write) -> None:
    count = 3 * BLOCK_ROWS_MAX + 10
    path = write(b"n,name\n" + b"".join(b'%d,"%s"\n' % (n, b"x" * (n % 50)) for n in range(count)))
    found = loaded(path)
    assert [len(one) for one in found] == [BLOCK_ROWS_MAX] * 3 + [10]
    assert [value for one in found for value in one.cells["n"].to_pylist()] == list(range(count))
    places = [f"file '{path}', line {n * BLOCK_ROWS_MAX + 3:,}" for n in range(4)]
    assert [str(one.label(1)) for one in found] == places


@pytest.mark.parametrize(
    ("content", "how", "kind", "said"),
    [
        (
            b"nme,n\nx,1\n",
            {},
            InvalidData,
            "it has column 'nme', which the table does not have; did you mean 'name'?",
        ),
        (
            b"other\nx\n",
            {},
            InvalidData,
            "it has column 'other', which the table does not have; its columns are name, n, x",
        ),
        (b"n,name,n\n1,x,1\n", {}, InvalidData, "it has column 'n' twice"),
        (
            b"ROW_ID,n\n1,1\n",
            {},
            InvalidData,
            "it has ROW_ID and no ROW_VERSION: updates need both, and inserts neither",
        ),
        (
            b"row_version,n\n1,1\n",
            {},
            InvalidData,
            "it has ROW_VERSION and no ROW_ID: updates need both, and inserts neither",
        ),
        (
            b"a,1\n",
            {"header": False},
            InvalidData,
            "it has rows of 2 cells, and the table has 3 columns: give the name of each cell's column",
        ),
        (
            b"x,y\n1,a\n",
            {"columns": ["n"]},
            InvalidData,
            "it has rows of 2 cells, and names are given for 1 column: give the name of each cell's column",
        ),
        (
            b"n,name\n1,a\nx,b\n",
            {},
            InvalidRow,
            "it, line 3, column 'n' (INTEGER): 'x' is not a whole number",
        ),
        (
            b"n,name\n1,a\n2," + b"b" * 10_000_000 + b"\n",
            {},
            InvalidRow,
            f"it, line 3, column 'name' (STRING): '{'b' * 59}… has 10,000,000 characters, and may have 50",
        ),
        (
            b"n,name\n1,a\n2,b\0\n",
            {},
            InvalidRow,
            "it, line 3, column 'name' (STRING): 'b\\x00' has a NUL character",
        ),
        (
            b"ROW_ID,ROW_VERSION,n\n1,1,1\n2,,1\n",
            {},
            InvalidRow,
            "it, line 3: it has no ROW_VERSION: send the version that it was read with",
        ),
        (
            b"ROW_ID,ROW_VERSION,n\n,2,1\n",
            {},
            InvalidRow,
            "it, line 2: it has ROW_VERSION and no ROW_ID: a new row has neither",
        ),
        (b"ROW_ID,ROW_VERSION\n1,1\n,\n", {}, InvalidRow, "it, line 3: it has no ROW_ID, and nothing else"),
        (
            b"ROW_ID,ROW_VERSION,n\n1,1,1\nx7,1,1\n",
            {},
            InvalidRow,
            "it, line 3: ROW_ID 'x7' is not the id of a row",
        ),
        (
            b"ROW_ID,ROW_VERSION,n\n1,-1,1\n",
            {},
            InvalidRow,
            "it, line 2: ROW_VERSION '-1' is not the version of a row",
        ),
        (
            b"ROW_ID,ROW_VERSION,n\n1,1,1\n2,1\n3\n",
            {},
            InvalidData,
            "it, line 4: the file ends in the middle of it: it has 1 cell, not 3 as the others",
        ),
    ],
)
def test_files_that_do_not_fit_the_table_are_refused(
    write: Write, content: bytes, how: dict[str, Any], kind: type[Exception], said: str
) -> None:
    assert refused(write(content), kind, **how) == said


@pytest.mark.slow
def test_rows_of_any_kind_and_order_have_their_numbers(write: Write) -> None:
    """The numbers are compared with those of Python's csv reader, for random short rows and small blocks."""
    numbers = random.Random(5)
    lines, deleted = ["ROW_ID,ROW_VERSION,name"], []
    for number in range(1, 5_001):
        if numbers.random() < 0.2:
            lines.append(f"{number},1")
            deleted.append(number)
        else:
            lines.append(f'{number},1,"{"y" * numbers.randrange(40)}"')
    path = write("\n".join(lines).encode())
    sizes, text_reader.BLOCK_BYTES = text_reader.BLOCK_BYTES, (300,)
    try:
        found = loaded(path)
    finally:
        text_reader.BLOCK_BYTES = sizes
    assert [int(i) for one in found for i in one.ids] == list(range(1, 5_001))
    assert [int(i) for one in found if one.deletes is not None for i in one.ids] == deleted
    assert all(str(one.label(0)).endswith(f", line {one.ids[0] + 1:,}") for one in found)
