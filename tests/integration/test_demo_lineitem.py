"""`dormouse demo --rows`: lineitem in this process, whose Spark other tests use too; how it is generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from dormouse.demo import lineitem
from dormouse.demo.lineitem import Lineitem, scale_of

GENERATED = {"at once": [None], "part by part": [1, 2]}


def test_lineitem_in_a_database_of_ones_own(
    spark: object,
    cli: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--rows, --json, --remove and DORMOUSE_DSN at once."""
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    code, out, err = cli("demo", "--folder", str(tmp_path / "la'ke"), "--rows", "5000", "--json", "--remove")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["rows"] == 5_000
    assert report["steps"][-1]["rows"] == 5_000
    assert [answer["matches_duckdb"] for answer in report["answers"]] == [True] * 5
    assert report["answers"][3]["rows"] == 5_000
    assert any("pushed down" in step["step"] for step in report["steps"])
    assert not (tmp_path / "la'ke").exists()


def test_rows_generated_part_by_part_are_those_generated_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than a part may have are generated in so many parts as are needed; the last is cut."""
    calls: list[int | None] = []
    generate = lineitem._generate

    def counted(folder: Path, scale: float, parts: int, part: int | None) -> None:
        calls.append(part)
        generate(folder, scale, parts, part)

    monkeypatch.setattr(lineitem, "_generate", counted)
    monkeypatch.setattr(lineitem, "PARTS_MIN", 2)
    rows_of = {}
    for how, part_rows_max in (("at once", 4_000), ("part by part", 2_000)):
        calls.clear()
        (tmp_path / how).mkdir()
        monkeypatch.setattr(lineitem, "PART_ROWS_MAX", part_rows_max)
        with duckdb.connect() as db:
            assert Lineitem(4_000).prepare(db, tmp_path / how, lambda _: None) == 4_000
            rows_of[how] = db.execute("from lineitem order by all").fetchall()
        assert calls == GENERATED[how]
        assert len(list((tmp_path / how).glob("lineitem-*.parquet"))) == 2
    assert rows_of["part by part"] == rows_of["at once"]


@pytest.mark.parametrize("rows", [1, 1_000, 6_001_215, 100_000_000])
def test_the_scale_factor_gives_enough_rows_and_few_too_many(rows: int) -> None:
    lines = scale_of(rows) * 6_000_000
    assert rows < lines < max(rows * 1.2, 10_000)
