"""The output of `dormouse env`, which the settings and the DSN parser understand."""

from __future__ import annotations

from typing import Any

import pytest

from dormouse.aws.instance import environment
from dormouse.errors import InstanceError
from dormouse.postgres.session import parameters
from dormouse.rows.cluster import addresses
from dormouse.settings.resources import CommitResources, DatabaseResources, Resources, StorageResources
from tests.support.aws import DeployedInstance
from tests.support.settings import load_settings

STORAGE = StorageResources(data_bucket="d", payload_bucket="p", objects="s3://d/data")
DATABASE: dict[str, Any] = {
    "cluster": "c", "kind": "serverless", "endpoint": "c.example.com", "port": 5432, "name": "dormouse",
}  # fmt: skip
QUEUES = ("https://sqs/1/a", "https://sqs/1/b")
COMMIT = CommitResources(queues=QUEUES, dead_letters=(), mappings=(), function="f")


def deployed(**resources: Any) -> DeployedInstance:
    return DeployedInstance("dev", "1", "eu-west-1", Resources(**resources), None)  # type: ignore[arg-type]


def test_the_settings_understand_the_printed_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = deployed(storage=STORAGE, database=DatabaseResources(**DATABASE), commit=COMMIT)
    for name, value in environment(instance, "dormouse_run").items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert (settings.objects, settings.commit_queue_urls, settings.queues) == ("s3://d/data", QUEUES, 2)
    assert settings.dsn is not None
    given = parameters(settings.dsn)
    assert (given["host"], given["user"], given["dbname"]) == ("c.example.com", "dormouse_run", "dormouse")


def test_a_proxy_takes_the_place_of_the_database_address() -> None:
    database = DatabaseResources(**DATABASE, proxy="proxy.example.com")
    variables = environment(deployed(storage=STORAGE, database=database))
    assert "@proxy.example.com:5432" in variables["DORMOUSE_DSN"]
    assert variables["DORMOUSE_DSN"].endswith("&proxy=true")
    assert "DORMOUSE_COMMIT_QUEUE" not in variables


def test_a_missing_part_of_an_instance_is_named() -> None:
    with pytest.raises(InstanceError, match="storage"):
        environment(deployed(database=DatabaseResources(**DATABASE)))


def test_row_indexes_use_the_run_role_or_the_read_role() -> None:
    where = (f"{DATABASE['endpoint']}:5433/dormouse_rows_1", "other:5433/dormouse_rows")
    found = deployed(storage=STORAGE, database=DatabaseResources(**DATABASE, row_indexes=where))
    for role, user in (("dormouse_owner", "dormouse_run"), ("dormouse_read", "dormouse_read")):
        indexes = environment(found, role)["DORMOUSE_ROW_INDEXES"]  # type: ignore[arg-type]
        assert indexes.split() == [f"rds-iam://{user}@{place}?region=eu-west-1" for place in where]
        assert tuple(addresses("dbname=x", indexes)) == where
