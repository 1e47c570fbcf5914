"""`dormouse update`, `merge-into`, `replace`, and `sql --write`: what they change, ask, print and refuse."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.cli import data, main
from tests.every_door import of_arrow
from tests.support.api import Instance

Cli = Callable[..., tuple[int, str, str]]
SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)],
    values=[
        dm.Field("v", dm.STRING, nullable=True),
        dm.Field("n", dm.INT, nullable=True),
        dm.Field("l", dm.LIST(dm.LONG), nullable=True),
    ],
)
ROWS = [{"k": 1, "v": "a", "n": 1}, {"k": 2, "v": "b", "n": 2}, {"k": 3, "v": None, "n": None}]


@pytest.fixture
def cli(
    instance: Instance,
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Cli:
    """Returns a function that runs a command on an instance with a table `t` of three rows."""
    instance.create_table("t", SCHEMA).ingest(ROWS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.json").write_text(
        json.dumps([{"k": 2, "v": "B", "n": 20}, {"k": 3, "v": "gone", "n": 0}, {"k": 9, "v": "new", "n": 9}])
    )

    def run(*args: str) -> tuple[int, str, str]:
        where = ("--dsn", dsn, "--objects", instance.objects.url)
        monkeypatch.setattr(sys, "argv", ["dormouse", *args, *where])
        code = main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def values(instance: Instance) -> dict[int, tuple[Any, Any]]:
    return {row["k"]: (row["v"], row["n"]) for row in of_arrow(instance.table("t").query())}


BEFORE = {1: ("a", 1), 2: ("b", 2), 3: (None, None)}
CHANGES: list[tuple[list[str], str, dict[int, tuple[Any, Any]]]] = [
    (["update", "t", "--where", "k=2", "--set", "v=x=y", "--set", "n=7"], "updated 1 row of table t",
     BEFORE | {2: ("x=y", 7)}),
    (["update", "t", "--where", "k=1:3", "--set-sql", "n=n + k"], "updated 2 rows of table t",
     BEFORE | {1: ("a", 2), 2: ("b", 4)}),
    (["update", "t", "--where-sql", "v is null or n > 1", "--set", "v=z"], "updated 2 rows of table t",
     BEFORE | {2: ("z", 2), 3: ("z", None)}),
    (["update", "t", "--all", "--set-sql", "v=null"], "updated 3 rows of table t",
     {1: (None, 1), 2: (None, 2), 3: (None, None)}),
    (["merge-into", "t", "new.json", "--on", "k"], "merged: 1 row inserted, 2 rows updated, 0 rows deleted",
     {1: ("a", 1), 2: ("B", 20), 3: ("gone", 0), 9: ("new", 9)}),
    (["merge-into", "t", "new.json", "--on", "t.k = s.k and s.n >= 0",
      "--when", "matched and s.v = 'gone' then delete", "--when", "matched then update set v = t.v || s.v",
      "--when", "not matched by source then update set n = -1"],
     "merged: 0 rows inserted, 2 rows updated, 1 row deleted", {1: ("a", -1), 2: ("bB", 2)}),
    (["replace", "t", "new.json", "--where", "k=2:"], "replaced the rows of table t with k=2: by 3 rows",
     {1: ("a", 1), 2: ("B", 20), 3: ("gone", 0), 9: ("new", 9)}),
    (["replace", "t", "new.json", "--where-sql", "n > 1 or v is null"],
     "replaced the rows of table t where n > 1 or v is null by 3 rows",
     {1: ("a", 1), 2: ("B", 20), 3: ("gone", 0), 9: ("new", 9)}),
    (["delete", "t", "--where-sql", "n > 1 or v is null"],
     "deleted the rows of table t where n > 1 or v is null (2 rows)", {1: ("a", 1)}),
    (["sql", "--write", "update t set n = $n where k = 1", "--param", "n=5"],
     "updated 1 row of table t", BEFORE | {1: ("a", 5)}),
    (["sql", "--write", "delete from t where k > 1"],
     "deleted the matching rows of table t", {1: ("a", 1)}),
    (["sql", "--write", "delete from t where v = 'a' or n = 2"],
     "deleted 2 rows of table t", {3: (None, None)}),
    (["sql", "--write", "insert into t (k, v) values (7, 'it''s')"],
     "inserted 1 row into table t", BEFORE | {7: ("it's", None)}),
]  # fmt: skip
WITH_QUESTIONS = {"update", "replace", "delete"}


@pytest.mark.parametrize(("said", "out", "after"), CHANGES, ids=lambda case: str(case)[:60])
def test_a_command_changes_rows(
    cli: Cli, instance: Instance, said: list[str], out: str, after: dict[int, Any]
) -> None:
    yes = ["--yes"] if said[0] in WITH_QUESTIONS else []
    code, shown, err = cli(*said, *yes)
    assert (code, shown.strip(), err) == (0, out, "")
    assert values(instance) == after


def test_a_dry_run_counts_and_changes_nothing(cli: Cli, instance: Instance) -> None:
    for said, out, after in CHANGES:
        code, shown, err = cli(*said, "--dry-run", "--json")
        assert (code, err) == (0, "")
        report = json.loads(shown)
        counts = [2, 3] if said[0] == "replace" else list(map(int, re.findall(r"\b(\d+) rows? ", out)))
        counts = counts or [len(BEFORE) - len(after)]
        changed = sum(report.get(name) or 0 for name in ("rows", "inserted", "updated", "deleted"))
        assert changed == sum(counts)
        assert not report.get("applied")
        assert cli(*said, "--dry-run")[1].startswith("would ")
        assert values(instance) == BEFORE


@pytest.mark.parametrize(
    "said",
    [
        ["update", "t", "--all", "--set", "v=x"],
        ["update", "t", "--where-sql", "true", "--set", "v=x"],
        ["replace", "t", "new.json", "--where", "k=2"],
    ],
)
def test_a_change_needs_yes_without_a_terminal(cli: Cli, instance: Instance, said: list[str]) -> None:
    code, out, err = cli(*said)
    assert (code, out) == (2, "") and "--yes" in err and err.count("\n") == 1
    assert values(instance) == BEFORE


BAD: list[tuple[list[str], str]] = [
    (["sql", "update t set v = 'x'"], "--write"),
    (["sql", "--write", "select * from t"], "without --write"),
    (["sql", "--write", "drop table t"], "not DROP"),
    (["sql", "--write", "delete from t; delete from t"], "only one statement"),
    (["sql", "--write", "delete from t", "--limit", "5"], "leave out"),
    (["sql", "--write", "delete from t", "--as-of", "2026-01-01"], "leave out"),
    (["sql", "select 1", "--dry-run"], "give --write"),
    (["sql", "select 1", "--id", "x"], "give --write"),
    (["update", "t", "--where", "k=1"], "--set"),
    (["update", "t", "--set", "v=x"], "--where"),
    (["update", "t", "--where", "k=1", "--where-sql", "true", "--set", "v=x"], "only one of --where and"),
    (["delete", "t", "--all", "--where-sql", "true"], "only one of --where-sql and --all"),
    (["update", "t", "--all", "--set", "v"], "column=value"),
    (["update", "t", "--all", "--set", "v="], "--set-sql column=null"),
    (["update", "t", "--all", "--set", "v=x", "--set-sql", "v=n"], "set twice"),
    (["update", "t", "--all", "--set", "m=x", "--yes"], "unknown column 'm'"),
    (["update", "t", "--all", "--set", "n=x", "--yes"], "'x'"),
    (["update", "t", "--all", "--set", "l=[1]", "--yes"], "--set-sql l="),
    (["update", "t", "--all", "--set-sql", "n=(select 1)", "--yes"], "subquery"),
    (["merge-into", "t", "new.json", "--on", "m"], "m"),
    (["merge-into", "t", "new.json", "--on", "k", "--when", "matched then"], "syntax error"),
    (
        ["merge-into", "t", "new.json", "--on", "k", "--when", "matched then delete; drop"],
        "only one statement",
    ),
    (["replace", "t", "new.json", "--yes"], "--where"),
]


def test_bad_input_is_one_line_and_changes_nothing(cli: Cli, instance: Instance) -> None:
    for said, reason in BAD:
        code, out, err = cli(*said)
        assert (code, out) == (2, ""), said
        assert reason in err and err.count("\n") == 1, said
        assert values(instance) == BEFORE, said


def test_long_changes_show_progress(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    @contextmanager
    def progress(what: str, *, unit: str) -> Iterator[None]:
        shown.append(what)
        yield

    monkeypatch.setattr(data, "progress", progress)
    cli("delete", "t", "--where-sql", "n = 1", "--yes")
    cli("sql", "--write", "update t set n = 1")
    assert shown == ["delete rows of t", "run the statement"]


def test_the_same_id_changes_nothing_again(cli: Cli, instance: Instance) -> None:
    for said in (
        ["sql", "--write", "update t set n = n + 1 where k = 1"],
        ["update", "t", "--where", "k=1", "--set-sql", "n=n + 1", "--yes"],
    ):
        assert cli(*said, "--id", f"once {said[0]}")[0] == 0
        code, out, _ = cli(*said, "--id", f"once {said[0]}")
        assert code == 0 and "was used before" in out
    assert values(instance)[1] == ("a", 3)


def test_a_statement_can_come_from_a_file(cli: Cli, instance: Instance, tmp_path: Path) -> None:
    (tmp_path / "change.sql").write_text("-- a comment\nupdate t set n = 0\nwhere k = 1;\n")
    assert cli("sql", "--write", "--file", "change.sql")[0] == 0
    assert values(instance)[1] == ("a", 0)
