"""The command that destroys a deployed instance.

It ends all work, empties the buckets and deletes the stacks.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dormouse.aws.aws import MISSING, Aws, AwsRefused
from dormouse.aws.database import (
    ASLEEP,
    SERVES,
    DropSnapshots,
    StartDatabase,
    clusters_of,
    describe,
    start,
)
from dormouse.aws.drain import DrainRuns, StopSpark
from dormouse.aws.instance import DeployedInstance, stacks_of
from dormouse.aws.steps import (
    DATABASE_SECONDS_MAX,
    SYSTEM_CLOCK,
    Clock,
    Left,
    Run,
    Step,
    StepReport,
)
from dormouse.aws.switches import (
    SwitchMappings,
    SwitchRules,
    WriteDesiredState,
    rule_name,
    schedules,
)
from dormouse.errors import InstanceError, InvalidInput
from dormouse.model.loops import tries
from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.process import environment
from dormouse.settings.resources import (
    CommitResources,
    DatabaseResources,
    Resources,
    RunResources,
    ScheduledResources,
    cluster_name,
)

WAKING = frozenset({"stopping", "stopped", "starting"})
"""States of a cluster or its writer in which AWS may refuse to delete it. Starting the cluster ends these
states."""

RULE = "AWS::Events::Rule"
Listed = Mapping[str, Sequence[Any]]
"""The resources of each stack as CloudFormation lists them, by the short name of the stack."""

ATTEMPTS_MAX = 2
COUNTED_MAX = 100_000
CDK = ("npx", "--no-install", "cdk")
_GONE = frozenset({"NoSuchBucket", "404", "NotFound"})


def wind_down(
    instance_id: str,
    listed: Listed,
    aws: Aws,
    *,
    dry_run: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    ended: Callable[[StepReport], None] = lambda report: None,
    clock: Clock = SYSTEM_CLOCK,
) -> tuple[StepReport, ...]:
    """Ends all work of an instance. Returns what each step did, or with `dry_run` would do.

    Raises `InstanceError` if a step does not end in time, or if a person pauses the instance meanwhile. An
    interrupted call can be repeated. `tell` is called with what a step waits for, and `ended` after each
    step.
    """
    instance = DeployedInstance(instance_id, aws.account, aws.region, _resources(instance_id, listed), aws)
    keepers = tuple(rule_name(rule) for rule in _of_part(listed, "Pause", RULE))
    steps: list[Step] = [
        # Desired to run, so that the keeper does not stop the database again.
        WriteDesiredState(instance, "running"),
        SwitchRules(instance, keepers, False, "the rule that keeps the database asleep"),
        SwitchRules(instance, schedules(instance), False, "the schedules"),
        SwitchMappings(instance, False),
        DrainRuns(instance, 0.0),
        StopSpark(instance, to_the_end=True),
        DropSnapshots(instance),
    ]
    if instance.resources.database is not None:
        steps.append(WakeDatabase(instance))
    steps.append(DropReplaced(instance, clusters_in(listed)))
    run = Run("running", lambda: instance.desired, tell, clock)
    reports = run.reports(steps, ended, dry_run=dry_run)
    return tuple(reports)


def physical_ids(resources: Sequence[Any], kind: str) -> tuple[str, ...]:
    """Returns the physical ids of the resources of one type, without resources that have none.

    A resource whose creation failed may have no id.
    """
    found = (one.get("PhysicalResourceId") for one in resources if one["ResourceType"] == kind)
    return tuple(name for name in found if name)


@dataclass(frozen=True)
class WakeDatabase(StartDatabase):
    """The step that starts a database that is stopped, stopping or starting.

    It does nothing in other states.
    """

    name = "wake the database"

    def left(self, waited: float) -> Iterable[Left]:
        cluster = describe(self.instance.aws, self.instance.cluster)
        if cluster is None or not {cluster["Status"], self._writer_status(cluster)} & WAKING:
            return []
        return super().left(waited)


@dataclass(frozen=True)
class DropReplaced:
    """The step that deletes the clusters that a restore replaced.

    These clusters belong to no stack, but use a stack's security groups. CloudFormation could not delete the
    groups before the clusters.
    """

    instance: DeployedInstance
    ours: tuple[str, ...]
    seconds_max = DATABASE_SECONDS_MAX
    name = "delete the database clusters that a restore has replaced"

    def left(self, waited: float) -> Iterable[Left]:
        for one in clusters_of(self.instance.aws, self.instance.id):
            if (name := one["DBClusterIdentifier"]) not in self.ours:
                yield Left(f"cluster {name} is {one['Status']}", partial(self._drop, one))

    def _drop(self, cluster: Any) -> None:
        """Requests the next change of a cluster until it is deleted.

        A sleeping cluster is started first. Then its instances are deleted, and at last the cluster.
        """
        aws, name, status = self.instance.aws, cluster["DBClusterIdentifier"], cluster["Status"]
        if status in ASLEEP:
            start(aws, name)
        elif status in SERVES:
            ask = partial(aws.ask, "rds", refusals=MISSING)
            members = [one["DBInstanceIdentifier"] for one in cluster.get("DBClusterMembers", ())]
            for member in members:
                ask("delete_db_instance", DBInstanceIdentifier=member)
            if not members:
                ask("delete_db_cluster", DBClusterIdentifier=name, SkipFinalSnapshot=True)


def clusters_in(listed: Listed) -> tuple[str, ...]:
    """Returns the names of the database clusters in all stacks."""
    return physical_ids([one for stack in listed.values() for one in stack], "AWS::RDS::DBCluster")


def _of_part(listed: Listed, part: str, kind: str) -> tuple[str, ...]:
    """Returns the physical ids of a part's resources, whose logical ids begin with the name of the part."""
    found = [one for one in listed.get("application", ()) if one["LogicalResourceId"].startswith(part)]
    return physical_ids(found, kind)


