"""The current time in statements, which is one moment from planning to the answer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import duckdb
import pytest

from dormouse.reading.sql import moments, statements
from tests.support.api import Instance
from tests.support.model import LONG, TIMESTAMP, Field, Schema
from tests.wanted_ranges import of

MOMENT = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
DAYS = 30
NOW = [
    ("k > now() - interval 5 day", 6),
    ("k > now() - interval '5 days'", 6),
    ("k > current_timestamp - $1", 6),
    ("k > transaction_timestamp() - interval 5 day", 6),
    ("k > main.now() - interval 5 day", 6),
    ("k > ago(interval 5 day)", 6),
    ("k >= current_date - 5", 6),
    ("k >= today() - interval 5 day", 6),
    ("k > localtimestamp - interval 5 day", 6),
    ("k > (select now() - interval 5 day)", 6),
    ("k > now()", 1),
    ("k between now() - interval 2 day and now() - interval 1 day", 2),
]


def test_the_current_time_restricts_keys_only_at_a_given_moment() -> None:
    statement = "from t where k < epoch_ms(now())"
    assert of(statement) == "t"
    assert of(statement, moment=5_000_000) == "t k(,5000)"
    # a planner is used again
    assert of(statement, moment=7_000_000) == "t k(,7000)"
    assert of(statement) == "t"


@pytest.fixture(scope="module")
def filled(module_instance: Instance) -> Instance:
    """Returns an instance with a file for each of the last days before `MOMENT`. The tests only read it."""
    days = [MOMENT.replace(hour=0, minute=0) - timedelta(days=n) for n in range(DAYS)]
    table = module_instance.create_table(
        "t", Schema([Field("k", TIMESTAMP)], values=[Field("c", LONG)]), split_points=days[-2::-1]
    )
    rows = [{"k": day + timedelta(hours=hours), "c": 1} for day in days for hours in (1, 13)]
    table.ingest(rows)
    return module_instance


@pytest.fixture
def recent(filled: Instance, monkeypatch: pytest.MonkeyPatch) -> Instance:
    """Returns the instance at `MOMENT`, which is the present."""
    monkeypatch.setattr(statements, "microseconds", lambda: int(MOMENT.timestamp() * 1_000_000))
    return filled


@pytest.mark.parametrize(("condition", "files"), NOW)
def test_conditions_on_the_current_time_read_only_files_that_they_need(
    recent: Instance, condition: str, files: int
) -> None:
    values = [timedelta(days=5)] if "$1" in condition else []
    statement = f"select k from t where {condition} order by k"
    assert recent.explain_sql(statement, values)["t"].files == files
    found = recent.sql(statement, values).read_all()
    with duckdb.connect() as plain:
        plain.execute("SET TimeZone = 'UTC'")
        for macro in moments.macros(int(MOMENT.timestamp() * 1_000_000)):
            plain.execute(macro)
        copy = recent.sql("select k from t").read_all()
        plain.register("t", copy)
        assert found == plain.execute(statement, values or None).to_arrow_table().cast(found.schema)


def test_a_statement_has_one_current_time(recent: Instance) -> None:
    found = recent.sql("select now() a, current_timestamp b, current_date c, localtimestamp d from t limit 1")
    [row] = found.read_all().to_pylist()
    assert row == {"a": MOMENT, "b": MOMENT, "c": MOMENT.date(), "d": MOMENT.replace(tzinfo=None)}
