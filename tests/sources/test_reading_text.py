"""Text files. Their format is inferred from their beginning, and every value is read exactly."""

from __future__ import annotations

import gzip
import zipfile
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import InvalidData, InvalidSchema
from dormouse.sources import json_files, sniffing
from dormouse.sources.data_files import find_files
from dormouse.sources.json_files import json_batches
from tests.standard import OF_K
from tests.support.writing import infer, open_source


def read(data: Any, *keys: str, types: dict[str, dm.Field] | None = None) -> tuple[dict[str, str], list[Any]]:
    """Returns two things: the inferred types by column, and all rows."""
    found = infer(data, keys)
    rows = [row for batch in open_source(found.files, found.schema).batches for row in batch.to_pylist()]
    return {field.name: str(field.type) for field in found.schema.fields}, rows


def written(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_delimiter_quote_and_encoding_are_found(tmp_path: Path) -> None:
    rows = [{"k": 1, "v": 1.5}, {"k": 2, "v": 2.25}]
    for name, text in {
        "semicolon.csv": "k;v\n1;1,5\n2;2,25\n",
        "tab.tsv": "k\tv\n1\t1.5\n2\t2.25\n",
        "bar.csv": "k|v\n1|1.5\n2|2.25\n",
        "quoted.csv": "'k','v'\n'1','1.5'\n'2','2.25'\n",
        "bom.csv": "\ufeffk,v\r\n1,1.5\r\n2,2.25\r\n",
    }.items():
        assert read(written(tmp_path, name, text), "k") == ({"k": "long", "v": "double"}, rows), name
    utf16 = written(tmp_path, "utf16.csv", "k,v\n1,1.5\n2,2.25\n".encode("utf-16"))
    assert read(utf16, "k")[1] == rows


def test_na_is_null_only_beside_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, "na.csv", 'k,n,s\n1,NA,NA\n2,5,"NA"\n3,7,x\n')
    assert read(path, "k")[1] == [
        {"k": 1, "n": None, "s": None},
        {"k": 2, "n": 5, "s": "NA"},
        {"k": 3, "n": 7, "s": "x"},
    ]
    namibia = written(tmp_path, "countries.csv", "code,n\nNA,1\nZA,2\n")
    assert read(namibia, "code")[1] == [{"code": "NA", "n": 1}, {"code": "ZA", "n": 2}]


def test_an_inferred_type_loses_nothing(tmp_path: Path) -> None:
    """The values are codes, long numbers and offsets of time zones, which DuckDB alone would change."""
    path = written(
        tmp_path, "t.csv", "k,zip,big,at\n1,00501,12345678901234567890,2020-01-01T00:00:00+02:00\n"
    )
    kinds, rows = read(path, "k")
    assert kinds == {"k": "long", "zip": "string", "big": "string", "at": "timestamp"}
    assert rows[0]["zip"] == "00501" and rows[0]["at"] == datetime(2019, 12, 31, 22, tzinfo=UTC)


def test_the_formats_of_dates_are_found_or_given(tmp_path: Path) -> None:
    path = written(tmp_path, "d.csv", "k,d,t\n1,31/01/2020,2020-01-31 10:11:12\n2,01/02/2020,2020-02-01\n")
    assert read(path, "k")[1][0] == {
        "k": 1,
        "d": date(2020, 1, 31),
        "t": datetime(2020, 1, 31, 10, 11, 12, tzinfo=UTC),
    }
    files = dm.Files(path, types={"d": dm.DATE}, time_formats={"d": "%m/%d/%Y"})
    with pytest.raises(InvalidData, match=r"line 2: column 'd' is '31/01/2020', which does not fit date"):
        read(files, "k")


@pytest.mark.parametrize("packed", ["gz", "zip", "zst"])
def test_compressed_files_are_unpacked(tmp_path: Path, packed: str) -> None:
    text, path = b"k,v\n1,x\n", tmp_path / f"t.csv.{packed}"
    if packed == "gz":
        path.write_bytes(gzip.compress(text))
    elif packed == "zst":
        path.write_bytes(pa.compress(text, "zstd", asbytes=True))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("t.csv", text)
    assert read(path, "k")[1] == [{"k": 1, "v": "x"}]


def test_blank_lines_of_a_single_column_are_nulls(tmp_path: Path) -> None:
    path = written(tmp_path, "one.csv", "v\n1\n\n3\n")
    files = dm.Files(path, row_number="n")
    assert [row["v"] for row in read(files)[1]] == [1, None, 3]


