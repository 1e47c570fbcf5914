"""Pausing a deployed instance, in moto: what is switched off, what is waited for, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moto import mock_aws

from dormouse.system.pause import pause
from tests.deployed import (
    PAUSED,
    RUNNING,
    Deployed,
    FakeClock,
    deploy,
)


@pytest.fixture
def deployed() -> Iterator[Deployed]:
    with mock_aws(config={"lambda": {"use_docker": False}}):
        yield deploy()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_everything_is_switched_off_and_the_rule_that_keeps_it_asleep_is_left(
    deployed: Deployed, clock: FakeClock
) -> None:
    assert deployed.state() == RUNNING
    report = pause(deployed.find(), clock=clock.clock)
    assert deployed.state() == PAUSED
    assert (report.database, report.desired, report.notes) == ("stopped", "paused", ())
    assert [one.step for one in report.steps if one.outcome == "already"] == [
        "let running commits end", "let runs end", "enable the rule that keeps the database asleep",
    ]  # fmt: skip
