"""No value of a file becomes another without a word: what could be meant in two ways is refused, or text."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.data.infer import infer
from dormouse.data.source import open_source
from dormouse.errors import InvalidData

K = dm.Field("k", dm.LONG)


def written(folder: Path, **texts: str | bytes) -> str:
    """A folder of files, whose names have an underscore for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def inferred(data: Any, name: str) -> list[Any]:
    """The column of a table that is made of the files."""
    found = infer(data, ["k"])
    return [
        value for batch in open_source(found.files, found.schema).batches for value in batch[name].to_pylist()
    ]


def loaded(data: Any, name: str, kind: dm.DataType) -> list[Any]:
    """The column of a table that is there, and has the type."""
    source = open_source(data, dm.Schema([K], [], [dm.Field(name, kind, nullable=True)]))
    return [value for batch in source.batches for value in batch[name].to_pylist()]


def test_days_and_months_are_in_one_order_in_all_files_of_a_load(tmp_path: Path) -> None:
    clear, unclear = "k,day\n1,01/13/2020\n", "k,day\n3,03/04/2020\n"
    folder = written(tmp_path / "a", a_csv=clear, b_csv=unclear, c_csv="k,day\n4,2020-05-06\n")
    assert inferred(folder, "day") == [date(2020, 1, 13), date(2020, 3, 4), date(2020, 5, 6)]
    folder = written(tmp_path / "b", a_csv=unclear, b_csv=clear)
    assert "times of 'day' could also be %m/%d/%Y" in infer(folder, ["k"]).written
    with pytest.raises(
        InvalidData, match=r"b\.csv': the times .* are %m/%d/%Y, those of the first file %d/%m/%Y: say which"
    ):
        inferred(folder, "day")


def test_days_that_could_be_months_are_asked_for(tmp_path: Path) -> None:
    for text in ("03/04/2020", "01-02-03", "3.4.2020 10:11:12"):
        folder = written(tmp_path / "unclear", a_csv=f"k,t\n1,{text}\n")
        with pytest.raises(
            InvalidData, match=r"a\.csv': the times of column 't' could be .*--type t=timestamp:%"
        ):
            loaded(folder, "t", dm.TIMESTAMP)
        assert loaded(folder, "t", dm.STRING) == [text]
    said = dm.Files(folder, time_formats={"t": "%m.%d.%Y %H:%M:%S"})
    assert loaded(said, "t", dm.TIMESTAMP)[0].month == 3
    with pytest.raises(InvalidData, match="column 't' is string: no format of times goes with it"):
        loaded(said, "t", dm.STRING)
    for text, day in (("13/02/2020", 13), ("02/02/2020", 2), ("2020/02/03", 3)):
        folder = written(tmp_path / "clear", a_csv=f"k,t\n1,{text}\n")
        assert loaded(folder, "t", dm.DATE) == [date(2020, 2, day)]


def test_texts_that_look_like_times_stay_texts(tmp_path: Path) -> None:
    folder = written(tmp_path, a_csv="k;t\n1;31/01/2020\n")
    assert loaded(folder, "t", dm.STRING) == ["31/01/2020"]


def test_an_encoding_is_guessed_of_each_file(tmp_path: Path) -> None:
    name = "k,t\n1,café\n"
    latin, utf8 = name.encode("cp1252"), name.encode()
    assert inferred(written(tmp_path / "a", a_csv=latin, b_csv=utf8, c_csv=latin), "t") == ["café"] * 3
    with pytest.raises(InvalidData, match=r"b\.csv.* say which encoding"):
        inferred(written(tmp_path / "b", a_csv=utf8, b_csv=latin), "t")


def test_keys_of_json_that_differ_by_case_only_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", a_jsonl='{"k": 1, "Name": "x"}\n{"k": 2, "name": "y"}\n')
    with pytest.raises(InvalidData, match=r"a\.jsonl.* has columns 'Name' and 'name', which differ by case"):
        infer(folder, ["k"])
    with pytest.raises(InvalidData, match="which differ by case only"):
        loaded(folder, "name", dm.STRING)
    folder = written(tmp_path / "b", a_jsonl='{"k": 1, "Name": "x", "name_1": "y"}\n')
    assert inferred(folder, "name_1") == ["y"]


def test_no_part_of_an_object_is_left_out(tmp_path: Path) -> None:
    first = '{"k": 1, "s": {"a": 1, "l": [{"b": 2}]}}\n'
    folder = written(tmp_path / "a", a_jsonl=first, b_jsonl='{"k": 2, "s": {"a": 3}}\n')
    assert inferred(folder, "s") == [{"a": 1, "l": [{"b": 2}]}, {"a": 3, "l": None}]
    for part, told in (('{"A": 1}', "A"), ('{"a": 1, "b": 2}', "b"), ('{"l": [{"b": 2}, {"c": 3}]}', "l.c")):
        folder = written(tmp_path / "b", a_jsonl=first, b_jsonl=f'{{"k": 2, "s": {part}}}\n')
        with pytest.raises(InvalidData, match=rf"b\.jsonl': column 's' has a part '{told}', which is not in"):
            inferred(folder, "s")