def test_columns_can_have_any_name(tmp_path: Path) -> None:
    names = ["a.b", "c d", '"e""f"', "100%", "@timestamp", "1st", "e\u0301", "g'h"]
    path = written(tmp_path, "n.csv", ",".join(names) + "\n" + ",".join("1" * len(names)) + "\n")
    kinds, rows = read(path, "a.b")
    assert list(kinds) == ["a.b", "c d", 'e"f', *names[3:]] and set(rows[0].values()) == {1}


def rows_of(path: str | dm.Files, *fields: dm.Field) -> list[Any]:
    source = open_source(path, dm.Schema(fields[:1], [], fields[1:]))
    return [row for batch in source.batches for row in batch.to_pylist()]


ID, TEXT = dm.Field("id", dm.LONG), dm.Field("v", dm.STRING)


@pytest.mark.few(1)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_file_can_end_anywhere_except_within_quotes(tmp_path: Path, end: str, encoding: str) -> None:
    def path(text: str) -> dm.Files:
        return dm.Files(written(tmp_path, "x.csv", text.encode(encoding)), encoding=encoding, quote='"')

    assert rows_of(path(f'id,v\n1,a\n2,"b\nc"{end}'), ID, TEXT)[1] == {"id": 2, "v": "b\nc"}
    assert rows_of(path(f"id,v\n1,{end}"), ID, TEXT) == [{"id": 1, "v": ""}]
    assert rows_of(path(f"id\n1\n2{end}"), ID) == [{"id": 1}, {"id": 2}]
    assert rows_of(path(f"id,v{end or chr(10)}"), ID, TEXT) == []
    for text in ('id,v\n1,"abc\n2,d\n3,e', 'id,v\n1,a\n2,"he said', 'id,v\n1,a\n2,"'):
        with pytest.raises(InvalidData, match=r"line [23]: a quote is opened and never closed"):
            rows_of(path(text + end), ID, TEXT)
    with pytest.raises(InvalidData, match="line 3: a quote is opened and never closed"):
        rows_of(written(tmp_path, "y.csv", 'v\na\n"b' + end), TEXT)


def test_an_unclosed_quote_is_found_in_a_long_file(tmp_path: Path) -> None:
    rows = [f"{number},x" for number in range(99_999)]
    rows[60_000] = '60000,"oops'
    with pytest.raises(InvalidData, match=r"line 60,002: a quote is opened and never closed"):
        rows_of(written(tmp_path, "x.csv", "id,v\n" + "\n".join(rows) + "\n"), ID, TEXT)


def test_a_text_column_that_is_not_nullable_keeps_na(tmp_path: Path) -> None:
    country, number = dm.Field("country", dm.STRING), dm.Field("v", dm.LONG, nullable=True)
    path = written(tmp_path, "x.csv", "country,v\nNA,1\nDE,NA\n,3\n")
    assert rows_of(path, country, number) == [
        {"country": "NA", "v": 1},
        {"country": "DE", "v": None},
        {"country": "", "v": 3},
    ]
    for text in ('{"country": null, "v": 1}', '{"v": 2}\n{"country": "DE"}'):
        with pytest.raises(InvalidData, match="line 1: column 'country' must not be null, but is in row 0"):
            rows_of(written(tmp_path, "x.jsonl", text), country, number)


def test_values_of_a_json_file_win_over_its_folder_name(tmp_path: Path) -> None:
    run, at = dm.Field("run", dm.LONG), dm.Field("date", dm.TIMESTAMP)
    for folder in ("run=5", "date=2024-01-01", "exp=3"):
        (tmp_path / "lake" / folder).mkdir(parents=True)
    runs = written(tmp_path / "lake" / "run=5", "a.json", '{"run": 9}\n{"run": 10}')
    assert rows_of(runs, run) == rows_of(str(tmp_path / "lake" / "run=5"), run) == [{"run": 9}, {"run": 10}]
    assert rows_of(str(tmp_path / "lake" / "run=*" / "*"), run) == [{"run": 9}, {"run": 10}]
    dated = written(tmp_path / "lake" / "date=2024-01-01", "p.json", '{"date": "2024-01-01T13:45:00Z"}')
    assert rows_of(dated, at) == [{"date": datetime(2024, 1, 1, 13, 45, tzinfo=UTC)}]
    assert rows_of(written(tmp_path / "lake" / "exp=3", "b.json", '{"run": 1}'), run) == [{"run": 1}]
    written(tmp_path, "d1.json", '{"run": 2}')
    assert rows_of(written(tmp_path, "d[1].json", '{"run": 1}'), run) == [{"run": 1}]


