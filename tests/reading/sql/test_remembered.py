"""The cache of parsed and planned statements."""

from __future__ import annotations

import pytest

from dormouse.reading.sql import engine
from dormouse.reading.sql.engine import CHARACTERS_MAX, Remembered


def test_a_value_is_computed_once_for_each_statement_and_key() -> None:
    made = Remembered[int]()
    assert [made.get("a", 1, lambda: 1), made.get("a", 2, lambda: 2), made.get("b", 1, lambda: 3)] == [
        1,
        2,
        3,
    ]
    assert [made.get("a", 1, lambda: 9), made.get("a", 2, lambda: 9), made.get("b", 1, lambda: 9)] == [
        1,
        2,
        3,
    ]


def test_the_least_recently_used_value_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "STATEMENTS_MAX", 2)
    made = Remembered[int]()
    for number, statement in enumerate("abac"):
        made.get(statement, None, lambda number=number: number)
    assert [made.get(statement, None, lambda: 9) for statement in "acb"] == [0, 3, 9]


def test_long_statements_and_errors_are_not_cached() -> None:
    made = Remembered[int]()
    long = "a" * (CHARACTERS_MAX + 1)
    assert [made.get(long, None, lambda: 1), made.get(long, None, lambda: 2)] == [1, 2]

    def fail() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        made.get("a", None, fail)
    assert made.get("a", None, lambda: 1) == 1
