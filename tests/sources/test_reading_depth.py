"""Deeply nested JSON files, read as text up to a depth and refused in one line beyond that depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import InvalidData
from dormouse.sources import json_files
from dormouse.sources.json_files import JSON_DEPTH_MAX
from tests.support.writing import infer, open_source

K = dm.Field("k", dm.LONG)
OBJECTS, LISTS = ('{"a":', "1", "}"), ("[", "", "]")


def nested(depth: int, kind: tuple[str, str, str]) -> str:
    """Returns a JSON object with this total depth of nesting."""
    begin, inner, end = kind
    return f'{{"k": 1, "v": {begin * (depth - 1)}{inner}{end * (depth - 1)}}}'


def rows_of(path: Path, kind: dm.DataType = dm.STRING) -> list[Any]:
    source = open_source(str(path), dm.Schema([K], [], [dm.Field("v", kind, nullable=True)]))
    return [row for batch in source.batches for row in batch.to_pylist()]


@pytest.mark.parametrize("kind", [OBJECTS, LISTS])
@pytest.mark.parametrize("depth", [JSON_DEPTH_MAX + 1, 1_000, 10_000, 100_000])
def test_json_that_nests_too_deeply_is_refused(
    tmp_path: Path, depth: int, kind: tuple[str, str, str]
) -> None:
    deep, plain = nested(depth, kind), '{"k": 2, "v": "a"}'
    texts = {
        "a.jsonl": f"{plain}\n{deep}\n",
        "b.json": f"[{plain},\n{deep}]",
        "c.json": plain + "\n" + deep.replace("[", "[\n").replace("{", "{ "),
        "d.jsonl": f"{plain}\n{deep[: deep.index('v') + 4 + JSON_DEPTH_MAX * len(kind[0])]}",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        for read in (rows_of, lambda path: infer(str(path), ["k"])):
            with pytest.raises(
                InvalidData, match=rf"{name}', line \d+: more than 100 levels of nesting"
            ) as caught:
                read(tmp_path / name)
            assert caught.value.data["line"] >= 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [OBJECTS, LISTS])
@pytest.mark.parametrize("depth", [15, 17, 20, JSON_DEPTH_MAX])
def test_json_within_the_limit_is_read_as_text(
    tmp_path: Path, depth: int, kind: tuple[str, str, str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(nested(depth, kind) + "\n")
    assert rows_of(path) == [{"k": 1, "v": nested(depth, kind)[14:-1]}]
    assert infer(str(path), ["k"]).schema.names == ("k", "v")


def test_brackets_in_strings_do_not_count_as_nesting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = "[{" * 300 + '\\"' + "[{" * 300 + "\\\\"
    lines = [f'{{"k": {k}, "v": "{value}"}}' for k in range(20)]
    wanted = [{"k": k, "v": value.replace('\\"', '"').replace("\\\\", "\\")} for k in range(20)]
    for size in (7, 64, 1 << 20):
        monkeypatch.setattr(json_files, "_DEPTH_BYTES", size)
        for name, text in {"a.jsonl": "\n".join(lines), "b.json": f"[{','.join(lines)}]"}.items():
            (tmp_path / name).write_text(text)
            assert rows_of(tmp_path / name) == wanted
        # closing brackets within strings do not reduce the depth
        (tmp_path / "c.json").write_text('[{"k": 1, "v": ' + '["]]", ' * 150 + "1" + "]" * 150 + "}]")
        with pytest.raises(InvalidData, match=r"line 1: more than 100 levels of nesting"):
            rows_of(tmp_path / "c.json")
