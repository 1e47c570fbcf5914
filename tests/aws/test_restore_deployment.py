"""`dormouse restore --instance ID --to TIME`: a database snapshot of that time, its objects and queues."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from moto import mock_aws

from dormouse.aws import database, restore
from dormouse.aws.restore import restore_deployment
from dormouse.aws.steps import Clock
from dormouse.errors import InstanceError, InvalidInput
from dormouse.settings import resources
from tests.deployed import REGION, Deployed, deploy
from tests.support.aws import DeployedInstance, pause

Cli = Callable[..., tuple[int, str, str]]
SOON = Clock(sleep=lambda seconds: None)


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    """Yields a paused instance with a deleted object and a waiting message."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with mock_aws(config={"lambda": {"use_docker": False}}):
        found = deploy()
        s3 = found.client("s3")
        s3.create_bucket(Bucket="data", CreateBucketConfiguration={"LocationConstraint": REGION})
        s3.put_bucket_versioning(Bucket="data", VersioningConfiguration={"Status": "Enabled"})
        s3.put_object(Bucket="data", Key="data/1/a", Body=b"a")
        s3.delete_object(Bucket="data", Key="data/1/a")
        pause(found.find(), wait=True, clock=SOON)
        found.client("sqs").send_message(QueueUrl=found.queues[0], MessageBody="later")
        monkeypatch.setattr(restore, "usable", backed_up)
        yield found


def backed_up(instance: DeployedInstance) -> Any:
    """Returns moto's description of the database cluster, with times that allow restores of the last day."""
    now = datetime.now(UTC)
    times = {"EarliestRestorableTime": now - timedelta(days=1), "LatestRestorableTime": now}
    return {**database.usable(instance), **times}


@pytest.fixture
def moment() -> datetime:
    """Returns the time one second ago, about when `deployed` deleted its object.

    The restore allows for clocks that differ, so it brings the object back.
    """
    return datetime.now(UTC) - timedelta(seconds=1)


def clusters(deployed: Deployed) -> list[str]:
    found = deployed.client("rds").describe_db_clusters()["DBClusters"]
    return [one["DBClusterIdentifier"] for one in found]


def snapshots(deployed: Deployed) -> list[str]:
    found = deployed.client("rds").describe_db_cluster_snapshots(SnapshotType="manual")["DBClusterSnapshots"]
    return [one["DBClusterSnapshotArn"] for one in found]


def waiting(deployed: Deployed) -> int:
    names = ["ApproximateNumberOfMessages"]
    found = deployed.client("sqs").get_queue_attributes(QueueUrl=deployed.queues[0], AttributeNames=names)
    return int(found["Attributes"][names[0]])


def objects(deployed: Deployed) -> list[str]:
    return [one["Key"] for one in deployed.client("s3").list_objects_v2(Bucket="data").get("Contents", ())]


@pytest.mark.slow
def test_a_restore_makes_a_snapshot_of_the_moment_and_restores_objects(
    deployed: Deployed, moment: datetime
) -> None:
    found = restore_deployment(deployed.find(), moment, clock=SOON)
    assert snapshots(deployed) == [found.snapshot]
    assert found.snapshot.startswith("arn:aws:rds:")
    assert f"at-{moment:%Y%m%d%H%M%S}" in found.snapshot
    tags = deployed.client("rds").list_tags_for_resource(ResourceName=found.snapshot)["TagList"]
    assert tags == [{"Key": resources.INSTANCE_TAG, "Value": "dev"}]
    assert found.engine_version, "AWS restores no snapshot with an earlier version"
    assert clusters(deployed) == [deployed.cluster]
    assert (found.objects.count, objects(deployed)) == (1, ["data/1/a"])
    assert waiting(deployed) == 1
    assert [step.outcome for step in found.steps] == ["done", "done", "done"]
    # a second restore has nothing to do
    again = restore_deployment(deployed.find(), moment, clock=SOON)
    assert (again.snapshot, again.objects.count) == (found.snapshot, 0)
    assert {step.outcome for step in again.steps} == {"already"}


@pytest.mark.slow
@pytest.mark.parametrize("instance_id", ["ab", "prod", "prod-west-eu", "prod-eu-west-1-of-us"])
def test_each_moment_has_a_snapshot_of_its_own(deployed: Deployed, instance_id: str) -> None:
    """Each of three close moments has a snapshot, whose name has at most 63 characters.

    The cluster's own name may already have this length, the longest that RDS allows.
    """
    found = deploy(instance_id)
    pause(found.find(), wait=True, clock=SOON)
    first = datetime.now(UTC) - timedelta(hours=1)
    moments = [first, first + timedelta(minutes=1), first + timedelta(minutes=1, microseconds=1)]
    made = [restore_deployment(found.find(), moment, clock=SOON) for moment in moments]
    assert {step.outcome for one in made for step in one.steps} == {"done"}
    assert sorted(snapshots(found)) == sorted({one.snapshot for one in made})
    assert len(snapshots(found)) == 3
    for moment, one in zip(moments, made, strict=True):
        name = one.snapshot.rpartition(":")[2]
        assert name.startswith(f"dormouse-{instance_id}-at-{moment:%Y%m%d%H%M%S}-")
        assert re.fullmatch(r"[a-z](-?[a-z0-9]){0,62}", name)
        assert len(name) <= 63
    assert set(clusters(found)) == {deployed.cluster, found.cluster}


