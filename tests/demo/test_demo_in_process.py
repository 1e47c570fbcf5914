"""The program `dormouse demo` in this process, with the Spark of other tests; and generated lineitem rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.demo import datasets
from dormouse.demo.datasets import Lineitem, scale_of
from dormouse.demo.pipeline import claimed

GENERATED = {"at once": [None], "part by part": [1, 2]}
Cli = Callable[..., tuple[int, str, str]]


def test_a_second_demo_in_the_folder_is_refused_in_one_line(cli: Cli, tmp_path: Path) -> None:
    with claimed(tmp_path / "lake"):
        assert cli("demo", "--folder", str(tmp_path / "lake")) == (
            1,
            "",
            f"dormouse: another demo is running in {tmp_path}/lake: "
            "wait for it, or give this one another --folder\n",
        )


@pytest.mark.slow
def test_the_demo_refuses_an_instance_that_is_not_its_own(
    cli: Cli, tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    schema = dm.Schema(row_keys=[dm.Field("id", dm.LONG)])
    with dm.local(tmp_path / "lake") as instance:
        instance.create_table("flights", schema).ingest(pa.table({"id": [1]}))
    code, _, err = cli("demo", "--folder", str(tmp_path / "lake"))
    assert code == 1
    assert err.startswith("dormouse: the instance in")
    assert err.count("\n") == 1
    with dm.local(tmp_path / "lake") as instance:
        assert instance.table("flights").query().read_all().to_pydict() == {"id": [1]}


def test_a_folder_with_other_files_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    code, _, err = cli("demo", "--folder", str(tmp_path))
    assert code == 1
    assert "is not a Dormouse instance" in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_too_many_rows_for_the_disk_are_refused_before_anything_is_made(
    cli: Cli, tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    code, _, err = cli("demo", "--folder", str(tmp_path / "lake"), "--rows", "100000000000")
    assert code == 1
    assert err.count("\n") == 1
    assert "GB free: ask for fewer --rows" in err


@pytest.mark.slow
def test_the_demo_runs_with_lineitem_in_the_users_own_database(
    spark: object,
    cli: Cli,
    tmp_path: Path,
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test uses --rows, --json, --remove and DORMOUSE_DSN together."""
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


@pytest.mark.slow
def test_rows_generated_part_by_part_match_rows_generated_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several parts are generated if there are more rows than one part may have. The last part is
    truncated.
    """
    calls: list[int | None] = []
    generate = datasets._generate

    def counted(folder: Path, scale: float, parts: int, part: int | None) -> None:
        calls.append(part)
        generate(folder, scale, parts, part)

    monkeypatch.setattr(datasets, "_generate", counted)
    monkeypatch.setattr(datasets, "PARTS_MIN", 2)
    rows_of = {}
    for how, part_rows_max in (("at once", 4_000), ("part by part", 2_000)):
        calls.clear()
        (tmp_path / how).mkdir()
        monkeypatch.setattr(datasets, "PART_ROWS_MAX", part_rows_max)
        with duckdb.connect() as db:
            assert Lineitem(4_000).prepare(db, tmp_path / how, lambda _: None) == 4_000
            rows_of[how] = db.execute("from lineitem order by all").fetchall()
        assert calls == GENERATED[how]
        assert len(list((tmp_path / how).glob("lineitem-*.parquet"))) == 2
    assert rows_of["part by part"] == rows_of["at once"]


@pytest.mark.parametrize("rows", [1, 1_000, 6_001_215, 100_000_000])
def test_the_scale_factor_gives_enough_rows_and_only_a_few_more(rows: int) -> None:
    lines = scale_of(rows) * 6_000_000
    assert rows < lines < max(rows * 1.2, 10_000)
