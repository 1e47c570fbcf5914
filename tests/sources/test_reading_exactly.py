"""Values of files. They are read exactly; ambiguous ones are refused or stay texts."""

from __future__ import annotations

import math
from contextlib import nullcontext
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.errors import InvalidData
from dormouse.model import types as number_rule
from dormouse.sources import csv_files, odd_numbers, sniffing, text_reader
from dormouse.sources.text_format import FileFormat
from dormouse.sources.text_reader import TextFile
from tests.support.writing import infer, open_source

K = dm.Field("k", dm.LONG)


def written(folder: Path, **texts: str | bytes) -> str:
    """Writes files to a folder and returns the folder. An underscore in a name stands for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def inferred(data: Any, name: str) -> list[Any]:
    """Returns a column's values, read with the schema inferred from the files."""
    found = infer(data, ["k"])
    return [
        value for batch in open_source(found.files, found.schema).batches for value in batch[name].to_pylist()
    ]


def loaded(data: Any, name: str, kind: dm.DataType) -> list[Any]:
    """Returns a column's values, read for an existing table whose column has the type."""
    source = open_source(data, dm.Schema([K], [], [dm.Field(name, kind, nullable=True)]))
    return [value for batch in source.batches for value in batch[name].to_pylist()]


@pytest.mark.slow
def test_all_files_of_a_load_must_have_one_order_of_days_and_months(tmp_path: Path) -> None:
    clear, unclear = "k,day\n1,01/13/2020\n", "k,day\n3,03/04/2020\n"
    folder = written(tmp_path / "a", a_csv=clear, b_csv=unclear, c_csv="k,day\n4,2020-05-06\n")
    assert inferred(folder, "day") == [date(2020, 1, 13), date(2020, 3, 4), date(2020, 5, 6)]
    folder = written(tmp_path / "b", a_csv=unclear, b_csv=clear)
    assert "times of 'day' could also be %m/%d/%Y" in infer(folder, ["k"]).written
    with pytest.raises(
        InvalidData, match=r"b\.csv': the times .* are %m/%d/%Y, those of the first file %d/%m/%Y: say which"
    ):
        inferred(folder, "day")


@pytest.mark.slow
def test_dates_whose_days_could_be_months_are_refused(tmp_path: Path) -> None:
    for text in ("01-02-03", "3.4.2020 10:11:12"):
        folder = written(tmp_path / "unclear", a_csv=f"k,t\n1,{text}\n")
        with pytest.raises(
            InvalidData, match=r"a\.csv': the times of column 't' could be .*--type t=timestamp:%"
        ):
            loaded(folder, "t", dm.TIMESTAMP)
        assert loaded(folder, "t", dm.STRING) == [text]
    files = dm.Files(folder, time_formats={"t": "%m.%d.%Y %H:%M:%S"})
    assert loaded(files, "t", dm.TIMESTAMP)[0].month == 3
    with pytest.raises(InvalidData, match="column 't' is string, so it cannot have a time format"):
        loaded(files, "t", dm.STRING)
    for text, day in (("13/02/2020", 13), ("02/02/2020", 2)):
        folder = written(tmp_path / "clear", a_csv=f"k,t\n1,{text}\n")
        assert loaded(folder, "t", dm.DATE) == [date(2020, 2, day)]


def test_texts_that_look_like_times_stay_texts_in_a_string_column(tmp_path: Path) -> None:
    folder = written(tmp_path, a_csv="k;t\n1;31/01/2020\n")
    assert loaded(folder, "t", dm.STRING) == ["31/01/2020"]


def test_the_encoding_of_each_file_is_guessed(tmp_path: Path) -> None:
    name = "k,t\n1,café\n"
    latin, utf8 = name.encode("cp1252"), name.encode()
    assert inferred(written(tmp_path / "a", a_csv=latin, b_csv=utf8, c_csv=latin), "t") == ["café"] * 3
    with pytest.raises(InvalidData, match=r"b\.csv.* give its encoding"):
        inferred(written(tmp_path / "b", a_csv=utf8, b_csv=latin), "t")


