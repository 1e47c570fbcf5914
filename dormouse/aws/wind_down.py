"""Ends what would hold the stacks of an instance, before they are deleted: work, EMR, a database that sleeps.

What there is comes from the stacks themselves: parameters, rules and all else may be gone already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dormouse.aws.aws import MISSING, Aws
from dormouse.aws.database import ASLEEP, SERVES, StartDatabase, clusters_of, describe, start
from dormouse.aws.drain import DrainRuns, StopSpark
from dormouse.aws.instance import DeployedInstance
from dormouse.aws.snapshots import DropSnapshots
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
from dormouse.settings.resources import (
    CommitResources,
    DatabaseResources,
    Resources,
    RunResources,
    ScheduledResources,
    cluster_name,
)

WAKING = frozenset({"stopping", "stopped", "starting"})
"""States of a cluster or its writer in which it may be refused to be deleted, and which a start ends."""

Listed = Mapping[str, Sequence[Any]]
"""The resources of each stack, by its short name, as CloudFormation lists them."""


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
    """What was done, or with `dry_run` would be. Raises InstanceError if something does not end in time, or
    somebody pauses the instance meanwhile. It may be interrupted, and run again.
    """
    instance = DeployedInstance(instance_id, aws.account, aws.region, _resources(instance_id, listed), aws)
    keepers = tuple(rule_name(rule) for rule in physical_ids(listed.get("pause", ()), "AWS::Events::Rule"))
    steps: list[Step] = [
        # Wanted to run, so that what keeps a paused instance asleep does not stop the database again.
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
    """Of the resources of one type; one whose making failed may have none."""
    found = (one.get("PhysicalResourceId") for one in resources if one["ResourceType"] == kind)
    return tuple(name for name in found if name)


@dataclass(frozen=True)
class WakeDatabase(StartDatabase):
    """Starts a database that sleeps, and waits for it; one in any other state is left alone."""

    name = "wake the database"

    def left(self, waited: float) -> Iterable[Left]:
        cluster = describe(self.instance.aws, self.instance.cluster)
        if cluster is None or not {cluster["Status"], self._writer_status(cluster)} & WAKING:
            return []
        return super().left(waited)


@dataclass(frozen=True)
class DropReplaced:
    """Clusters that a restore has replaced are in no stack, and in security groups of some."""

    instance: DeployedInstance
    ours: tuple[str, ...]
    seconds_max = DATABASE_SECONDS_MAX
    name = "delete the database clusters that a restore has replaced"

    def left(self, waited: float) -> Iterable[Left]:
        for one in clusters_of(self.instance.aws, self.instance.id):
            if (name := one["DBClusterIdentifier"]) not in self.ours:
                yield Left(f"cluster {name} is {one['Status']}", partial(self._drop, one))

    def _drop(self, cluster: Any) -> None:
        """One that sleeps must wake first; and its instances go before it."""
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
    """The database clusters of all stacks."""
    return physical_ids([one for stack in listed.values() for one in stack], "AWS::RDS::DBCluster")


def _resources(instance_id: str, listed: Listed) -> Resources:
    """Without `pause`: the parameter of the desired state need not be there."""

    def of(stack: str, kind: str) -> tuple[str, ...]:
        return physical_ids(listed.get(stack, ()), kind)

    def first(stack: str, kind: str) -> str | None:
        return next(iter(of(stack, kind)), None)

    def runs(stack: str, name: str | None = None) -> RunResources:
        return RunResources(
            rules=of(stack, "AWS::Events::Rule"),
            function="",
            state_machine=first(stack, "AWS::StepFunctions::StateMachine"),
            application=first(stack, "AWS::EMRServerless::Application"),
            cluster_name=name,
        )

    # those of rows pause themselves, and no pause stops them
    main = [one for one in listed.get("database", ()) if not one["LogicalResourceId"].startswith("Rows")]
    cluster = next(iter(physical_ids(main, "AWS::RDS::DBCluster")), None)
    mappings = of("commit", "AWS::Lambda::EventSourceMapping")
    database = {"cluster": cluster, "kind": "fixed", "endpoint": "", "port": 0, "name": ""}
    return Resources(
        database=DatabaseResources.model_validate(database) if cluster else None,
        commit=CommitResources(queues=(), dead_letters=(), mappings=mappings, function=""),
        garbage=ScheduledResources(rules=of("garbage", "AWS::Events::Rule"), function=""),
        compaction=runs("compaction", cluster_name(instance_id)) if "compaction" in listed else None,
        maintenance=runs("maintenance"),
    )
