"""The tables `[backup]` and `[audit]` of the settings file: their contradictions and their costs."""

from __future__ import annotations

from typing import Any

import pytest

from dormouse.aws.cost import Assumptions, Line, estimate, key_count
from dormouse.errors import InvalidInput
from tests.support.settings import parse

HOME: dict[str, Any] = {"id": "one", "account": "123456789012", "region": "eu-west-1"}


def lines(stack: str, **given: Any) -> list[Line]:
    found = estimate(parse(HOME | given), "us-east-1", Assumptions(data_gb=1_000, database_gb=10))
    return [line for line in found.lines if line.stack == stack]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"id": "one", "backup": {"copy_region": "eu-west-2"}}, "copy_region needs account and region"),
        (HOME | {"backup": {"copy_region": "eu-west-1"}}, "another region than eu-west-1"),
        (HOME | {"backup": {"copy_region": "il-central-1"}}, "Amazon RDS in il-central-1"),
        (HOME | {"backup": {"copy_region": "mars"}}, "an AWS region, like eu-west-1"),
        (HOME | {"backup": {"retention_days": 36}}, "35"),
        (HOME | {"backup": {"hour_utc": 24}}, "23"),
        (
            HOME | {"backup": {"objects": False}},
            "at most storage.restore_days, which is 3, unless objects = true",
        ),
        (HOME | {"backup": {"retention": 3}}, "did you mean retention_days?"),
        (HOME | {"audit": {"events": "read"}}, '"write"'),
    ],
)
def test_a_contradiction_is_reported_in_one_line(content: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(content)
    [line] = str(caught.value).splitlines()
    assert line.startswith("settings: ")
    assert said in line.replace('copy_region = "eu-west-2": it', "copy_region")


def test_valid_combinations_are_accepted() -> None:
    long = {"database": {"kind": "serverless", "backup_days": 20}, "storage": {"restore_days": 20}}
    assert parse(HOME | long | {"backup": {"objects": False, "retention_days": 20}}).backup
    assert parse({"id": "one", "backup": {}, "audit": {}}).audit


def test_the_costs_of_a_backup_depend_on_its_retention() -> None:
    """Seven days of Aurora's own backups cost nothing extra."""
    week, month_ = (
        lines("backup", backup={"retention_days": 7}),
        lines("backup", backup={"retention_days": 14}),
    )
    assert [line.resource for line in week] == ["AWS Backup, 1,367 GB of objects"]
    assert week[0].running == pytest.approx((1_000 + 1_000 * 11 / 30) * 0.05)
    assert [line.resource for line in month_] == [
        "7 snapshots of the database",
        "AWS Backup, 1,600 GB of objects",
    ]
    assert month_[0].running == month_[0].paused == pytest.approx(7 * 10 * 0.021)


def test_the_costs_of_a_copy_are_storage_key_and_transfer() -> None:
    """The transfer of data has a cost only while the instance runs."""
    given = {"objects": False, "retention_days": 3, "copy_region": "eu-west-2"}
    there, snapshots, way = lines("backup", backup=given)
    assert there.resource == "S3 in eu-west-2, 1,133 GB"
    assert there.paused == there.running == pytest.approx((1_000 + 1_000 * 4 / 30) * 0.023)
    assert snapshots.running == pytest.approx(30 * 0.021)
    assert (way.running, way.paused) == (pytest.approx((1_000 + 300) * 0.02), 0)
    assert key_count(parse(HOME | {"backup": given})) == key_count(parse(HOME)) + 1


def test_data_events_are_priced_per_hundred_thousand() -> None:
    assert lines("audit") == lines("backup") == []
    [write], [every] = (lines("audit", audit={"events": one}) for one in ("write", "all"))
    assert write.running == pytest.approx(20 * 0.10)
    assert (every.running, every.paused) == (pytest.approx(50 * 0.10), 0)