def test_json_names_that_differ_only_by_case_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", a_jsonl='{"k": 1, "Name": "x"}\n{"k": 2, "name": "y"}\n')
    with pytest.raises(InvalidData, match=r"a\.jsonl.* has columns 'Name' and 'name', which differ by case"):
        infer(folder, ["k"])
    with pytest.raises(InvalidData, match="which differ by case only"):
        loaded(folder, "name", dm.STRING)
    folder = written(tmp_path / "b", a_jsonl='{"k": 1, "Name": "x", "name_1": "y"}\n')
    assert inferred(folder, "name_1") == ["y"]


def test_a_new_part_of_a_struct_in_a_later_file_is_refused(tmp_path: Path) -> None:
    first = '{"k": 1, "s": {"a": 1, "l": [{"b": 2}]}}\n'
    folder = written(tmp_path / "a", a_jsonl=first, b_jsonl='{"k": 2, "s": {"a": 3}}\n')
    assert inferred(folder, "s") == [{"a": 1, "l": [{"b": 2}]}, {"a": 3, "l": None}]
    for part, name in (('{"A": 1}', "A"), ('{"a": 1, "b": 2}', "b"), ('{"l": [{"b": 2}, {"c": 3}]}', "l.c")):
        folder = written(tmp_path / "b", a_jsonl=first, b_jsonl=f'{{"k": 2, "s": {part}}}\n')
        with pytest.raises(InvalidData, match=rf"b\.jsonl': column 's' has a part '{name}', which is not in"):
            inferred(folder, "s")


@pytest.mark.slow
def test_whole_numbers_that_a_double_cannot_hold_are_refused(tmp_path: Path) -> None:
    exact = {dm.DOUBLE: (2**60, 10**22), dm.FLOAT: (2**24, 10**8)}
    for kind, odd in ((dm.DOUBLE, 2**53 + 1), (dm.DOUBLE, 12345678901234567890), (dm.FLOAT, 2**24 + 1)):
        texts = [f"k,v\n1,{odd}\n", f'k,v\n1,"{odd}"\n', f"k,v\n1, -{odd}\n", f"v,k\n{odd},1\n"]
        for number, text in enumerate(texts):
            folder = written(tmp_path / f"{odd}.{number}", a_csv=text)
            with pytest.raises(
                InvalidData, match=rf"a\.csv', line 2: column 'v' is .*{odd}'.* exactly: decimal"
            ):
                loaded(folder, "v", kind)
        folder = written(tmp_path / str(odd), a_jsonl=f'{{"k": 1, "v": {odd}}}\n{{"k": 2, "v": 1.5}}\n')
        with pytest.raises(InvalidData, match=rf"column 'v' is '{odd}', which does not fit .* exactly"):
            loaded(folder, "v", kind)
        folder = written(tmp_path / f"{odd}.l", a_jsonl=f'{{"k": 1, "v": [{{"x": [{odd}]}}]}}\n')
        with pytest.raises(InvalidData, match=rf"'{odd}', which does not fit .* exactly"):
            loaded(folder, "v", dm.LIST(dm.STRUCT([dm.Field("x", dm.LIST(kind), nullable=True)])))
        texts = "".join(f"{number},{one}\n" for number, one in enumerate(exact[kind]))
        folder = written(tmp_path / f"{odd}.exact", a_csv=f"k,v\n{texts}5,0.1234567890123456789\n")
        assert loaded(folder, "v", kind)[:2] == [*exact[kind]]


