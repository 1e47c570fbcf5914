"""The steps of `dormouse destroy` before it deletes stacks, in moto: they end what would block deletion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto import mock_aws
from moto.emr.models import emr_backends
from moto.rds.models import rds_backends

from dormouse.aws import destroy as destruction
from dormouse.aws.destroy import Listed, destroy, doomed, wind_down
from dormouse.errors import InstanceError, InvalidInput
from dormouse.settings import resources
from tests.deployed import REGION, Deployed, Engine, deploy, job_run_state, start_emr_cluster, start_job_run
from tests.fake_clock import FakeClock
from tests.support.aws import Aws, pause
from tests.support.settings import parse

ACCOUNT = "123456789012"
NAME = "dormouse-dev"


@pytest.fixture(autouse=True)
def moto() -> Iterator[None]:
    with mock_aws(config={"lambda": {"use_docker": False}}):
        yield


def listed(deployed: Deployed) -> dict[str, list[dict[str, str]]]:
    """Returns the resources of each stack by its name, as CloudFormation would list them."""

    def resource(kind: str, name: str, logical: str = "It") -> dict[str, str]:
        of = {"ResourceType": kind, "PhysicalResourceId": name, "LogicalResourceId": logical}
        return {**of, "ResourceStatus": "CREATE_COMPLETE"}

    rules = zip(
        ("Garbage", "Compaction", "Maintenance", "Pause"), (*deployed.rules, deployed.keeper), strict=True
    )
    mappings = [
        resource("AWS::Lambda::EventSourceMapping", uuid, "CommitFunctionSqs1A2B")
        for uuid in deployed.mappings
    ]
    engine = "AWS::EMRServerless::Application"
    return {
        "storage": [resource("AWS::S3::Bucket", "data")],
        "database": [
            resource("AWS::RDS::DBCluster", "of-rows", "RowsCluster1A2B3C4D"),
            resource("AWS::RDS::DBCluster", deployed.cluster, "ClusterEB0386A7"),
        ],
        "application": [
            *(resource("AWS::Events::Rule", rule, f"{part}Rule1A2B") for part, rule in rules),
            *mappings,
            resource("AWS::StepFunctions::StateMachine", deployed.machine, "CompactionMachine1A2B"),
            *(
                [resource(engine, deployed.application, "CompactionSpark1A2B")]
                if deployed.application
                else []
            ),
            {
                "ResourceType": "AWS::Events::Rule",
                "LogicalResourceId": "CompactionOther1A2B",
                "ResourceStatus": "CREATE_FAILED",
            },
        ],
    }


def ended(deployed: Deployed, clock: FakeClock, given: Listed | None = None) -> dict[str, str]:
    """Winds down the instance, and returns the outcome of each step."""
    found = listed(deployed) if given is None else given
    reports = wind_down(deployed.id, found, Aws(deployed.session), clock=clock.clock)
    return {one.step: one.outcome for one in reports}


def database(deployed: Deployed) -> Any:
    return rds_backends[ACCOUNT][REGION].clusters[deployed.cluster]


def test_running_parts_are_ended_and_the_database_stays_available() -> None:
    deployed, clock = deploy(), FakeClock()
    run = start_job_run(deployed)
    outcomes = ended(deployed, clock)
    assert deployed.state() == {
        "desired": "running", "database": "available", "rules": {"DISABLED"}, "keeper": "DISABLED",
        "mappings": {"Disabled"}, "spark": "STOPPED",
    }  # fmt: skip
    assert job_run_state(deployed, run) == "CANCELLED"
    assert {step for step, outcome in outcomes.items() if outcome == "already"} == {
        "write the desired state: running", "wake the database", "delete the snapshots of restores",
        "delete the database clusters that a restore has replaced",
    }  # fmt: skip
    assert set(ended(deployed, clock).values()) == {"already"}


@pytest.mark.slow
def test_an_execution_that_does_not_end_is_stopped() -> None:
    deployed, clock = deploy(), FakeClock()
    states = deployed.client("stepfunctions")
    execution = states.start_execution(stateMachineArn=deployed.machine)["executionArn"]
    assert ended(deployed, clock)["let runs end"] == "done"
    assert states.describe_execution(executionArn=execution)["status"] == "ABORTED"


@pytest.mark.parametrize("engine", ["emr-ec2-steps", "emr-ec2-transient"])
def test_emr_clusters_are_ended_and_awaited(engine: Engine) -> None:
    """Security groups of a cluster cannot be deleted before it has ended."""
    deployed, clock = deploy(engine=engine), FakeClock()
    mine = start_emr_cluster(deployed, NAME)
    of_a_run = start_emr_cluster(deployed, f"{NAME}-2cb1b1d5-6a5f-4ecb-8b35-5f4b3e0f9a11")
    ending = start_emr_cluster(deployed, NAME)
    other = start_emr_cluster(deployed, f"{NAME}2")
    backend = emr_backends[ACCOUNT][REGION].clusters
    backend[ending].state = "TERMINATING"  # a cluster of AWS has this state for some minutes
    clock.at.append((240.0, lambda: setattr(backend[ending], "state", "TERMINATED")))
    assert ended(deployed, clock)["stop EMR"] == "done"
    assert clock.seconds >= 240
    assert {backend[one].state for one in (mine, of_a_run, ending)} == {"TERMINATED"}
    assert backend[other].state == "WAITING"


def test_a_cluster_that_outlived_the_part_is_ended() -> None:
    """A deploy that takes compaction out, or fails half-way, ends no cluster, which keeps the network."""
    deployed = deploy(engine="emr-ec2-steps")
    mine = start_emr_cluster(deployed, NAME)
    stacks = listed(deployed)
    rest = [one for one in stacks["application"] if not one["LogicalResourceId"].startswith("Compaction")]
    assert ended(deployed, FakeClock(), {**stacks, "application": rest})["stop EMR"] == "done"
    assert emr_backends[ACCOUNT][REGION].clusters[mine].state == "TERMINATED"


@pytest.mark.slow
def test_a_cluster_that_does_not_end_is_an_error_that_names_it() -> None:
    deployed, clock = deploy(engine="emr-ec2-steps"), FakeClock()
    mine = start_emr_cluster(deployed, NAME)
    emr_backends[ACCOUNT][REGION].clusters[mine].state = "TERMINATING"
    with pytest.raises(InstanceError, match=f"could not stop EMR within 15 minutes: cluster {mine} is term"):
        ended(deployed, clock)


@pytest.mark.few(1)
@pytest.mark.parametrize("state", ["stopped", "stopping"])
def test_a_stopped_database_is_started_and_stays_running(state: str) -> None:
    deployed, clock = deploy(), FakeClock()
    pause(deployed.find(), clock=clock.clock)
    if state == "stopping":
        database(deployed).status = "stopping"
        until = clock.seconds + 300
        clock.at.append((until, lambda: setattr(database(deployed), "status", "stopped")))
    assert ended(deployed, clock)["wake the database"] == "done"
    found = deployed.state()
    assert (found["database"], found["desired"], found["keeper"]) == ("available", "running", "DISABLED")
    assert found["rules"] == {"DISABLED"}


@pytest.mark.parametrize("status", ["deleting", "inaccessible-encryption-credentials", "modifying"])
def test_a_database_in_another_state_is_not_awaited(status: str) -> None:
    deployed, clock = deploy(), FakeClock()
    database(deployed).status = status
    assert ended(deployed, clock)["wake the database"] == "already"


def replaced(deployed: Deployed, *, protected: bool = False) -> None:
    """Creates a stopped cluster with a writer, as a restore leaves it."""
    rds = deployed.client("rds")
    rds.create_db_cluster(
        DBClusterIdentifier="the-former", Engine="aurora-postgresql", MasterUsername="owner",
        MasterUserPassword="a password", DeletionProtection=protected,
        Tags=[{"Key": resources.INSTANCE_TAG, "Value": deployed.id}],
    )  # fmt: skip
    rds.create_db_instance(
        DBInstanceIdentifier="its-writer", DBClusterIdentifier="the-former", Engine="aurora-postgresql",
        DBInstanceClass="db.serverless",
    )  # fmt: skip
    rds.stop_db_cluster(DBClusterIdentifier="the-former")


def test_clusters_replaced_by_a_restore_are_started_and_deleted() -> None:
    """The former clusters belong to no stack, but use security groups that stacks delete."""
    deployed, clock = deploy(), FakeClock()
    replaced(deployed)
    assert ended(deployed, clock)["delete the database clusters that a restore has replaced"] == "done"
    rds = deployed.client("rds")
    assert [one["DBClusterIdentifier"] for one in rds.describe_db_clusters()["DBClusters"]] == [
        deployed.cluster
    ]
    writers = [one["DBInstanceIdentifier"] for one in rds.describe_db_instances()["DBInstances"]]
    assert writers == [f"dormouse-{deployed.id}-writer"]


@pytest.mark.few(1)
@pytest.mark.parametrize("protected", [False, True])
def test_the_plan_lists_clusters_replaced_by_a_restore(deployed_stacks: Deployed, protected: bool) -> None:
    replaced(deployed_stacks, protected=protected)
    if protected:
        with pytest.raises(InvalidInput, match=r"dev was not destroyed: .*the-former.* is protected"):
            doomed(parse({"id": "dev"}), deployed_stacks.session)
        return
    found = doomed(parse({"id": "dev"}), deployed_stacks.session)
    assert found is not None and "the-former" in found.clusters
    assert found.steps[-1].what == ("cluster the-former is stopped",)


def test_only_snapshots_of_restores_are_listed_and_deleted(deployed_stacks: Deployed) -> None:
    """Snapshots that restores made are useless without the instance's key and objects. Others stay."""
    rds, ours = deployed_stacks.client("rds"), "dormouse-dev-at-20261120140000-0123abcd"
    for name in (ours, "of-people"):
        rds.create_db_cluster_snapshot(
            DBClusterIdentifier=deployed_stacks.cluster, DBClusterSnapshotIdentifier=name
        )
    found = doomed(parse({"id": "dev"}), deployed_stacks.session)
    assert found is not None
    planned = {step.step: step.what for step in found.steps}
    assert planned["delete the snapshots of restores"] == (f"snapshot {ours} is available",)
    assert ended(deployed_stacks, FakeClock())["delete the snapshots of restores"] == "done"
    left = rds.describe_db_cluster_snapshots(SnapshotType="manual")["DBClusterSnapshots"]
    assert [one["DBClusterSnapshotIdentifier"] for one in left] == ["of-people"]