def test_another_cluster_of_the_instance_has_a_snapshot_of_its_own(
    deployed: Deployed, moment: datetime
) -> None:
    """After a deploy from a restored snapshot, the new cluster has another history at the same time."""
    instance = deployed.find()
    first = restore_deployment(instance, moment, clock=SOON)
    rds, other = deployed.client("rds"), "dormouse-dev-database-clustereb0386a7-another"
    rds.create_db_cluster(
        DBClusterIdentifier=other, Engine="aurora-postgresql", MasterUsername="owner",
        MasterUserPassword="a password",
    )  # fmt: skip
    rds.stop_db_cluster(DBClusterIdentifier=other)
    where, ssm = resources.resources_parameter("dev", "database"), deployed.client("ssm")
    database = json.loads(ssm.get_parameter(Name=where)["Parameter"]["Value"])
    ssm.put_parameter(Name=where, Value=json.dumps({**database, "cluster": other}), Overwrite=True)
    assert restore_deployment(deployed.find(), moment, clock=SOON).snapshot != first.snapshot


@pytest.mark.slow
def test_waiting_messages_are_purged_only_on_request(deployed: Deployed, moment: datetime) -> None:
    restore_deployment(deployed.find(), moment, commits="purge", clock=SOON)
    assert waiting(deployed) == 0


def test_a_dry_run_changes_nothing(deployed: Deployed, moment: datetime) -> None:
    found = restore_deployment(deployed.find(), moment, commits="purge", dry_run=True, clock=SOON)
    assert found.steps[0].outcome == "would"
    assert found.objects.count == 1
    assert (clusters(deployed), snapshots(deployed)) == ([deployed.cluster], [])
    assert (objects(deployed), waiting(deployed)) == ([], 1)


@pytest.mark.parametrize("operation", ["create_db_cluster_snapshot", "delete_db_cluster"])
def test_an_interrupted_restore_is_finished_by_another_run(
    deployed: Deployed, moment: datetime, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    with monkeypatch.context() as patched:
        instance = deployed.find()
        ask = instance.aws.ask

        def interrupted(service: str, called: str, **given: Any) -> bool:
            if called == operation:
                raise KeyboardInterrupt
            return ask(service, called, **given)

        patched.setattr(instance.aws, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            restore_deployment(instance, moment, clock=SOON)
    [aside] = {*clusters(deployed)} - {deployed.cluster}
    described = deployed.client("rds").describe_db_clusters(DBClusterIdentifier=aside)["DBClusters"][0]
    assert {"Key": resources.INSTANCE_TAG, "Value": "dev"} in described["TagList"], "the doctor finds it"
    found = restore_deployment(deployed.find(), moment, clock=SOON)
    assert (clusters(deployed), snapshots(deployed)) == ([deployed.cluster], [found.snapshot])


def test_a_running_instance_is_not_restored(deployed: Deployed, moment: datetime) -> None:
    deployed.client("rds").start_db_cluster(DBClusterIdentifier=deployed.cluster)
    with pytest.raises(InstanceError, match=r"must be paused.*dormouse pause --instance dev --wait"):
        restore_deployment(deployed.find(), moment, clock=SOON)
    assert clusters(deployed) == [deployed.cluster]


def test_a_moment_outside_the_backups_is_refused(deployed: Deployed, moment: datetime) -> None:
    with pytest.raises(InvalidInput, match="is in the future"):
        restore_deployment(deployed.find(), datetime.now(UTC) + timedelta(days=1))
    with pytest.raises(InvalidInput, match="needs a zone"):
        restore_deployment(deployed.find(), datetime(2026, 1, 1))
    with pytest.raises(InvalidInput, match="reach from"):
        restore_deployment(deployed.find(), moment - timedelta(days=8))
    assert clusters(deployed) == [deployed.cluster]


def test_a_moment_whose_objects_no_longer_exist_is_refused(deployed: Deployed, moment: datetime) -> None:
    """The database's backups may reach further back than the earlier versions of objects."""
    where, ssm = resources.resources_parameter("dev", "storage"), deployed.client("ssm")
    storage = json.loads(ssm.get_parameter(Name=where)["Parameter"]["Value"])
    ssm.put_parameter(Name=where, Value=json.dumps({**storage, "restore_days": 3}), Overwrite=True)
    with pytest.raises(InvalidInput, match="deleted more than 3 days ago no longer exist"):
        restore_deployment(deployed.find(), datetime.now(UTC) - timedelta(days=3, hours=1), clock=SOON)
    assert clusters(deployed) == [deployed.cluster]


@pytest.mark.slow
def test_the_command_prints_the_next_steps(deployed: Deployed, moment: datetime, cli: Cli) -> None:
    to = f"{moment:%Y-%m-%d %H:%M:%S}"
    on = ("restore", "--instance", "dev", "--region", REGION)
    code, out, _ = cli(*on, "--to", to, "--dry-run")
    assert code == 0
    assert "nothing was changed" in out
    code, out, _ = cli(*on, "--to", to)
    assert code == 0
    assert 'Now set database.snapshot = "arn:aws:rds:' in " ".join(out.split())
    assert f"{deployed.cluster}, still exists and costs money" in " ".join(out.split())
    plain, (code, out, _) = " ".join(out.split()), cli(*on, "--to", to, "--json")
    report = json.loads(out)
    assert report["snapshot"] in snapshots(deployed)
    assert f'database.engine_version = "{report["engine_version"]}" or later' in plain
    for wrong in (("--to", "yesterday"), (), ("./backups", "--to", to)):
        code, _, errors = cli(*on, *wrong)
        assert code != 0
        assert errors