def test_the_shortest_text_of_a_floating_point_number_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow, every export and JavaScript write the shortest text of a number that is read back exactly."""
    shortest = {
        dm.DOUBLE: {"1152921504606847000": 2.0**60, "12345678901234567000": 12345678901234567168.0},
        dm.FLOAT: {"123456790": 123456792.0, "16777216": 2.0**24},
    }
    for kind, texts in shortest.items():
        lines = [f"{number},{text}\n" for number, text in enumerate(texts)]
        folder = written(tmp_path / f"{kind}", a_csv="k,v\n" + "".join(lines))
        assert loaded(folder, "v", kind) == [*texts.values()]
        objects = [f'{{"k": 1, "v": {text}}}\n' for text in texts]
        folder = written(tmp_path / f"{kind}.json", a_jsonl="".join(objects))
        assert loaded(folder, "v", kind) == [*texts.values()]
    monkeypatch.setattr(number_rule, "Decimal", None)  # short numbers are not examined
    folder = written(tmp_path / "exact", a_csv="k,v\n1,1700000000123456\n")
    assert loaded(folder, "v", dm.DOUBLE) == [1700000000123456]


def test_a_file_is_read_again_only_for_numbers_that_may_be_inexact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[Any] = []

    class Reread(TextFile):
        def batches(self, *types: Any, **how: Any) -> Any:
            again.extend([how] if how["only"] else [])
            return super().batches(*types, **how)

    monkeypatch.setattr(csv_files, "TextFile", Reread)
    for row, is_odd in (
        ("08:15,1700000000123456789,1.5", False),
        ("01.02.2024,1,1700000000123456", False),
        ("00000000-0000-0000,1,1", False),
        (f"1{'0' * 2_000},1,1", False),
        ("a,1,1700000000123456789", True),
        ("0123,1,1", True),
    ):
        again.clear()
        folder = written(tmp_path, a_csv=f"t,k,v\nx,9,0.5\n{row}\n")
        files = dm.Files(folder, types={"t": dm.STRING}, formats={f"{folder}/a.csv": FileFormat()})
        schema = dm.Schema([K], [], [dm.Field("t", dm.STRING), dm.Field("v", dm.DOUBLE)])
        with nullcontext() if not row.endswith("789") or not is_odd else pytest.raises(InvalidData):
            [*open_source(files, schema).batches]
        assert len(again) == is_odd


def test_codes_with_leading_zeros_after_the_sample_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sniffing, "SAMPLE_BYTES", 64)
    rows = "".join(f"{number},9{number:04},2020-01-01 05:00\n" for number in range(3_000))
    for late in ("01234", '"01234"', "-01", " 007", "007 ", "0x1F"):
        folder = written(tmp_path / "a", a_csv=f"k,zip,at\n{rows}7,{late},2020-01-01 05:00\n")
        with pytest.raises(
            InvalidData, match=r"line 3,002: column 'zip' is .* looks like a code; .*zip=string"
        ):
            inferred(folder, "zip")
    with pytest.raises(InvalidData, match=r"line 3,002: column 'zip' is '0x1F'.* it is hexadecimal"):
        inferred(dm.Files(folder, types={"zip": dm.LONG}), "zip")
    assert inferred(dm.Files(folder, types={"zip": dm.STRING}), "zip")[-1] == "0x1F"
    folder = written(tmp_path / "b", a_csv="k,zip\n1,12345\n", b_csv="k,zip\n02,01234\n")
    with pytest.raises(InvalidData, match=r"b\.csv', line 2: column 'k' is '02'.* looks like a code"):
        inferred(folder, "zip")
    assert loaded(folder, "zip", dm.LONG) == [12345, 1234]


@pytest.mark.slow
def test_inexact_numbers_are_found_in_blocks_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", (64, 1 << 20))
    monkeypatch.setattr(sniffing, "SAMPLE_BYTES", 64)
    for width in range(0, 40, 3):
        text = "k,v\n" + "1,22\n" * 40 + f"{'1' * (width % 18 + 1)},{'5' * (width + 1)}\n5,0123\n"
        folder = written(tmp_path / str(width), a_csv=text)
        with pytest.raises(InvalidData, match=r"column 'v' is '(0123|5{16,})'"):
            inferred(dm.Files(folder, types={"v": dm.DOUBLE} if width > 16 else {}), "v")


@pytest.mark.slow
def test_only_plain_whole_numbers_in_folder_names_are_numbers(tmp_path: Path) -> None:
    for names, kind, values in (
        (["2024_01", "2024_02"], dm.STRING, ["2024_01", "2024_02"]),
        (["007", "10"], dm.STRING, ["007", "10"]),
        (["10", "9007", "a"], dm.STRING, ["10", "9007", "a"]),
        ([" 1", "+1", "-0", "\u0661"], dm.STRING, [" 1", "+1", "-0", "\u0661"]),
        (["-3", "0", "12"], dm.LONG, [-3, 0, 12]),
        ([str(-(2**63)), "1700000000123456789"], dm.LONG, [-(2**63), 1700000000123456789]),
        (["8", str(2**63)], dm.STRING, ["8", str(2**63)]),
        (["1", "__HIVE_DEFAULT_PARTITION__"], dm.LONG, [1, None]),
    ):
        lake = tmp_path / names[0]
        for name in names:
            written(lake / f"p={name}", a_csv="k\n1\n")
        assert infer(str(lake), ["k"]).schema.field("p").type == kind
        assert inferred(str(lake), "p") == values
    assert loaded(str(tmp_path / "007"), "p", dm.LONG) == [7, 10]
    for wrong in ("2024_01", " 1"):
        for kind in (dm.LONG, dm.DOUBLE, dm.DECIMAL(9, 0)):
            with pytest.raises(InvalidData, match=rf"a\.csv': its folder says p={wrong}, but 'p' is "):
                loaded(str(tmp_path / wrong), "p", kind)


def test_a_quote_within_a_value_does_not_end_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sniffing, "SAMPLE_BYTES", 1_000)
    rows = "".join(f'{number},"a, ""b""\nc",{number / 2}\n' for number in range(99))
    for before in ('7,12" pipe,1.5\n', '7,12",1.5\n', ""):
        folder = written(tmp_path, a_csv=f"k,t,v\n{before}{rows}")
        assert [str(field.type) for field in infer(folder, ["k"]).schema.fields] == [
            "long",
            "string",
            "double",
        ]
        assert inferred(folder, "t")[-1] == 'a, "b"\nc'


@pytest.mark.parametrize("delimiter", ["~", " ", "^", "-"])
def test_a_sample_ends_outside_of_quotes_after_any_delimiter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delimiter: str
) -> None:
    monkeypatch.setattr(sniffing, "SAMPLE_BYTES", 1_000)
    for width in range(0, 40, 10):
        rows = "".join(f'{n}~"{"z" * width} ""b""\nc"~{n / 2}\n' for n in range(99))
        folder = written(tmp_path, a_csv=f"k~t~v\n{rows}".replace("~", delimiter))
        found = infer(dm.Files(folder, delimiter=delimiter), ["k"])
        assert [field.type for field in found.schema.fields] == [dm.LONG, dm.STRING, dm.DOUBLE]


@pytest.mark.parametrize("nanosecond", [0, 123])
@pytest.mark.parametrize("second", [-1, 1_600_000_000])
def test_nanoseconds_of_int96_are_refused(tmp_path: Path, second: int, nanosecond: int) -> None:
    path = str(tmp_path / "x.parquet")
    times = pa.array([None, *range(2_000), second * 10**9 + 1_000 + nanosecond], pa.timestamp("ns"))
    whole = pc.multiply(times.view(pa.int64())[:-1], 1_000).view(times.type)
    times = pa.chunked_array([whole, times[-1:]])
    codes = pa.array(["a", "b"] * 1_001).dictionary_encode()
    table = pa.table({"k": range(len(times)), "t": times, "code": codes})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, row_group_size=700)
    if nanosecond:
        with pytest.raises(
            InvalidData, match=r"x\.parquet': column 't' has nanoseconds, but timestamps have"
        ):
            inferred(path, "t")
    else:
        assert inferred(path, "t")[-1] == datetime.fromtimestamp(second, UTC).replace(microsecond=1)


def test_int96_times_beyond_the_range_of_nanoseconds_are_read(tmp_path: Path) -> None:
    path, last = str(tmp_path / "x.parquet"), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    table = pa.table({"k": [1], "t": pa.array([last], pa.timestamp("us", "UTC"))})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    assert inferred(path, "t") == [last]


@pytest.mark.slow
@pytest.mark.parametrize("word", ["infinity", "-infinity", "Infinity", "epoch", '" Epoch "'])
def test_special_time_words_of_postgresql_are_texts(tmp_path: Path, word: str) -> None:
    """One such word is "infinity". DuckDB's strptime returns 1900-01-01 for them in any format."""
    text = word.strip('" ')
    for name, time, kind in (
        ("iso", "2020-01-31", dm.DATE),
        ("german", "31.01.2020", dm.DATE),
        ("time", "31.01.2020 10:11:12", dm.TIMESTAMP),
    ):
        for number, lines in enumerate(([word, time], [time, word], [word])):
            rows = "".join(f"{at},{line}\n" for at, line in enumerate(lines))
            folder = written(tmp_path / f"{name}.{number}", a_csv=f"k,v\n{rows}")
            assert inferred(folder, "v") == [line.strip('"') for line in lines]
            with pytest.raises(InvalidData, match=rf"a\.csv', line [23]: column 'v' is '\s*{text}"):
                loaded(folder, "v", kind)
        folder = written(tmp_path / f"{name}.format", a_csv=f"k,v\n1,{word}\n")
        how = dm.Files(folder, time_formats={"v": "%d.%m.%Y"})
        with pytest.raises(InvalidData, match=r"line 2: column 'v' is .* written as %d\.%m\.%Y"):
            loaded(how, "v", kind)
        folder = written(tmp_path / f"{name}.json", a_jsonl=f'{{"k": 1, "v": "{text}"}}\n')
        assert inferred(folder, "v") == [text]