def test_decimals_in_json_keep_all_digits(tmp_path: Path) -> None:
    kind = dm.DECIMAL(38, 18)
    some = dm.STRUCT([dm.Field("d", kind, nullable=True), dm.Field("t", dm.STRING, nullable=True)])
    fields = [dm.Field("k", dm.LONG), dm.Field("v", kind, nullable=True)]
    fields += [dm.Field("s", some, nullable=True), dm.Field("l", dm.LIST(kind), nullable=True)]
    lines = [
        '{"k": 1, "v": 12345678901234567890.123456789, "s": {"d": 0.123456789012345678, "t": "x"}}',
        '{"k": 2, "v": "1234567890123456.78", "l": [1.10, 2, 1e3]}',
        '{"k": 3, "s": {"t": true}}',
    ]
    for name, text in {"a.jsonl": "\n".join(lines), "b.json": f"[{','.join(lines)}]"}.items():
        rows = rows_of(written(tmp_path, name, text), *fields)
        assert [row["v"] for row in rows] == [
            Decimal("12345678901234567890.123456789"),
            Decimal("1234567890123456.78"),
            None,
        ]
        assert rows[0]["s"] == {"d": Decimal("0.123456789012345678"), "t": "x"}
        assert rows[2]["s"] == {"d": None, "t": "true"}
        assert rows[1]["l"] == [Decimal("1.1"), 2, 1000]


def test_json_lines_and_an_array_give_the_same_rows(tmp_path: Path) -> None:
    lines = '{"k": 1, "v": [1, 2], "s": {"x": 1.5}}\n{"k": 2, "t": "2020-01-01T00:00:00Z"}\n'
    array = "[" + lines.strip().replace("\n", ",\n") + "]"
    for name, text in {"a.jsonl": lines, "b.json": array}.items():
        kinds, rows = read(written(tmp_path, name, text), "k")
        assert kinds["v"] == "list<long>" and kinds["t"] == "timestamp"
        assert rows[0]["v"] == [1, 2] and rows[0]["s"] == {"x": 1.5} and rows[1]["v"] is None
    schema = OF_K
    with pytest.raises(InvalidData, match="column 'v' is not in the schema"):
        open_source(str(tmp_path / "a.jsonl"), schema)


def test_json_is_read_in_small_batches(tmp_path: Path) -> None:
    lines = "".join(f'{{"id": {number}, "v": {number}.5}}\n' for number in range(9_000))
    file = find_files(written(tmp_path, "x.jsonl", lines))[0]
    for kind in (dm.STRING, dm.DECIMAL(9, 1)):
        batches = list(json_batches(file, [ID, dm.Field("v", kind)]))
        assert max(batch.num_rows for batch in batches) <= 2_048
        assert [n for batch in batches for n in batch["id"].to_pylist()] == [*range(9_000)]


def test_folder_names_give_columns(tmp_path: Path) -> None:
    for month in (1, 2):
        folder = tmp_path / "lake" / f"month={month}"
        folder.mkdir(parents=True)
        written(folder, "x.csv", f"k,v\n{month},a\n")
    kinds, rows = read(str(tmp_path / "lake"), "k")
    assert kinds == {"k": "long", "v": "string", "month": "long"}
    assert [row["month"] for row in rows] == [1, 2]
    assert [row["month"] for row in read(str(tmp_path / "lake" / "month=*" / "*.csv"), "k")[1]] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b"k,k\n1,2\n", "has two columns 'k'"),
        (b"k,v\n" + b"1,2\n" * 30 + b"1,2,3\n", "line 32: it has 3 cells, not 2 as the others: '1,2,3'"),
        ("k,v\n1,é\n".encode() + "2,ü\n".encode("latin-1"), "line 3: is not UTF-8, but other lines are"),
        (b"k,v\n,2\n1,3\n", "key 'k' .* has nulls"),
        (b"k,v\n1.5,2\n", "key 'k' .* is double, which cannot be a key"),
    ],
)
def test_a_bad_file_is_one_line_with_the_place(tmp_path: Path, text: bytes, message: str) -> None:
    with pytest.raises((InvalidData, InvalidSchema), match=message) as raised:
        read(written(tmp_path, "bad.csv", text), "k")
    assert "bad.csv" in str(raised.value) and "\n" not in str(raised.value)


