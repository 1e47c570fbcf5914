"""The code of the how-to pages on keyed tables and change feeds: the loader and the commands run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from keyed_tables import data

import dormouse as dm
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
        self.partitions = count(1)
        for code in blocks("load-a-change-feed.md", "python"):
            exec(compile(code, "load-a-change-feed.md", "exec"), self.names)  # noqa: S102 the page's own

    def load(self, partition: int, records: list[dict[str, Any]]) -> bool:
        return bool(self.names["load"](TOPIC, partition, records))

    def accounts(self) -> list[dict[str, Any]]:
        columns = ["id", "owner", "balance"]
        found = self.names["instance"].table("accounts").query(columns=columns).read_all()
        return list(found.to_pylist())


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Feed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("feed"))
        feed = Feed()
        yield feed
        feed.names["instance"].close()


EXPECTED = [{"id": 1, "owner": "Ada", "balance": 15}]


@pytest.mark.slow
def test_the_change_feed_of_the_page_builds_the_newest_accounts(feed: Feed) -> None:
    # redelivered in another partition, in another order, one at a time
    partition = next(feed.partitions)
    for number, record in enumerate(reversed(feed.records)):
        assert feed.load(partition, [{**record, "offset": number}])
    assert [row for row in feed.accounts() if row["id"] < 100] == EXPECTED


@pytest.mark.slow
def test_of_two_processes_at_one_offset_one_loads_its_records(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def created(offset: int) -> dict[str, Any]:
        after = {"id": offset, "owner": "Di", "balance": 0}
        return {"offset": offset, "value": {"op": "c", "after": after, "source": {"lsn": offset}}}

    partition = next(feed.partitions)
    with monkeypatch.context() as patch:
        patch.setitem(feed.names, "next_offset", lambda *_: 200)
        assert feed.load(partition, [created(200)])
        assert not feed.load(partition, [created(200), created(201)])
    assert feed.names["next_offset"](TOPIC, partition) == 201
    assert 201 not in [row["id"] for row in feed.accounts()]


@pytest.mark.slow
def test_a_batch_that_fails_leaves_rows_and_offset(feed: Feed) -> None:
    before, partition = feed.accounts(), next(feed.partitions)
    value = {"op": "c", "after": {"id": None, "owner": "No key", "balance": 0}, "source": {"lsn": 300}}
    with pytest.raises(dm.errors.InvalidData, match="'id'"):
        feed.load(partition, [{"offset": 300, "value": value}])
    assert feed.names["next_offset"](TOPIC, partition) == 0
    assert feed.accounts() == before


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