@pytest.mark.slow
def test_numbers_that_would_change_are_refused_or_texts(tmp_path: Path) -> None:
    for kind, text in (
        (dm.LONG, "0x0A"), (dm.INT, "0X1f"), (dm.LONG, " 0x0A"), (dm.LONG, '"0x0A"'),
        (dm.DOUBLE, "1e400"), (dm.DOUBLE, "-1e400"), (dm.DOUBLE, "9" * 400), (dm.FLOAT, "1e39"),
        (dm.DOUBLE, "1e-400"), (dm.FLOAT, "-1.5E-60"),
        (dm.DOUBLE, "123456789012345678.12"), (dm.DOUBLE, "9007199254740993.0"), (dm.FLOAT, "16777217.5"),
    ):  # fmt: skip
        for number, lines in enumerate((["5", text], [text])):
            rows = "".join(f"{at},{line}\n" for at, line in enumerate(lines))
            folder = written(tmp_path / f"{kind}.{text[:9].strip()}.{number}", a_csv=f"k,v\n{rows}")
            start = text.strip('" ')[:9]
            with pytest.raises(InvalidData, match=rf"a\.csv', line {2 + rows.count('5', 0, 4)}: .*{start}"):
                loaded(folder, "v", kind)
            if kind != dm.FLOAT:
                assert inferred(folder, "v") == [line.strip('"') for line in lines]
    folder = written(tmp_path / "json", a_jsonl='{"k": 1, "v": 1e400}\n')
    with pytest.raises(InvalidData, match=r"column 'v' is '1e400', which does not fit double"):
        loaded(folder, "v", dm.DOUBLE)
    folder = written(tmp_path / "hex", a_jsonl='{"k": 1, "v": "0x0A"}\n')
    with pytest.raises(InvalidData, match=r"column 'v' is '0x0A', which does not fit long"):
        loaded(folder, "v", dm.LONG)
    written(tmp_path / "folders" / "v=1e400", a_csv="k\n1\n")
    with pytest.raises(InvalidData, match=r"its folder says .*1e400"):
        loaded(str(tmp_path / "folders"), "v", dm.DOUBLE)
    words = written(tmp_path / "words", a_csv="k,v\n1,inf\n2,-Infinity\n3,0.0\n4,1.5e-300\n")
    assert loaded(words, "v", dm.DOUBLE) == [math.inf, -math.inf, 0.0, 1.5e-300]


