"""The settings of the commit service, and messages for combinations that make no sense."""

from __future__ import annotations

from typing import Any

import pytest

from dormouse.errors import InvalidInput
from tests.assembly import EXISTING_VPC
from tests.support.settings import parse

AWAKE = {"kind": "serverless", "min_acu": 0.5}
SERVICE = {"service": True}


def problems(**tables: Any) -> list[str]:
    try:
        parse({"id": "dev", "database": AWAKE, **tables})
    except InvalidInput as error:
        return [line.removeprefix("settings: ") for line in str(error).split("\n")]
    return []


def test_a_service_needs_no_other_setting() -> None:
    found = parse({"id": "dev", "database": AWAKE, "commit": SERVICE})
    assert found.commit is not None
    assert (found.commit.service_cpu, found.commit.service_memory_mb) == (1_024, 4_096)
    assert found.has_commit_service and found.has_tasks
    assert not parse({"id": "dev", "commit": {}}).has_tasks


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        (
            {"commit": {"endpoints": "create"}},
            'commit.endpoints = "create": it is for the service: set service = true, or leave it out',
        ),
        (
            {"commit": {"service_cpu": 512}},
            "commit.service_cpu = 512: it is for the service: set service = true, or leave it out",
        ),
        (
            {"commit": {**SERVICE, "service_memory_gb": 1}},
            "commit.service_memory_gb = 1: with service_cpu = 1024 Fargate has 2 to 8 GB of memory",
        ),
        (
            {"commit": SERVICE, "database": {"kind": "serverless"}},
            "commit.service = true: it keeps the database awake: set database.min_acu to 0.5 or more, or "
            "service to false",
        ),
        (
            {"commit": SERVICE, "query": {"endpoints": "existing"}},
            'commit.endpoints: it must be "existing" like query.endpoints: the two services share endpoints',
        ),
        (
            {"commit": {**SERVICE, "endpoints": "existing"}, "query": {}},
            'commit.endpoints = "existing": it must be "create" like query.endpoints: the two services share '
            "endpoints",
        ),
        (
            {"commit": SERVICE, "network": EXISTING_VPC},
            'commit.endpoints: it must be "create" or "existing" in the VPC that network.vpc_id names',
        ),
    ],
)
def test_settings_that_contradict_the_service_are_refused(tables: dict[str, Any], line: str) -> None:
    assert problems(**tables) == [line]


@pytest.mark.parametrize(
    "tables",
    [
        {"commit": {**SERVICE, "endpoints": "existing"}, "query": {"endpoints": "existing"}},
        {"commit": SERVICE, "query": {}},
        {"commit": SERVICE, "database": {"kind": "fixed"}, "network": {"zones": 2}},
        {"commit": {**SERVICE, "endpoints": "create"}, "network": EXISTING_VPC},
    ],
)
def test_settings_that_agree_with_the_service_are_accepted(tables: dict[str, Any]) -> None:
    assert problems(**tables) == []


def test_a_wrong_size_does_not_hide_a_mistake_elsewhere() -> None:
    small = {**SERVICE, "service_cpu": 256, "service_memory_gb": 30}
    size, awake = problems(commit=small, database={"kind": "serverless"})
    assert size.startswith("commit.service_memory_gb = 30: with service_cpu = 256 Fargate has")
    assert awake.startswith("commit.service = true: it keeps the database awake")
