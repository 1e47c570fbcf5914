"""The code of the how-to page on keyed tables: its change feed and its commands run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from keyed_tables import data

from tests.keyed_tables import MARKS

PAGE = Path(__file__).parents[2] / "docs/how-to/keep-one-row-a-key.md"
Cli = Callable[..., tuple[int, str, str]]


def block(kind: str, holds: str) -> str:
    """Returns the only code block of the page that has the language `kind` and contains the text `holds`."""
    [found] = [
        one
        for one in re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M)
        if holds in one
    ]
    return found


def run(code: str) -> None:
    exec(compile(code, str(PAGE), "exec"), {})  # noqa: S102 the page's own


@pytest.mark.slow
def test_the_change_feed_of_the_page_builds_the_newest_accounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    feed = block("json", '"op"')
    Path("changes.jsonl").write_text(feed)
    code = block("python", "changes.jsonl")
    run(code)
    expected = "[{'id': 1, 'owner': 'Ada', 'balance': 15}, {'id': 3, 'owner': 'Cy', 'balance': 5}]\n"
    assert capsys.readouterr().out == expected
    # once more, and in another order
    Path("changes.jsonl").write_text("\n".join(reversed(feed.splitlines())))
    run(code.replace('"./lake"', '"./again"'))
    assert capsys.readouterr().out == expected


@pytest.mark.slow
def test_the_commands_of_the_page_create_a_table_and_return_changes(cli: Cli) -> None:
    create = next(line for line in block("sh", "dormouse upsert").splitlines() if " create " in line)
    assert cli(*create.split()[1:])[0] == 0
    for name, rows, marks in (
        ("a", [(1, 1), (2, 2)], [False, False]),
        ("b", [(1, None), (3, 3)], [True, False]),
    ):
        table = data(rows, marks).rename_columns(["id", "balance", "owner", MARKS])
        table = table.set_column(2, "owner", [["x", "y"]])
        pq.write_table(table, f"{name}.parquet")
        code, out, err = cli("upsert", "accounts", f"{name}.parquet", "--deletes", MARKS)
        assert (code, out[:18]) == (0, "added 2 rows in 1 "), err
    code, out, _ = cli("query", "accounts", "--format", "json", "--columns", "id,balance")
    assert json.loads(out) == [{"id": 2, "balance": 2}, {"id": 3, "balance": 3}]
    assert cli("delete", "accounts", "--where", "balance=2", "--yes")[1].endswith("(1 row)\n")
    code, _, err = cli("upsert", "accounts", "b.parquet", "--deletes", "gone")
    assert (code, err.count("\n")) == (1, 1)
    assert "column 'gone' (boolean) is missing from the data" in err