def _resources(instance_id: str, listed: Listed) -> Resources:
    """Returns the resources of the instance, read from its stacks instead of its SSM parameters.

    The part `pause` is left out, so that a missing desired state counts as running.
    """

    of = partial(_of_part, listed)

    def runs(part: str, name: str | None = None) -> RunResources:
        return RunResources(
            rules=of(part, RULE),
            function="",
            state_machine=next(iter(of(part, "AWS::StepFunctions::StateMachine")), None),
            application=next(iter(of(part, "AWS::EMRServerless::Application")), None),
            cluster_name=name,
        )

    # clusters of rows pause themselves, and no pause stops them
    main = [one for one in listed.get("database", ()) if not one["LogicalResourceId"].startswith("Rows")]
    cluster = next(iter(physical_ids(main, "AWS::RDS::DBCluster")), None)
    mappings = of("Commit", "AWS::Lambda::EventSourceMapping")
    database = {"cluster": cluster, "kind": "fixed", "endpoint": "", "port": 0, "name": ""}
    return Resources(
        database=DatabaseResources.model_validate(database) if cluster else None,
        commit=CommitResources(queues=(), dead_letters=(), mappings=mappings, function=""),
        garbage=ScheduledResources(rules=of("Garbage", RULE), function=""),
        compaction=runs("Compaction", cluster_name(instance_id)),  # its clusters may outlive it
        maintenance=runs("Maintenance"),
    )


@dataclass(frozen=True)
class Bucket:
    name: str
    objects: int
    """The number of versions and delete markers; `COUNTED_MAX` means at least that many."""


@dataclass(frozen=True)
class Doomed:
    """The parts of an instance that a destroy deletes, and those that it keeps."""

    id: str
    account: str
    region: str
    stacks: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    clusters: tuple[str, ...]
    """The database clusters, including those that a restore has replaced."""

    kept: tuple[str, ...]
    """The parts that stay because backups need them: vaults of AWS Backup, and keys, each for 1 USD a
    month."""

    protected_by: tuple[str, ...]
    """The protected parts: stacks with termination protection and clusters with deletion protection."""

    steps: tuple[StepReport, ...]
    """The steps that precede the deletion, and what they would do."""