@pytest.mark.parametrize(
    ("text", "is_double"),
    [
        ("123456789012345678.12", False),
        ("0.12345678901234567891", False),
        ("1e400", False),
        ("1e-400", False),
        ("0.10000000000000001", True),  # printf("%.17g") writes 0.1 like this
        ("0.1000000000000000000000", True),
        ("2.2999999999999998e+25", True),
        ("123456789012345.67", True),
        ("1e23", True),
        ("0.1000000000000000055511151231257827", True),  # more digits of the double 0.1
    ],
)
def test_a_double_is_inferred_only_for_numbers_it_can_hold(
    tmp_path: Path, text: str, is_double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path, a_csv=f"k,v\n1,0.5\n2,{text}\n")
    assert inferred(folder, "v") == ([0.5, float(text)] if is_double else ["0.5", text])
    monkeypatch.setattr(sniffing, "SAMPLE_BYTES", 64)
    late = written(tmp_path / "late", a_csv="k,v\n" + "1,0.5\n" * 100 + f"2,{text}\n")
    if is_double:
        assert inferred(late, "v")[-1] == float(text)
        return
    with pytest.raises(InvalidData, match=r"line 102: column 'v' is '.*--type v=string|string keeps it"):
        inferred(late, "v")


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["123456789012345678.12", "0.12345678901234567891", "1e400", "1e-400", "9007199254740993.0", "9" * 41],
)
def test_json_numbers_are_kept_exactly_or_refused(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB's reader of JSON would round such numbers to doubles."""
    monkeypatch.setattr(odd_numbers, "_BLOCK_BYTES", 16)
    for number, lines in enumerate(([text], ["0.5", text], [f"[{text}, 1.5]"], [f'{{"x": {text}}}'])):
        rows = "".join(f'{{"k": {at}, "v": {line}}}\n' for at, line in enumerate(lines))
        folder = written(tmp_path / str(number), a_jsonl=rows, b_json=f"[{','.join(rows.splitlines())}]")
        kept = {0: [text], 1: ["0.5", text], 2: [[text, "1.5"]], 3: [{"x": text}]}[number]
        assert inferred(folder, "v") == kept * 2
        kind = {2: dm.LIST(dm.DOUBLE), 3: dm.STRUCT([dm.Field("x", dm.DOUBLE)])}.get(number, dm.DOUBLE)
        if text.startswith("0."):  # a fraction is rounded when the column is a double
            assert len(loaded(folder, "v", kind)) == 2 * len(lines)
        else:
            with pytest.raises(InvalidData, match=rf"line {len(lines)}: column 'v' is '{text[:30]}"):
                loaded(folder, "v", kind)
    first = written(tmp_path / "late", a_jsonl='{"k": 1, "v": 0.5}', b_jsonl=f'{{"k": 2, "v": {text}}}')
    with pytest.raises(InvalidData, match=rf"b\.jsonl', line 1: column 'v' is '{text[:30]}"):
        inferred(first, "v")


def test_json_numbers_that_a_double_can_hold_are_doubles(tmp_path: Path) -> None:
    texts = ["0.30000000000000004", "1e3", "2E2", "18446744073709551616", "-1.50000000000000000000"]
    rows = "".join(f'{{"k": 1, "v": {text}}}\n' for text in texts)
    folder = written(tmp_path / "v", a_jsonl=f'{rows}{{"k": 2, "v": null}}\n{{"k": 3}}\n')
    assert inferred(folder, "v") == [*map(float, texts), None, None]
    assert loaded(folder, "v", dm.STRING) == [*texts, None, None]
    folder = written(tmp_path / "s", a_jsonl='{"k": 1, "s": {"y": [1e2]}}\n{"k": 2, "s": 1e2}\n')
    assert loaded(folder, "s", dm.STRING) == ['{"y":[100.0]}', "1e2"]
