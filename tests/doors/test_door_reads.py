"""Reads, which give the same answer, or the same error, through every door."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

import dormouse as dm
from tests.every_door import Door, Failed
from tests.tiers import sampled

COUNT = "select count(*) as n from flights"
READS: list[tuple[str, dict[str, Any]]] = [
    ("query", {"table": "flights"}),
    ("query", {"table": "flights", "where": {"carrier": "AA"}, "columns": ["flight", "delay"]}),
    ("query", {"table": "flights", "where": {"carrier": ["AA", "UA"], "flight": dm.Range(2, 20)}}),
    ("query", {"table": "flights", "where": {"carrier": 'Ü"x', "late": False}}),
    ("query", {"table": "flights", "where": {"delay": None}, "columns": ["carrier", "flight"]}),
    ("query", {"table": "flights", "where": {"delay": math.nan}}),
    ("query", {"table": "flights", "where": {"delay": dm.Range(-4.0, 1.5, max_inclusive=True)}}),
    ("query", {"table": "flights", "where": {"delay": dm.Range()}}),
    ("query", {"table": "flights", "where": {"day": dm.Range(date(1000, 1, 1))}}),
    ("query", {"table": "flights", "where": {"at": dm.Range(max=datetime(2026, 1, 9, tzinfo=UTC))}}),
    ("query", {"table": "flights", "where": {"price": dm.Range(Decimal("-1.25"), Decimal("9.5"))}}),
    ("query", {"table": "flights", "where": {"code": bytes([5, 0, 255])}}),
    ("query", {"table": "flights", "limit": 0}),
    ("query", {"table": "flights", "limit": 7, "offset": 3}),
    ("query", {"table": "flights", "limit": 5, "offset": 2, "descending": True}),
    ("query", {"table": "flights", "columns": ["counts", "tags", "flight"], "where": {"flight": 40}}),
    ("query", {"table": "flights", "as_of": "first", "where": {"carrier": "UA"}}),
    ("query", {"table": "prices"}),
    ("query", {"table": "prices", "where": {"price": None}}),
    ("query", {"table": "staff"}),
    ("query", {"table": "staff$versions"}),
    ("count", {"table": "flights"}),
    ("count", {"table": "flights", "where": {"late": True}}),
    ("count", {"table": "flights", "as_of": "first"}),
    ("count", {"table": "prices"}),
    ("count", {"table": "staff"}),
    ("explain", {"table": "flights"}),
    ("explain", {"table": "flights", "where": {"carrier": "AA"}}),
    ("sql", {"statement": "select carrier, sum(flight) as s from flights group by 1 order by 1"}),
    ("sql", {"statement": "select * from flights order by carrier, flight, time"}),
    ("sql", {"statement": "select * from staff order by ROW_ID"}),
    ("sql", {"statement": f"{COUNT} where carrier = $1 and flight < $2", "parameters": ["AA", 30]}),
    ("sql", {"statement": f"{COUNT} where carrier = $which", "parameters": {"which": "AA"}}),
    ("sql", {"statement": COUNT, "as_of": "first"}),
    ("sql", {"statement": "select * from flights limit 0"}),
    ("changes", {"table": "flights", "after": "first", "columns": ["carrier", "flight"]}),
    ("schema", {"table": "flights"}),
    ("tables", {}),
    ("rows_query", {"table": "staff", "sql": "select * from staff order by name"}),
    ("rows_query", {"table": "staff", "sql": "select count(*) as n, avg(age) as a from staff"}),
    ("rows_get", {"table": "staff", "row_id": 2}),
    ("rows_get", {"table": "staff", "row_id": 2, "version": 1}),
    ("rows_history", {"table": "staff"}),
    ("rows_download", {"table": "staff"}),
    ("rows_download", {"table": "staff", "sql": "select name, age from staff order by name"}),
]  # fmt: skip

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("query", {"table": "none"}, "TableNotFound"),
    ("query", {"table": "flights", "where": {"carier": "AA"}}, "InvalidQuery"),
    ("query", {"table": "flights", "columns": ["carier"]}, "InvalidQuery"),
    ("query", {"table": "flights", "columns": ["carrier", "carrier"]}, "InvalidQuery"),
    ("query", {"table": "flights", "where": {"flight": "x"}}, "InvalidQuery"),
    ("query", {"table": "flights", "where": {"carrier": None}}, "InvalidQuery"),
    ("query", {"table": "flights", "as_of": "never"}, "InvalidCut"),
    ("sql", {"statement": "select * from none"}, "InvalidQuery"),
    ("sql", {"statement": "selct 1"}, "InvalidQuery"),
    ("sql", {"statement": "delete from flights"}, "InvalidQuery"),
    ("sql", {"statement": "select $1", "parameters": [1, 2]}, "InvalidQuery"),
    ("sql", {"statement": "select count(*) from flights", "as_of": "never"}, "InvalidCut"),
    ("changes", {"table": "flights", "after": "never"}, "InvalidCut"),
    ("changes", {"table": "flights", "after": "first", "columns": ["x"]}, "InvalidQuery"),
    ("schema", {"table": "none"}, "TableNotFound"),
    ("rows_query", {"table": "staff", "sql": "select nam from staff"}, "InvalidQuery"),
    ("rows_query", {"table": "flights", "sql": "select * from flights"}, "NotARowTable"),
    ("rows_get", {"table": "staff", "row_id": 99}, "RowNotFound"),
    ("rows_history", {"table": "none"}, "TableNotFound"),
]  # fmt: skip


def label(case: Any) -> str:
    """Returns the verb, which is the id of a test case. pytest appends numbers to equal ids."""
    return str(case) if isinstance(case, str) else ""


@pytest.mark.few(2)
@pytest.mark.parametrize(("verb", "how"), READS, ids=label)
def test_every_door_gives_the_same_answer(doors: dict[str, Door], verb: str, how: dict[str, Any]) -> None:
    expected = doors["Python"].ask(verb, **how)
    assert not isinstance(expected, Failed), expected
    for name, door in doors.items():
        if hasattr(door, verb):
            assert door.ask(verb, **how) == expected, name


@pytest.mark.parametrize(("verb", "how", "error"), sampled(REFUSED, 8), ids=label)
def test_every_door_refuses_the_same_request(
    doors: dict[str, Door], verb: str, how: dict[str, Any], error: str
) -> None:
    expected = doors["Python"].ask(verb, **how)
    assert isinstance(expected, Failed) and expected.error == error, expected
    for name, door in doors.items():
        if hasattr(door, verb):
            failed = door.ask(verb, **how)
            assert isinstance(failed, Failed), name
            assert failed.text == expected.text, name
            assert failed.error in (None, error), name