def refuse_protected(settings: DeploymentSettings) -> None:
    """Raises `InvalidInput`, with a remedy, if the settings protect the instance."""
    if settings.protected:
        raise InvalidInput(_how_to_unprotect(settings.id, "its settings have protected = true"))


def doomed(settings: DeploymentSettings, session: Any) -> Doomed | None:
    """Returns the parts of the instance, or None if it has none.

    Raises `InvalidInput` if a deployed part is protected.
    """
    refuse_protected(settings)
    aws = Aws(session)
    if settings.account and settings.account != aws.account:
        raise InvalidInput(
            f"the credentials are of the account {aws.account}, not {settings.account}: use --profile"
        )
    stacks = list(stacks_of(aws, settings.id))
    if not stacks:
        return None
    names = tuple(one["StackName"] for one in stacks)
    listed = _listed(aws, settings.id, names)
    found = [resource for resources in listed.values() for resource in resources]
    clusters = clusters_in(listed)
    replaced = [one for one in clusters_of(aws, settings.id) if one["DBClusterIdentifier"] not in clusters]
    keepers = [one["StackName"] for one in stacks if one.get("EnableTerminationProtection")]
    keepers += [cluster for cluster in clusters if (describe(aws, cluster) or {}).get("DeletionProtection")]
    if keepers:
        why = f"as deployed it is protected ({', '.join(keepers)})"
        raise InvalidInput(_how_to_unprotect(settings.id, why))
    if kept := [one["DBClusterIdentifier"] for one in replaced if one.get("DeletionProtection")]:
        raise InvalidInput(
            f"{settings.id} was not destroyed: the database cluster {', '.join(kept)}, which a restore has "
            f"replaced, is protected from deletion and uses the network. Delete it or remove its "
            f"protection, then destroy the instance again"
        )
    if left := _left_backups(aws, settings.id, _vaults(listed)):
        raise InvalidInput(
            f"{settings.id} was not destroyed: its keys would be deleted, and the backups in "
            f"{', '.join(left)} need them. Put the table [backup] back and deploy, or delete these backups, "
            "then destroy it again"
        )
    clusters += tuple(one["DBClusterIdentifier"] for one in replaced)
    buckets = (Bucket(name, _count(aws, name)) for name in physical_ids(found, "AWS::S3::Bucket"))
    return Doomed(
        settings.id, aws.account, aws.region, names, tuple(buckets), clusters, _kept(listed),
        tuple(keepers), wind_down(settings.id, listed, aws, dry_run=True),
    )  # fmt: skip


def destroy(
    parts: Doomed,
    config: Path,
    session: Any,
    *,
    tell: Callable[[str], None],
    ended: Callable[[StepReport], None] = lambda report: None,
    clock: Clock = SYSTEM_CLOCK,
    root: Path | None = None,
) -> tuple[StepReport, ...]:
    """Ends all work, empties the buckets and deletes the stacks.

    Returns reports of the steps before the deletion. Calls `tell` with what it waits for, and `ended` after
    each step. A failed call can be repeated. Raises `InstanceError` if a step fails, if a bucket cannot be
    emptied, or if the CDK fails.
    """
    aws = Aws(session)
    cdk = cdk_command(root)
    listed = _listed(aws, parts.id, parts.stacks)
    steps = wind_down(parts.id, listed, aws, tell=tell, ended=ended, clock=clock)
    for bucket in parts.buckets:
        tell(f"emptying {bucket.name}")
        empty(aws, bucket.name)
    tell(f"deleting {len(parts.stacks)} stacks")
    command = [*cdk, "destroy", "--all", "--force", "-c", f"config={config.resolve()}", "-c", "packages=none"]
    if session.profile_name != "default":
        command += ["--profile", session.profile_name]
    region = {"AWS_REGION": parts.region, "AWS_DEFAULT_REGION": parts.region}
    for _ in tries(tries_max=ATTEMPTS_MAX, pause=0):
        code = subprocess.run(command, cwd=root, env={**environment(), **region}, check=False).returncode
        for bucket in parts.buckets:
            empty(aws, bucket.name)  # late access logs would stop the deletion of a bucket
        if code == 0:
            break
    else:
        raise InstanceError(f"cdk destroy failed ({code}); fix what it reports, and run this again")
    if left := [one["StackName"] for one in stacks_of(aws, parts.id)]:
        raise InstanceError(
            f"{', '.join(left)} are no longer in {config}, but still exist: delete them in CloudFormation"
        )
    return steps