def test_the_plan_lists_what_is_kept_for_backups(
    deployed_stacks: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"storage": ("AWS::KMS::Key", "k-1"), "application": ("AWS::Backup::BackupVault", "v-1")}
    found = {
        name: [{"ResourceType": kind, "PhysicalResourceId": one, "LogicalResourceId": "It"}]
        for name, (kind, one) in given.items()
    }
    monkeypatch.setattr(destruction, "_listed", lambda aws, instance_id, stacks: found)
    doom = doomed(parse({"id": "dev"}), deployed_stacks.session)
    assert doom is not None and doom.kept == ("vault v-1", "key k-1")
    del found["application"]
    doom = doomed(parse({"id": "dev"}), deployed_stacks.session)
    assert doom is not None and doom.kept == ()


@pytest.mark.parametrize(
    ("name", "count", "is_refused"),
    [
        ("dormouse-dev-AROAEXAMPLE", 2, True),
        ("dormouse-dev-AROAEXAMPLE", 0, False),
        ("dormouse-dev-2-AROAEXAMPLE", 2, False),
    ],
)
def test_backups_that_an_earlier_part_left_keep_their_keys(
    name: str, count: int, is_refused: bool, deployed_stacks: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A destroy would delete keys that the backups need to be restored."""
    every = Aws.all

    def listed(aws: Aws, service: str, operation: str, key: str, **given: Any) -> Any:
        if operation == "list_backup_vaults":
            return [{"BackupVaultName": name, "NumberOfRecoveryPoints": count}]
        return every(aws, service, operation, key, **given)

    monkeypatch.setattr(Aws, "all", listed)
    if is_refused:
        with pytest.raises(InvalidInput, match=rf"the backups in {name} need them.*\[backup\]"):
            doomed(parse({"id": "dev"}), deployed_stacks.session)
    else:
        assert doomed(parse({"id": "dev"}), deployed_stacks.session) is not None


def test_an_incomplete_instance_is_wound_down() -> None:
    """The part `pause` and parameters are missing, and some listed resources no longer exist."""
    deployed, clock = deploy(), FakeClock()
    pause(deployed.find(), wait=True, clock=clock.clock)
    ssm, events = deployed.client("ssm"), deployed.client("events")
    names = [resources.state_parameter("dev"), resources.resources_parameter("dev", "database")]
    names += [resources.resources_parameter("dev", stack) for stack in ("commit", "compaction", "pause")]
    for name in names:
        ssm.delete_parameter(Name=name)
    events.delete_rule(Name=deployed.rules[0])
    deployed.client("lambda").delete_event_source_mapping(UUID=deployed.mappings[0])
    deployed.client("stepfunctions").delete_state_machine(stateMachineArn=deployed.machine)
    left = listed(deployed)
    left["application"] = [
        one for one in left["application"] if not one["LogicalResourceId"].startswith("Pause")
    ]
    assert ended(deployed, clock, left)["wake the database"] == "done"
    assert database(deployed).status == "available"
    rds = deployed.client("rds")
    rds.delete_db_instance(DBInstanceIdentifier=f"dormouse-{deployed.id}-writer")
    rds.delete_db_cluster(DBClusterIdentifier=deployed.cluster, SkipFinalSnapshot=True)
    assert set(ended(deployed, clock, left).values()) == {"already"}
    assert set(ended(deployed, clock, {"storage": []}).values()) == {"already"}
    assert not [one for one in ssm.describe_parameters()["Parameters"] if one["Name"].endswith("/desired")]


def test_a_pause_by_another_user_ends_the_command() -> None:
    deployed, clock = deploy(), FakeClock()
    start_job_run(deployed)
    deployed.client("stepfunctions").start_execution(stateMachineArn=deployed.machine)
    write = {"Name": resources.state_parameter("dev"), "Value": "paused", "Overwrite": True}
    clock.at.append((60.0, lambda: deployed.client("ssm").put_parameter(**write)))
    with pytest.raises(InstanceError, match="another user paused the instance meanwhile"):
        ended(deployed, clock)


@pytest.fixture
def deployed_stacks(monkeypatch: pytest.MonkeyPatch) -> Deployed:
    """Returns a deployed instance that CloudFormation seems to have created."""
    deployed = deploy()
    deployed.client("s3").create_bucket(
        Bucket="data", CreateBucketConfiguration={"LocationConstraint": REGION}
    )
    found = listed(deployed)
    stacks = [{"StackName": f"dormouse-dev-{name}", "StackStatus": "CREATE_COMPLETE"} for name in found]
    monkeypatch.setattr(destruction, "stacks_of", lambda aws, instance_id: iter(stacks))
    monkeypatch.setattr(
        destruction, "_stack_resources", lambda aws, stack: found[stack.removeprefix("dormouse-dev-")]
    )
    return deployed


def test_the_plan_lists_steps_and_changes_nothing(deployed_stacks: Deployed) -> None:
    before = deployed_stacks.state()
    found = doomed(parse({"id": "dev"}), deployed_stacks.session)
    assert found is not None
    would = {one.step for one in found.steps if one.outcome == "would"}
    assert {"disable the schedules", "disable the mappings of the queues", "stop EMR"} <= would
    assert deployed_stacks.state() == before


@pytest.mark.slow
def test_all_parts_are_ended_before_a_stack_is_deleted(
    deployed_stacks: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("package.json", "app.py", "node_modules/.bin/cdk"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    seen: list[dict[str, Any]] = []

    def cdk(*given: Any, **more: Any) -> Any:
        seen.append(deployed_stacks.state())
        monkeypatch.setattr(destruction, "stacks_of", lambda aws, instance_id: iter(()))
        return type("Done", (), {"returncode": 0})

    pause(deployed_stacks.find(), wait=True, clock=FakeClock().clock)
    found = doomed(parse({"id": "dev"}), deployed_stacks.session)
    assert found is not None
    monkeypatch.setattr(destruction.subprocess, "run", cdk)
    lines: list[str] = []
    steps = destroy(
        found, tmp_path / "dev.toml", deployed_stacks.session, tell=lines.append, ended=lambda one: None,
        clock=FakeClock().clock, root=tmp_path,
    )  # fmt: skip
    assert [one["database"] for one in seen] == ["available"]
    assert (seen[0]["rules"], seen[0]["spark"]) == ({"DISABLED"}, "STOPPED")
    assert steps[-2].step == "wake the database"
    assert lines.index("emptying data") > max(n for n, line in enumerate(lines) if line.startswith("wake"))