def test_a_bad_value_after_the_sample_is_named_with_its_line(tmp_path: Path) -> None:
    rows = "".join(f'{number},"{"a" * 99}\nb",{number}\n' for number in range(30_000))
    path = written(tmp_path, "late.csv", f"k,t,v\n{rows}30000,x,late\n")
    with pytest.raises(InvalidData, match=r"late\.csv', line 60,002: column 'v' is 'late', .*--type"):
        read(path, "k")


def test_archives_of_several_files_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "two.csv.zip", "w") as archive:
        archive.writestr("a.csv", "k\n1\n")
        archive.writestr("b.csv", "k\n2\n")
    with pytest.raises(InvalidData, match=r"is an archive of 2 files \(a\.csv, b\.csv"):
        read(tmp_path / "two.csv.zip", "k")


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.csv.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.csv", "k,v\n" + "1,2\n" * 999)
    packed = bytearray((tmp_path / "x.csv.zip").read_bytes())
    packed[45:55] = bytes(10)
    written(tmp_path, "x.csv.zip", bytes(packed))
    written(tmp_path, "y.csv.gz", gzip.compress(b"k,v\n1,2\n" * 999)[:-20])
    (tmp_path / "z.csv").mkdir()
    gone = f"{tmp_path.as_uri()}/gone.csv"
    for given in (
        *(str(tmp_path / name) for name in ("x.csv.zip", "y.csv.gz")),
        f"{tmp_path.as_uri()}/z.csv",
        gone,
    ):
        for load in (lambda data: read(data, "k"), lambda data: rows_of(data, ID, TEXT)):
            with pytest.raises(
                InvalidData, match=rf"^file '.*{given[-6:]}'.* (cannot be read|not a readable zip file)"
            ):
                load(given)
    with pytest.raises(InvalidData, match=f"file '{tmp_path}' cannot be read"):
        rows_of(tmp_path.as_uri(), ID, TEXT)


def test_bytes_outside_the_encoding_are_named_with_their_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sniffing, "SAMPLE_BYTES", 64)
    text = b"id,v\n1,caf\xe9\n" + b"2,x\n" * 400_000 + b"3,\x81\n"
    for files in (path := written(tmp_path, "x.csv", text), dm.Files(path, encoding="cp1252")):
        with pytest.raises(
            InvalidData, match=r"^file '.*x\.csv', line 400,003: is not cp1252; give its encoding"
        ):
            read(files, "id")


def test_the_format_of_a_file_is_found_for_an_existing_table(tmp_path: Path) -> None:
    schema = dm.Schema([dm.Field("k", dm.LONG)], [], [dm.Field("v", dm.LONG, nullable=True)])
    path = written(tmp_path, "s.csv", "k;v\n1;NA\n2;5\n")
    rows = [row for batch in open_source(path, schema).batches for row in batch.to_pylist()]
    assert rows == [{"k": 1, "v": None}, {"k": 2, "v": 5}]
    latin = written(tmp_path, "l.csv", "k,s\n1,ü\n".encode("latin-1"))
    texts = dm.Schema([dm.Field("k", dm.LONG)], [], [dm.Field("s", dm.STRING)])
    with pytest.raises(InvalidData, match="give its encoding"):
        open_source(latin, texts)
    files = dm.Files(latin, encoding="latin-1")
    assert next(iter(open_source(files, texts).batches)).column("s").to_pylist() == ["ü"]


