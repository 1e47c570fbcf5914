"""Checks by shares, where each day checks some tables: a problem is reported every day until it is fixed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.durability import checking
from dormouse.errors import DormouseError
from tests.cooling import Model, key
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.api import Instance

SCHEMA = OF_KEYS
MONDAY = datetime(2026, 1, 5, 12, tzinfo=UTC)
"""A Monday, the day on which share 1 of the tables is checked. Share 0 is checked on Sundays."""


@pytest.fixture
def instance(dsn: str, tmp_path: Path) -> Iterator[Instance]:
    """Yields an instance with eight tables of one file each."""
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        for number in range(8):
            instance.create_table(f"t{number}", SCHEMA).ingest(pa.table({"key": [number]}))
        yield instance


class Days:
    """A helper that maintains the instance on given days."""

    def __init__(self, instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
        self._instance = instance
        self._monkeypatch = monkeypatch

    def on(self, now: datetime) -> dict[str, str]:
        """Runs a maintenance cycle at `now`; returns the errors of the check rounds, by their kind."""
        self.is_on(now)
        text = "update instance_round set ended_at = ended_at - interval '25 hours' returning 1"
        query(self._instance._supplier, text)
        self._instance.maintain(once=True, tell=lambda line: None)
        rounds = [one for one in self._instance.rounds() if one.kind.startswith("check")]
        return {one.kind: one.error for one in rounds if one.error is not None}

    def is_on(self, now: datetime) -> None:
        class Clock:
            @staticmethod
            def now(zone: object) -> datetime:
                return now

        self._monkeypatch.setattr(checking, "datetime", Clock)


@pytest.fixture
def days(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> Days:
    return Days(instance, monkeypatch)


def lose_a_file(instance: Instance, table: str) -> tuple[str, bytes]:
    [reference] = instance.table(table).files.file_references()
    data = instance.objects.get(reference.filename)
    instance.objects.delete([reference.filename])
    return reference.filename, data


def day_of(instance: Instance, table: str) -> datetime:
    """Returns the first day, counted from Monday, on which the table is checked."""
    share = int(instance.table(table).files.table.uuid, 16) % 7
    return next(day for day in map(_after, range(7)) if day.toordinal() % 7 == share)


def _after(days: int) -> datetime:
    return MONDAY + timedelta(days)


@pytest.mark.objects
@pytest.mark.slow
def test_a_lost_object_is_reported_until_it_is_back(instance: Instance, days: Days) -> None:
    lost, data = lose_a_file(instance, "t3")
    day = day_of(instance, "t3")
    for later in range(3):
        [error] = days.on(day + timedelta(later)).values()
        assert lost in error
    instance.objects.put(lost, data)
    assert days.on(day + timedelta(3)) == {}


@pytest.mark.slow
def test_a_lost_object_of_payloads_is_reported_until_it_is_back(instance: Instance, days: Days) -> None:
    day = _after(6)
    Model(instance.payloads).put(key("a"))
    instance.payloads.maintain()
    [lost] = [name for name, _ in instance.objects.list("payloads")]
    data = instance.objects.get(lost)
    instance.objects.delete([lost])
    for later in range(2):
        [error] = days.on(day + timedelta(later)).values()
        assert lost in error
    instance.objects.put(lost, data)
    assert days.on(day + timedelta(2)) == {}


@pytest.mark.slow
def test_a_round_that_runs_out_of_time_fails(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "SHARES", 1)
    lost, _ = lose_a_file(instance, "t3")
    ledgers = instance._durability.ledgers
    none = checking.checks(ledgers, seconds_left=lambda: 0.0)
    with pytest.raises(DormouseError, match="time limit reached: 0 of 8 tables checked"):
        none["check 0"]()
    with pytest.raises(DormouseError, match="the objects of no table were not checked"):
        none["check rest"]()
    with pytest.raises(DormouseError, match=lost):
        checking.checks(ledgers)["check 0"]()


@pytest.mark.slow
def test_a_share_that_takes_all_the_time_is_not_always_the_first(instance: Instance, days: Days) -> None:
    text = "insert into instance_round values ('check 3', now(), now(), 'lost', null) returning 1"
    query(instance._supplier, text)
    ledgers = instance._durability.ledgers
    days.is_on(_after(6))
    assert len({next(iter(checking.checks(ledgers))) for _ in range(40)}) > 1


@pytest.mark.slow
def test_the_single_round_of_older_versions_is_divided_into_shares(instance: Instance, days: Days) -> None:
    """Each share counts as failed until it is checked, if the old single round had failed."""
    text = "insert into instance_round values ('check', now(), now(), %s, null) returning 1"
    query(instance._supplier, text, "it was so")
    lost, _ = lose_a_file(instance, "t3")
    [error] = days.on(day_of(instance, "t3") + timedelta(1)).values()
    assert lost in error
    assert len(instance.rounds()) == len({one.kind for one in instance.rounds()} - {"check"})
    query(instance._supplier, text, None)
    assert len(days.on(MONDAY)) == 1
    assert "check" not in {one.kind for one in instance.rounds()}
