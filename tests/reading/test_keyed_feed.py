"""The code of the how-to pages on keyed tables and change feeds: the loader and the commands run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from keyed_tables import data

from tests.keyed_tables import MARKS

PAGES = Path(__file__).parents[2] / "docs/how-to"
TOPIC = "shop.public.accounts"
Cli = Callable[..., tuple[int, str, str]]


def blocks(page: str, kind: str) -> list[str]:
    """Returns the code blocks of a page in a language."""
    return re.findall(rf"^```{kind}\n(.*?)^```", (PAGES / page).read_text("utf-8"), re.S | re.M)


class Feed:
    """The loader of the page on change feeds, and its records."""

    def __init__(self) -> None:
        [text] = blocks("load-a-change-feed.md", "json")
        Path("records.jsonl").write_text(text)
        self.records = [json.loads(line) for line in text.splitlines()]
        self.names: dict[str, Any] = {}
        for code in blocks("load-a-change-feed.md", "python"):
            exec(compile(code, "load-a-change-feed.md", "exec"), self.names)  # noqa: S102 the page's own

    def load(self, partition: int, records: list[dict[str, Any]]) -> bool:
        return bool(self.names["load"](TOPIC, partition, records))

    def accounts(self) -> list[dict[str, Any]]:
        columns = ["id", "owner", "balance"]
        found = self.names["instance"].table("accounts").query(columns=columns).read_all()
        return list(found.to_pylist())


@pytest.fixture
def feed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    feed = Feed()
    yield feed
    feed.names["instance"].close()


EXPECTED = [{"id": 1, "owner": "Ada", "balance": 15}]


@pytest.mark.slow
def test_the_change_feed_of_the_page_builds_the_newest_accounts(
    feed: Feed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert capsys.readouterr().out == f"{EXPECTED}\n"
    # redelivered in another partition, in another order, one at a time
    for number, record in enumerate(reversed(feed.records)):
        assert feed.load(1, [{**record, "offset": number}])
    assert feed.accounts() == EXPECTED


@pytest.mark.slow
def test_a_batch_of_the_feed_is_loaded_once(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    change = {**feed.records[2], "offset": 45}
    change["value"] = {**change["value"], "after": {"id": 1, "owner": "Ada", "balance": 20}}
    change["value"]["source"] = {"lsn": 110}
    # two processes that both go on at offset 45
    next_offset = feed.names["next_offset"]
    monkeypatch.setitem(feed.names, "next_offset", lambda *_: 45)
    assert feed.load(0, [change])
    other = {**change, "value": {**change["value"], "source": {"lsn": 120}, "after": {"id": 9, "owner": "Di"}}}
    assert not feed.load(0, [change, {**other, "offset": 46}])
    monkeypatch.setitem(feed.names, "next_offset", next_offset)
    assert next_offset(TOPIC, 0) == 46
    assert feed.accounts() == [{"id": 1, "owner": "Ada", "balance": 20}]


@pytest.mark.slow
def test_a_batch_that_fails_leaves_rows_and_offset(feed: Feed) -> None:
    value = {**feed.records[1]["value"], "after": {"id": None, "owner": "No key", "balance": 0}}
    with pytest.raises(Exception, match="id"):
        feed.load(0, [{"offset": 45, "value": value}])
    assert feed.names["next_offset"](TOPIC, 0) == 45
    assert feed.accounts() == EXPECTED


@pytest.mark.slow
def test_the_commands_of_the_page_create_a_table_and_return_changes(cli: Cli) -> None:
    [block] = [one for one in blocks("keep-one-row-a-key.md", "sh") if "dormouse upsert" in one]
    create = next(line for line in block.splitlines() if " create " in line)
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
