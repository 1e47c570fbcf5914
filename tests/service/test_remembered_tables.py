"""Answers of the service come from the current table of a name, although it remembers tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from tests.serving import http_get, http_post, serving
from tests.support.api import Instance

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], [], [dm.Field("v", dm.STRING)])


@pytest.fixture
def url(instance: Instance) -> Iterator[str]:
    add(instance, "words", "one")
    with serving(instance) as url:
        assert rows(url) == [{"k": 1, "v": "one"}]
        assert rows(url) == [{"k": 1, "v": "one"}]  # by the remembered table
        yield url


def add(instance: Instance, name: str, word: str) -> Any:
    table = instance.create_table(name, SCHEMA)
    table.ingest(pa.table({"k": [1], "v": [word]}))
    return table


def answer_of(url: str, **body: Any) -> Any:
    return http_post(f"{url}/v1/tables/words/query", json={"where": {"k": 1}, **body})


def rows(url: str, **body: Any) -> Any:
    answer = http_post(
        f"{url}/v1/tables/words/query",
        json={"where": {"k": 1}, **body},
        headers={"accept": "application/json"},
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_another_table_that_took_the_name_is_read(instance: Instance, url: str) -> None:
    instance.rename_table("words", "old_words")
    assert answer_of(url).status_code == 404
    add(instance, "words", "two")
    assert rows(url) == [{"k": 1, "v": "two"}]
    instance.rename_table("words", "newer")
    instance.rename_table("old_words", "words")
    assert rows(url) == [{"k": 1, "v": "one"}]


def test_a_dropped_table_is_not_found_and_its_successor_is_read(instance: Instance, url: str) -> None:
    instance.drop_table("words")
    assert answer_of(url).status_code == 404
    add(instance, "words", "two")
    assert rows(url) == [{"k": 1, "v": "two"}]


def test_columns_of_another_process_are_seen_at_once(instance: Instance, url: str) -> None:
    old = http_get(f"{url}/v1/tables/words").json()["schema_id"]
    instance.table("words").add_column(dm.Field("at", dm.TIMESTAMP, nullable=True))
    assert rows(url) == [{"k": 1, "v": "one", "at": None}]
    instance.table("words").rename_column("v", "word")
    # the value of a new column's condition is parsed by its type
    assert rows(url, where={"k": 1, "at": "2026-11-30T00:00:00Z"}) == []
    assert rows(url, columns=["word"]) == [{"word": "one"}]
    assert answer_of(url, columns=["v"]).status_code == 400
    assert answer_of(url, schema_id=old).status_code == 400
    new = http_get(f"{url}/v1/tables/words").json()["schema_id"]
    assert rows(url, schema_id=new, columns=["k"]) == [{"k": 1}]


def test_a_commit_is_seen_by_the_next_request(instance: Instance, url: str) -> None:
    table = instance.table("words")
    for number in range(2, 6):
        table.ingest(pa.table({"k": [1], "v": [f"word {number}"]}))
        assert len(rows(url)) == number
    table.delete({"k": 1})
    assert rows(url) == []
    table.compact()
    assert rows(url) == []
