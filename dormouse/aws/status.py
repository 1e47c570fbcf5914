"""The status of a deployed instance: running and sleeping parts, waiting messages, and current costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from dormouse.aws import drain
from dormouse.aws.aws import Metric
from dormouse.aws.cost import hourly
from dormouse.aws.database import ASLEEP, SERVES, STOPPING, describe, left_behind
from dormouse.aws.drain import Waiting, offer, waiting
from dormouse.aws.instance import DeployedInstance, left_stacks
from dormouse.aws.switches import (
    GONE,
    mapping_state,
    mappings,
    rule_state,
    schedules,
    sleeper_state,
)
from dormouse.errors import InstanceError
from dormouse.settings.resources import DesiredState, ServiceResources

GB = 1_000_000_000
NO_CLUSTER = "no cluster"
NO_TASK = "no task runs"
_MINUTES, _DAY = 300, 86_400


@dataclass(frozen=True)
class QueueState:
    """The state of a commit queue; all numbers are approximate."""

    url: str
    waiting: int
    in_flight: int
    delayed: int
    dead: int
    """The number of dead letters of the queue."""

    oldest_seconds: float | None = None
    """The age of the oldest waiting message; None without a value in CloudWatch."""

    lost_at: datetime | None = None
    """The time at which SQS deletes the oldest waiting message; None if it is not known."""


@dataclass(frozen=True)
class Status:
    """The current state of an instance, in the words of AWS; `gone` for a part that no longer exists."""

    instance: str
    account: str
    region: str
    desired: DesiredState
    summary: str
    """The state in words: running or paused, changing, or different from the desired state."""

    database: str
    """The state of the database cluster."""

    schedules: dict[str, str]
    """The states of schedules, by the names of their rules."""

    mappings: dict[str, str]
    """The states of mappings, by their UUIDs. With a commit service, they are off."""

    queues: tuple[QueueState, ...]
    offer: str | None
    """The advice for messages that are about to be lost, or None."""

    runs: tuple[str, ...]
    """The running executions of state machines, job runs and clusters."""

    spark: str | None
    """The state of the EMR Serverless application, or the number of EMR clusters; None without either."""

    query: str | None
    """The state of the query service: running, asleep, or the state of its stack; None without one."""

    query_url: str | None
    """The URL for clients in the VPC."""

    access: str | None
    """The state of the host for access: running, asleep, or the state of its stack; None without one."""

    left_behind: tuple[str, ...]
    """Database clusters that a restore has replaced, and which still cost money."""

    usd_hour: tuple[tuple[str, float | None], ...]
    """The current cost of each part in USD an hour; None for a part whose cost is not known."""

    emr_endpoint: str | None = None
    """The state of the interface endpoint for EMR on EC2, in the same words."""

    commit_service: str | None = None
    """The state of the commit service, in the same words, or `no task runs`; None without one."""

    left_stacks: tuple[str, ...] = ()
    """Stacks that a deploy no longer has, and which may still cost money."""


def status(instance: DeployedInstance) -> Status:
    """Returns the current status. Costs that cannot be determined are None.

    Raises `InstanceError` if AWS cannot be called.
    """
    cluster = describe(instance.aws, instance.cluster)
    waits = waiting(instance)
    runs, resources, state = _runs(instance), instance.resources, sleeper_state(instance)
    query_service, compaction, ours = resources.query, resources.compaction, resources.database
    query = state if query_service else None
    committing = resources.commit.service if resources.commit else None
    commit = state if committing else None
    live = {**_live(instance, cluster, bool(runs)), **_tasks_live(instance, "query", query_service, query)}
    live |= (tasks := _tasks_live(instance, "commit", committing, commit))
    if commit == "running" and tasks.get("commit_tasks") == 0:
        commit = NO_TASK
    live["sleeps"] = state in ("asleep", GONE)
    found = Status(
        instance=instance.id,
        account=instance.account,
        region=instance.region,
        desired=instance.desired,
        summary="",
        database=str(cluster["Status"]) if cluster else GONE,
        schedules={rule: rule_state(instance, rule) or GONE for rule in schedules(instance)},
        mappings={uuid: mapping_state(instance, uuid) or GONE for uuid in mappings(instance)},
        queues=tuple(_queues(instance, waits)),
        offer=offer(waits, instance.id),
        runs=runs,
        spark=_spark(instance),
        query=query,
        query_url=query_service.url if query_service else None,
        access=state if resources.access else None,
        left_behind=left_behind(instance.aws, instance.id, ours) if ours else (),
        usd_hour=tuple(hourly(resources, live, instance.region)),
        emr_endpoint=state if compaction and compaction.has_endpoint else None,
        commit_service=commit,
        left_stacks=left_stacks(instance.aws, instance.id),
    )
    return replace(found, summary=_summary(found))


def _summary(parts: Status) -> str:
    mappings_off = [state == "Disabled" for state in parts.mappings.values()]
    off = [state == "DISABLED" for state in parts.schedules.values()]
    sleeping = (parts.query, parts.access, parts.emr_endpoint, parts.commit_service)
    if parts.desired == "paused":
        off += mappings_off
        sleep = all(state in (None, "asleep", GONE) for state in sleeping)
        spark_sleeps = parts.spark in (None, "", NO_CLUSTER, *drain.APPLICATION_ASLEEP)
        is_quiet = all(off) and sleep and spark_sleeps
        if is_quiet and parts.database in ASLEEP:
            return "paused"
        if is_quiet and parts.database == STOPPING:
            return "paused; AWS is still stopping the database"
        return "should be paused, but a part of it is not: pause it again"
    run = all(state in (None, "running") for state in sleeping)
    off += mappings_off if parts.commit_service is None else []
    if parts.database in SERVES and not any(off) and run:
        return "running"
    if parts.database == GONE:
        return "should be running, but its database does not exist"
    return "should be running, but a part of it is not: resume it again"


def _queues(instance: DeployedInstance, waits: tuple[Waiting, ...]) -> list[QueueState]:
    commit_resources = instance.resources.commit
    if commit_resources is None:
        return []
    dead = [*commit_resources.dead_letters, *[""] * len(commit_resources.queues)]
    return [_queue(instance, one, letters) for one, letters in zip(waits, dead, strict=False)]


def _queue(instance: DeployedInstance, waits: Waiting, dead_letters: str) -> QueueState:
    visible, in_flight, delayed = drain.depth(instance.aws, waits.url).values()
    dead = next(iter(drain.depth(instance.aws, dead_letters).values())) if dead_letters else 0
    return QueueState(waits.url, visible, in_flight, delayed, dead, waits.oldest_seconds, waits.lost_at)


def _runs(instance: DeployedInstance) -> tuple[str, ...]:
    runs = [f"execution {arn.rpartition(':')[2]}" for arn in drain.executions(instance)]
    runs += [f"job run {one['id']}, {one['state'].lower()}" for one in drain.job_runs(instance)]
    clusters = drain.clusters(instance)
    return (*runs, *(f"cluster {one['Id']}, {one['Status']['State'].lower()}" for one in clusters))


def _spark(instance: DeployedInstance) -> str | None:
    compaction_resources = instance.resources.compaction
    if compaction_resources is None:
        return None
    if compaction_resources.application is not None:
        return drain.application_state(instance) or GONE
    number = len(drain.clusters(instance))
    return f"{number} cluster{'' if number == 1 else 's'}" if number else NO_CLUSTER


def _live(instance: DeployedInstance, cluster: Any, runs: bool) -> dict[str, Any]:
    """Returns the known values that `cost.hourly` needs, except those of the query service."""
    measured = _measured(instance)
    filters = [{"Name": "db-cluster-id", "Values": [instance.cluster]}]
    members = (
        instance.aws.all("rds", "describe_db_instances", "DBInstances", Filters=filters) if cluster else []
    )
    classes = [one["DBInstanceClass"] for one in members]
    live: dict[str, Any] = {
        "database": str(cluster["Status"]) if cluster else "stopped",
        "instances": classes,
    }
    if drain.application(instance) is None:
        live["hosts"] = _hosts(instance)
    elif not runs:
        live["vcpus"] = 0
    if "acu" in measured:
        live["acu"] = measured["acu"] * classes.count("db.serverless")
    if "rows_acu" in measured:
        live["rows_acu"] = measured["rows_acu"]
    return live | {
        f"{what}_gb": measured[f"{what}_bytes"] / GB
        for what in ("database", "data", "rows")
        if f"{what}_bytes" in measured
    }


def _tasks_live(
    instance: DeployedInstance, name: str, service: ServiceResources | None, state: str | None
) -> dict[str, Any]:
    """Returns the values of a service that `cost.hourly` needs: the number of its running tasks.

    Makes no call while the service sleeps.
    """
    if service is None:
        return {}
    if state in ("asleep", GONE):
        return {f"{name}_tasks": 0}
    try:
        found = instance.aws.call(
            "ecs", "describe_services", cluster=service.cluster, services=[service.service]
        )
    except InstanceError:
        return {}
    live = (one for one in found["services"] if one["status"] != "INACTIVE")
    return {f"{name}_tasks": sum(one["runningCount"] for one in live)}


def _hosts(instance: DeployedInstance) -> list[str]:
    """Returns the instance types of the EC2 instances that EMR clusters run now."""
    running = partial(instance.aws.all, "emr", "list_instances", "Instances", InstanceStates=["RUNNING"])
    clusters = drain.clusters(instance)
    return [one["InstanceType"] for cluster in clusters for one in running(ClusterId=cluster["Id"])]


def _measured(instance: DeployedInstance) -> dict[str, float]:
    """Returns the newest capacities and sizes in CloudWatch by name; empty without the right to read them."""
    storage, database = instance.resources.storage, instance.resources.database
    row_clusters = (database.row_clusters if database is not None else None) or ()
    clusters = {("acu", "database_bytes"): instance.cluster}
    for number, identifier in enumerate(row_clusters):
        clusters[f"rows_acu_{number}", f"rows_bytes_{number}"] = identifier
    metrics = {}
    for (acu, size), identifier in clusters.items():
        cluster = {"DBClusterIdentifier": identifier}
        metrics[acu] = Metric("AWS/RDS", "ServerlessDatabaseCapacity", cluster, _MINUTES)
        metrics[size] = Metric("AWS/RDS", "VolumeBytesUsed", cluster, _MINUTES)
    if storage is not None:
        bucket = {"BucketName": storage.data_bucket, "StorageType": "StandardStorage"}
        metrics["data_bytes"] = Metric("AWS/S3", "BucketSizeBytes", bucket, _DAY)
    newest = instance.aws.newest(metrics, timedelta(days=3))
    for what in ("rows_acu", "rows_bytes"):
        of_rows = [newest.get(f"{what}_{number}") for number in range(len(row_clusters))]
        if of_rows and None not in of_rows:
            newest[what] = sum(filter(None, of_rows))
    return newest