def cdk_command(root: Path | None = None) -> list[str]:
    """Returns the command of the pinned CDK.

    Raises `InstanceError`, with a remedy, if the CDK is not installed.
    """
    folder = root or Path.cwd()
    if not (folder / "package.json").exists() or not (folder / "app.py").exists():
        raise InstanceError(
            "this is not Dormouse's checkout, which has app.py and package.json: run it there"
        )
    if not (folder / "node_modules/.bin/cdk").exists():
        raise InstanceError("the CDK is not installed: run npm ci")
    return list(CDK)


def empty(aws: Aws, bucket: str) -> None:
    """Deletes every version of every object in a bucket. Ignores a bucket that does not exist."""
    while versions := next(_versions(aws, bucket), None):
        answer = aws.call("s3", "delete_objects", Bucket=bucket, Delete={"Objects": versions, "Quiet": True})
        if errors := answer.get("Errors"):
            first = errors[0]
            raise InstanceError(
                f"{bucket} cannot be emptied: {first['Key']}: {first.get('Message', first['Code'])}"
            )


def _versions(aws: Aws, bucket: str) -> Iterator[list[dict[str, str]]]:
    """Yields the versions and delete markers of a bucket, in groups that one request can delete."""
    try:
        for page in aws.pages("s3", "list_object_versions", Bucket=bucket):
            if items := (*page.get("Versions", ()), *page.get("DeleteMarkers", ())):
                yield [{"Key": one["Key"], "VersionId": one["VersionId"]} for one in items]
    except AwsRefused as refused:
        if refused.code not in _GONE:
            raise


def _count(aws: Aws, bucket: str) -> int:
    counted = 0
    for versions in _versions(aws, bucket):
        counted += len(versions)
        if counted >= COUNTED_MAX:
            return COUNTED_MAX
    return counted


def _kept(listed: Listed) -> tuple[str, ...]:
    vaults = _vaults(listed)
    stacks = ("storage", "database") if vaults else ()
    keys = (key for stack in stacks for key in physical_ids(listed.get(stack, ()), "AWS::KMS::Key"))
    return (*(f"vault {name}" for name in vaults), *(f"key {key}" for key in keys))


def _vaults(listed: Listed) -> tuple[str, ...]:
    return physical_ids(listed.get("application", ()), "AWS::Backup::BackupVault")


def _left_backups(aws: Aws, instance_id: str, vaults: Collection[str]) -> list[str]:
    """Returns the vaults with backups that an earlier part `backup` left, if no part now keeps their keys.

    Returns an empty list without the right to list vaults.
    """
    try:
        found = [] if vaults else aws.all("backup", "list_backup_vaults", "BackupVaultList")
    except AwsRefused as refused:
        if not refused.is_denied:
            raise
        return []
    named = re.compile(rf"dormouse-{instance_id}-[A-Za-z0-9]+")
    return [
        one["BackupVaultName"]
        for one in found
        if named.fullmatch(one["BackupVaultName"]) and one.get("NumberOfRecoveryPoints")
    ]


def _listed(aws: Aws, instance_id: str, stacks: tuple[str, ...]) -> Listed:
    return {name.removeprefix(f"dormouse-{instance_id}-"): _stack_resources(aws, name) for name in stacks}


def _stack_resources(aws: Aws, stack: str) -> list[dict[str, Any]]:
    found = aws.all("cloudformation", "list_stack_resources", "StackResourceSummaries", StackName=stack)
    return [one for one in found if one["ResourceStatus"] != "DELETE_COMPLETE"]


def _how_to_unprotect(instance_id: str, why: str) -> str:
    return (
        f"{instance_id} was not destroyed: {why}. Set protected = false in its file, run cdk deploy --all, "
        "then destroy it again"
    )
