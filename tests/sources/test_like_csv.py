"""Tables made with the columns of a CSV file, whose types are inferred from its values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import InvalidData, InvalidSchema
from dormouse.sources import sniffing
from tests.standard import OF_K
from tests.support.api import Instance

TEXT = """id,name,at,day,x,big,flag,clock,nothing,code
1,"a, b",2026-01-02 03:04:05,2026-01-02,1.5,12345678901,true,10:00:00,,007
2,"",2026-01-02 03:04:05.25,2026-01-03,2,,false,11:00:00,,x
3,,,2026-01-04,,3,,,,
"""
TYPES = {
    "id": dm.LONG, "name": dm.STRING, "at": dm.TIMESTAMP, "x": dm.DOUBLE, "big": dm.LONG,
    "flag": dm.BOOLEAN, "clock": dm.STRING, "nothing": dm.STRING, "code": dm.STRING,
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.csv"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_a_table_like_a_csv_file_has_its_types_and_loads_it(instance: Instance, path: Path) -> None:
    table = instance.create_table("t", like=str(path), row_keys=["id"])
    fields = {field.name: field for field in table.schema.fields}
    assert {name: fields[name].type for name in TYPES} == TYPES
    assert not fields["id"].nullable and all(one.nullable for name, one in fields.items() if name != "id")
    table.ingest(path)
    rows = table.query().read_all().to_pylist()
    assert [row["name"] for row in rows] == ["a, b", "", None]
    assert [row["code"] for row in rows] == ["007", "x", None]
    assert [row["x"] for row in rows] == [1.5, 2.0, None]
    assert rows[0]["clock"] == "10:00:00" and rows[2]["big"] == 3
    assert rows[1]["at"].isoformat() == "2026-01-02T03:04:05.250000+00:00"


@pytest.mark.slow
def test_the_command_line_creates_a_table_like_a_csv_file(cli: Callable[..., Any], path: Path) -> None:
    given = (
        "t",
        "--like",
        str(path),
        "--row-key",
        "id",
        "--type",
        "id=string",
        "--sort-key",
        "day",
        "--json",
    )
    code, out, _ = cli("table", "create", *given)
    made = json.loads(out)
    assert code == 0
    assert [one["type"] for one in made["schema"]["row_keys"]] == ["string"]
    assert [one["type"] for one in made["schema"]["sort_keys"]] == ["date"]


@pytest.mark.parametrize(
    ("text", "row_keys", "error", "message"),
    [
        ("", ["id"], InvalidData, "file .*x.csv' is empty"),
        ("id,id\n1,2\n", ["id"], InvalidData, "has two columns 'id'"),
        ("id,v\n" + "2,3\n" * 30 + "1\n", ["id"], InvalidData, "x.csv', line 32: .* it has 1 cell, not 2"),
        ("id,v\n1,2\n", ["key"], InvalidSchema, "has no column 'key'; its columns are id, v"),
        ("id,v\n1.5,2\n", ["id"], InvalidSchema, "id"),
        (None, ["id"], InvalidData, "x.csv' does not exist"),
    ],
)
def test_a_file_that_cannot_be_a_table_is_one_clear_line(
    instance: Instance,
    path: Path,
    text: str | None,
    row_keys: list[str],
    error: type[Exception],
    message: str,
) -> None:
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=message) as raised:
        instance.create_table("t", like=path, row_keys=row_keys)
    assert "\n" not in str(raised.value) and instance.tables() == []


def test_a_schema_and_like_together_are_refused(instance: Instance, path: Path) -> None:
    schema = OF_K
    for given in ({"like": path}, {"row_keys": ["k"]}):
        with pytest.raises(InvalidSchema, match="give either a schema, or like"):
            instance.create_table("t", schema, **given)  # type: ignore[arg-type]
    with pytest.raises(InvalidSchema, match=r"schema must be dm.Schema\(...\), not None"):
        instance.create_table("t")


def test_types_are_inferred_from_the_beginning_of_a_large_file(
    instance: Instance, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sniffing, "SAMPLE_BYTES", 64)
    path.write_text("id,v\n" + "1,1\n" * 100 + "2,x\n")
    table = instance.create_table("t", like=path, row_keys=["id"])
    assert table.schema.field("v").type == dm.LONG
    with pytest.raises(InvalidData, match="column 'v'"):
        table.ingest(path)
    assert table.query().read_all().num_rows == 0


def test_cuts_and_consumers_are_public() -> None:
    assert {"Cut", "Consumer"} <= set(dm.__all__)
    assert dm.Cut.__module__ == "dormouse.model.cut" and dm.Consumer.__module__ == "dormouse.reading.changes"
