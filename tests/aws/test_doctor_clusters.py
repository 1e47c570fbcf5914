"""Checks of the doctor for leftovers of a restore, and for losses in the next deploy."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from moto import mock_aws

from dormouse.settings.resources import CommitResources, DatabaseResources, resources_parameter
from tests.aws.test_doctor import REGION, account, results, stubbed

SNAPSHOT = "arn:aws:rds:eu-west-1:123456789012:cluster-snapshot:newer"


@mock_aws
def test_clusters_replaced_by_a_restore_are_named() -> None:
    session = boto3.session.Session(region_name=REGION)
    ssm, rds = session.client("ssm"), session.client("rds")

    def made(name: str, instance: str) -> str:
        given = {"MasterUsername": "a", "MasterUserPassword": "secret-secret"}
        tags = [{"Key": "dormouse:instance", "Value": instance}]
        cluster = rds.create_db_cluster(
            DBClusterIdentifier=name, Engine="aurora-postgresql", Tags=tags, **given
        )
        return str(cluster["DBCluster"]["Endpoint"])

    subject = account(session)
    assert results(subject._other_clusters()) == []
    rows = made("rows-of-it", "dev")
    made("the-database", "dev")
    made("of-another", "prod")
    current = DatabaseResources(
        cluster="the-database",
        kind="serverless",
        endpoint="db",
        port=5433,
        name="dormouse",
        row_indexes=(f"{rows}:5433/rows",),
    )
    where = resources_parameter("dev", "database")
    ssm.put_parameter(Name=where, Value=current.model_dump_json(), Type="String")
    assert results(subject._other_clusters()) == [("other clusters", "ok")]
    made("the-former", "dev")
    (check,) = dict(subject._looks())["other clusters"]()
    assert check.result == "warning" and check.found.startswith("the-former is no longer used")


@mock_aws
@pytest.mark.parametrize(
    ("settings", "made_of", "result"),
    [(None, "arn:old", "wrong"), (None, None, None), (SNAPSHOT, SNAPSHOT, None)],
)
def test_a_deploy_without_the_snapshot_of_its_database_is_wrong(
    settings: str | None, made_of: str | None, result: str | None
) -> None:
    database = {"kind": "serverless"} | ({"snapshot": settings} if settings else {})
    subject = account(boto3.session.Session(region_name=REGION), database=database)
    properties: dict[str, Any] = {"SnapshotIdentifier": made_of} if made_of else {}
    template = {"Resources": {"Cluster": {"Properties": properties}, "Other": {}}}
    now = datetime.now(UTC)
    described = {"Stacks": [{"StackName": "n", "CreationTime": now, "StackStatus": "CREATE_COMPLETE"}]}
    stubber = stubbed(subject, "cloudformation", "describe_stacks", described)
    stubber.add_response("get_template", {"TemplateBody": json.dumps(template)})
    found = list(dict(subject._looks())["snapshot"]())
    assert [one.result for one in found] == ([result] if result else [])
    assert all(one.mend == 'keep database.snapshot = "arn:old", or name a newer one' for one in found)


@mock_aws
@pytest.mark.parametrize(
    ("wanted", "version", "remedy"),
    [
        ("17.7", "17.9", 'set database.engine_version = "17.9"'),
        ("17.9", "17.10", 'set database.engine_version = "17.10"'),
        ("17.10", "17.9", ""),
        ("17.9", "17.9", ""),
        ("17.9", None, "correct database.snapshot"),
    ],
)
def test_a_snapshot_that_aws_cannot_restore_is_wrong(wanted: str, version: str | None, remedy: str) -> None:
    """AWS cannot restore a snapshot with an earlier version of PostgreSQL than the snapshot's own.

    The version of a snapshot can be later than that of the settings, as AWS upgrades clusters by itself.
    """
    database = {"kind": "serverless", "snapshot": SNAPSHOT, "engine_version": wanted}
    subject = account(boto3.session.Session(region_name=REGION), database=database)
    stubber = stubbed(subject, "rds", "describe_db_cluster_snapshots")
    request = {"DBClusterSnapshotIdentifier": "newer"}
    if version is None:
        stubber.add_client_error("describe_db_cluster_snapshots", "DBClusterSnapshotNotFoundFault")
    else:
        answer = {"DBClusterSnapshots": [{"EngineVersion": version}]}
        stubber.add_response("describe_db_cluster_snapshots", answer, request)
    (check,) = dict(subject._looks())["snapshot"]()
    assert (check.mend, check.result) == (remedy, "wrong" if remedy else "ok")
    assert version is None or version in check.found


@mock_aws
def test_snapshots_of_aws_backup_are_checked_and_those_of_other_accounts_are_a_warning() -> None:
    database = {"kind": "serverless", "snapshot": f"{SNAPSHOT.rpartition(':')[0]}:awsbackup:job-1"}
    subject = account(boto3.session.Session(region_name=REGION), database=database)
    request = {"DBClusterSnapshotIdentifier": "awsbackup:job-1", "SnapshotType": "awsbackup"}
    stubber = stubbed(subject, "rds", "describe_db_cluster_snapshots")
    answer = {"DBClusterSnapshots": [{"EngineVersion": "17.7"}]}
    stubber.add_response("describe_db_cluster_snapshots", answer, request)
    assert results(subject._snapshot()) == [("snapshot", "ok")]
    database["snapshot"] = SNAPSHOT.replace("123456789012", "999999999999")
    subject = account(boto3.session.Session(region_name=REGION), database=database)
    assert results(subject._snapshot()) == [("snapshot", "warning")]


@mock_aws
def test_snapshots_of_restores_are_named_except_that_of_the_settings() -> None:
    session = boto3.session.Session(region_name=REGION)
    rds = session.client("rds")
    given = {"MasterUsername": "a", "MasterUserPassword": "secret-secret"}
    rds.create_db_cluster(DBClusterIdentifier="it", Engine="aurora-postgresql", **given)
    first, second = (f"dormouse-dev-at-2026112014000{n}-0123abcd" for n in (0, 1))
    for name in (first, second, "dormouse-dev-at-20261120140000-mine", f"x-{first}", "of-people"):
        rds.create_db_cluster_snapshot(DBClusterIdentifier="it", DBClusterSnapshotIdentifier=name)
    [check] = dict(account(session)._looks())["other snapshots"]()
    assert check.result == "warning" and check.found.startswith(f"{first}, {second}, taken by a restore")
    database = {"kind": "serverless", "snapshot": SNAPSHOT.replace("newer", second)}
    [check] = dict(account(session, database=database)._looks())["other snapshots"]()
    assert check.result == "warning" and check.found.startswith(f"{first}, taken by a restore")
    rds.delete_db_cluster_snapshot(DBClusterSnapshotIdentifier=first)
    assert results(dict(account(session, database=database)._looks())["other snapshots"]()) == [
        ("other snapshots", "ok")
    ]


@mock_aws
def test_a_deploy_that_removes_queues_with_messages_is_wrong() -> None:
    session = boto3.session.Session(region_name=REGION)
    sqs, subject = session.client("sqs"), account(session, commit={"queues": 1})
    assert results(subject._queues()) == []
    urls = [sqs.create_queue(QueueName=name)["QueueUrl"] for name in ("q1", "q2", "d1", "d2")]
    commit = CommitResources(queues=tuple(urls[:2]), dead_letters=tuple(urls[2:]), mappings=(), function="f")
    name = resources_parameter("dev", "commit")
    session.client("ssm").put_parameter(Name=name, Value=commit.model_dump_json(), Type="String")
    sqs.send_message(QueueUrl=urls[0], MessageBody="stays")
    assert results(dict(subject._looks())["queues"]()) == [("queues", "ok")]
    sqs.send_message(QueueUrl=urls[3], MessageBody="lost")
    (check,) = subject._queues()
    assert check.result == "wrong" and check.found.endswith("about 1 in d2")