@pytest.mark.parametrize("text", ["", " \n\n", "[]", " [ ]\n", "\ufeff", "\ufeff[]"])
def test_a_json_file_without_objects_has_no_rows(tmp_path: Path, text: str) -> None:
    """The file is read alone, and in a folder with another file."""
    schema = dm.Schema([dm.Field("k", dm.LONG)], [], [dm.Field("p", dm.DECIMAL(9, 2), nullable=True)])
    for name in ("00.jsonl", "01.json"):
        empty = written(tmp_path, name, text)
        assert [*open_source(empty, schema).batches] == []
        with pytest.raises(InvalidData, match=rf"{name}' is empty, so its columns are unknown"):
            infer(empty)
    written(tmp_path, "02.jsonl", '{"k": 1}\n')
    assert read(str(tmp_path), "k") == ({"k": "long"}, [{"k": 1}])
    assert [b.to_pylist() for b in open_source(str(tmp_path), schema).batches] == [[{"k": 1, "p": None}]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"k":14}\nnot json\n', "line 2: is not JSON: Expecting value at 'not json'"),
        ('{"k":14}\n{"k":1', "line 2: is not JSON: Expecting ',' delimiter at its end"),
        ('[{"k":14},\n{"k":1', "line 2: is not JSON: Expecting ',' delimiter at its end"),
        ("k,w\n1,2\n", "line 1: is not JSON: Expecting value at 'k,w'"),
        (
            '{"k":1}\n2\n',
            "line 2: is a number (2); each line, or each element of the array, must be an object",
        ),
        (
            '[{"k":1},\n\n"a"]',
            'line 3: is a text ("a"); each line, or each element of the array, must be an object',
        ),
        ('{"k":1}\n{"k":2,"k":3}\n', "line 2: has 'k' twice"),
        (b'{"k":1}\n{"k":2,"s":"\xff"}\n', "line 2: is not UTF-8"),
        ("{}\n", "column 'k' (long) is missing from the data"),
        ('[{"k":1}]\n[{"k":2}]\n', "is not JSON with one object a line, or an array of objects: "),
        ('[{"k":1},]', "is not JSON with one object a line, or an array of objects: "),
        ('{"k":15,"w":1}\n\n{"k":16,"w":"x"}\n', "line 3: column 'w' is 'x', which does not fit double"),
        ('[\n{"k":15},\n{"k":16,\n"w":"x"}]', "line 3: column 'w' is 'x', which does not fit double"),
        ('{\n"k":1\n}\n{\n"k":"x"\n}\n', "line 4: column 'k' is 'x', which does not fit long"),
        ('{"k":1}\n{"k":2,"p":1.234}\n', "line 2: column 'p' is '1.234', which does not fit decimal(9,2)"),
        ('{"k":1}\n{"k":2,"p":true}\n', "line 2: column 'p' is True, which does not fit decimal(9,2)"),
        (
            '{"k":1,"l":[1]}\n{"k":2,"l":["x"]}\n',
            "line 2: column 'l' is ['x'], which does not fit list<long>",
        ),
        (
            '{"k":1,"l":[1]}\n{"k":2,"l":["0x1"]}\n',
            "line 2: column 'l' is '0x1', which does not fit list<long>: it is hexadecimal",
        ),
        ('{"k":1}\n{"k":2,"l":5}\n', "line 2: column 'l' is list<long>, but has a number (5) there"),
        ('{"k":1}\nnull\n', "line 2: column 'k' must not be null, but is"),
        ('{"k":1}\n{"w":1}\n', "line 2: column 'k' must not be null, but is"),
    ],
)
def test_an_error_in_a_json_file_is_named_with_its_line(
    tmp_path: Path, text: str | bytes, expected: str
) -> None:
    fields = [("w", dm.DOUBLE), ("p", dm.DECIMAL(9, 2)), ("l", dm.LIST(dm.LONG)), ("s", dm.STRING)]
    schema = dm.Schema([dm.Field("k", dm.LONG)], [], [dm.Field(*one, nullable=True) for one in fields])
    path = written(tmp_path, "a.json", text)
    with pytest.raises(InvalidData) as raised:
        [*open_source(path, schema).batches]
    message = str(raised.value)
    assert expected in message and message.startswith(f"file {path!r}") and "\n" not in message
    for internal in ("Try setting", "records=", "LINE 1", "read_json", "Error"):
        assert internal not in message


def test_the_line_of_a_bad_json_value_is_found_in_any_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(f'{{"k": {number}}}\n\n' for number in range(5_000))
    path = written(tmp_path, "a.jsonl.gz", gzip.compress(f'{rows}{{"k": 5.5}}\n'.encode()))
    schema = OF_K
    with pytest.raises(InvalidData, match=r"line 10,001: column 'k' is '5\.5'"):
        [*open_source(path, schema).batches]
    monkeypatch.setattr(json_files, "_WHOLE_CHARACTERS_MAX", 8)
    path = written(tmp_path, "b.json", '[\n{"k": 1},\n{"k": 5.5}]')
    with pytest.raises(InvalidData, match=r": object 2: column 'k' is '5\.5'"):
        [*open_source(path, schema).batches]
