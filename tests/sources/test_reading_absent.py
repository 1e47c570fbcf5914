"""Text files without some columns, without rows, or with columns that the table does not have."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import InvalidData
from dormouse.sources import sniffing
from dormouse.sources.infer import columns_of
from tests.support.writing import infer, open_source


def written(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def rows_of(path: str | dm.Files, *fields: dm.Field) -> list[Any]:
    source = open_source(path, dm.Schema(fields[:1], [], fields[1:]))
    return [row for batch in source.batches for row in batch.to_pylist()]


ADDED = dm.Field("note", dm.STRING, nullable=True)


@pytest.mark.parametrize(
    ("kind", "text", "options"),
    [
        (dm.TIMESTAMP, "2020-01-01T10:00:00Z", {}),
        (dm.BYTES, "AAE=", {}),
        (dm.DATE, "01.02.2020", {"time_formats": {"at": "%d.%m.%Y"}}),
        (dm.TIMESTAMP, "01.02.2020 10:00", {"time_formats": {"at": "%d.%m.%Y %H:%M"}}),
        (dm.DECIMAL(10, 2), "1.50", {}),
        (dm.LONG, "5.0", {}),
        (dm.BOOLEAN, "true", {}),
    ],
)
def test_a_file_can_lack_an_added_column_beside_columns_of_any_type(
    tmp_path: Path, kind: dm.DataType, text: str, options: dict[str, Any]
) -> None:
    path = written(tmp_path, "a.csv", f"k,at\n1,{text}\n")
    at = dm.Field("at", kind)
    (whole,) = rows_of(dm.Files(path, **options), dm.Field("k", dm.LONG), at)
    (found,) = rows_of(dm.Files(path, **options), dm.Field("k", dm.LONG), at, ADDED)
    assert found == {**whole, "note": None}


def test_the_header_is_checked_before_the_format_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = dm.Field("k", dm.LONG), ADDED
    wide = written(tmp_path, "a.csv", "k,note," + ",".join(f"c{n}" for n in range(50_000)) + "\nx\n")
    narrow = written(tmp_path, "b.csv", "k,more\nx\n")
    other = written(tmp_path, "c.csv", ",".join(f"c{n}" for n in range(50_000)) + "\nx\n")
    with monkeypatch.context() as patched:
        patched.setattr(sniffing, "sniff", None)
        for path, message in (
            (wide, "'c0' is not in"),
            (narrow, "'more' is not in"),
            (other, "'k' .* is missing"),
        ):
            with pytest.raises(InvalidData, match=f"csv': column {message}"):
                rows_of(path, *fields)
    twice = written(tmp_path, "d.csv", "k,note,note\n1,a,b\n")
    with pytest.raises(InvalidData, match="'note'"):
        rows_of(twice, *fields)


EMPTY = {"": True, "\n \n": True, "\ufeff": True, "k,v\n": False}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("text", EMPTY)
def test_a_csv_file_without_lines_has_no_rows(tmp_path: Path, text: str, packed: bool) -> None:
    content = gzip.compress(text.encode()) if packed else text.encode()
    path = written(tmp_path, "0.csv.gz" if packed else "0.csv", content)
    assert rows_of(path, dm.Field("k", dm.LONG), dm.Field("v", dm.STRING)) == []
    if EMPTY[text]:
        with pytest.raises(InvalidData, match="is empty, so its columns are unknown"):
            infer(path, ["k"])
        assert columns_of(path)[1] == {}
    written(tmp_path, "1.csv", "k,v\n1,a\n")
    rows = rows_of(str(tmp_path), dm.Field("k", dm.LONG), dm.Field("v", dm.STRING))
    assert rows == [{"k": 1, "v": "a"}]
    assert infer(str(tmp_path), ["k"]).schema.names == ("k", "v")
    assert columns_of(str(tmp_path))[1] == {"k": dm.LONG, "v": dm.STRING}


@pytest.mark.parametrize("text", ["", "[]", " \n"])
def test_a_json_file_without_objects_has_no_columns(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, "0.jsonl", text)
    assert columns_of(path)[1] == {}
    written(tmp_path, "1.jsonl", '{"k": 1, "v": "a"}\n')
    assert columns_of(str(tmp_path))[1] == {"k": dm.LONG, "v": dm.STRING}
