"""What of a deployed instance runs, what sleeps, what waits in queues, and what an hour costs as it is."""

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
from dormouse.aws.instance import DeployedInstance
from dormouse.aws.switches import GONE, mapping_state, mappings, rule_state, schedules, sleeper_state
from dormouse.errors import InstanceError
from dormouse.settings.resources import DesiredState

GB = 1_000_000_000
NO_CLUSTER = "no cluster"
_MINUTES, _DAY = 300, 86_400


@dataclass(frozen=True)
class QueueState:
    """A commit queue; all numbers are about."""

    url: str
    waiting: int
    in_flight: int
    delayed: int
    dead: int
    """In the queue of its dead letters."""

    oldest_seconds: float | None = None
    """The age of the oldest message that waits; None where CloudWatch does not tell."""

    lost_at: datetime | None = None
    """When SQS forgets that."""


@dataclass(frozen=True)
class Status:
    """An instance as it is now; the states are AWS's words, and `gone` is what is not there any more."""

    instance: str
    account: str
    region: str
    desired: DesiredState
    summary: str
    """running or paused, on the way there, or how it differs from what is desired."""

    database: str
    """Of the cluster."""

    schedules: dict[str, str]
    """By the names of the rules."""

    mappings: dict[str, str]
    """By their UUIDs."""

    queues: tuple[QueueState, ...]
    offer: str | None
    """What to do before messages are lost; None while none are about to be."""

    runs: tuple[str, ...]
    """Executions of state machines, job runs and clusters."""

    spark: str | None
    """Of the EMR Serverless application, or how many EMR clusters there are; None without either."""

    query: str | None
    """Of the query service: running, asleep, or the state of its stack; None without one."""

    query_url: str | None
    """What clients in the VPC call."""

    access: str | None
    """Of the host for access, likewise."""

    left_behind: tuple[str, ...]
    """Database clusters that a restore has replaced, and that cost on."""

    usd_hour: tuple[tuple[str, float | None], ...]
    """What costs how much an hour now; None where it is not known."""


def status(instance: DeployedInstance) -> Status:
    """Raises InstanceError when AWS cannot be asked; a cost that cannot be found out is None."""
    cluster = describe(instance.aws, instance.cluster)
    waits = waiting(instance)
    runs, told = _runs(instance), instance.resources.query
    query, access = (sleeper_state(instance, one) for one in (told, instance.resources.access))
    live = {**_live(instance, cluster, bool(runs)), **_query_live(instance, query)}
    live["access_sleeps"] = access in ("asleep", GONE)
    ours = instance.resources.database
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
        query_url=told.url if told else None,
        access=access,
        left_behind=left_behind(instance.aws, instance.id, ours) if ours else (),
        usd_hour=tuple(hourly(instance.resources, live, instance.region)),
    )
    return replace(found, summary=_summary(found))


def _summary(found: Status) -> str:
    off = [state == "DISABLED" for state in found.schedules.values()]
    off += [state == "Disabled" for state in found.mappings.values()]
    if found.desired == "paused":
        sleep = all(state in (None, "asleep", GONE) for state in (found.query, found.access))
        spark_sleeps = found.spark in (None, "", NO_CLUSTER, *drain.APPLICATION_ASLEEP)
        is_quiet = all(off) and sleep and spark_sleeps
        if is_quiet and found.database in ASLEEP:
            return "paused"
        if is_quiet and found.database == STOPPING:
            return "paused; AWS is still stopping the database"
        return "should be paused, but is not wholly: pause it again"
    run = all(state in (None, "running") for state in (found.query, found.access))
    if found.database in SERVES and not any(off) and run:
        return "running"
    if found.database == GONE:
        return "should be running, but its database is gone"
    return "should be running, but is not wholly: resume it again"


def _queues(instance: DeployedInstance, waits: tuple[Waiting, ...]) -> list[QueueState]:
    told = instance.resources.commit
    if told is None:
        return []
    dead = [*told.dead_letters, *[""] * len(told.queues)]
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
    told = instance.resources.compaction
    if told is None:
        return None
    if told.application is not None:
        return drain.application_state(instance) or GONE
    number = len(drain.clusters(instance))
    return f"{number} cluster{'' if number == 1 else 's'}" if number else NO_CLUSTER


def _live(instance: DeployedInstance, cluster: Any, runs: bool) -> dict[str, Any]:
    """What `cost.hourly` wants to know of all but the query service; what cannot be found out is left out."""
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


def _query_live(instance: DeployedInstance, state: str | None) -> dict[str, Any]:
    """How many tasks of the query service run; none are asked for while it sleeps."""
    told = instance.resources.query
    if told is None:
        return {}
    if state in ("asleep", GONE):
        return {"query_tasks": 0, "query_sleeps": True}
    try:
        found = instance.aws.call("ecs", "describe_services", cluster=told.cluster, services=[told.service])
    except InstanceError:
        return {}
    live = (one for one in found["services"] if one["status"] != "INACTIVE")
    return {"query_tasks": sum(one["runningCount"] for one in live)}


def _hosts(instance: DeployedInstance) -> list[str]:
    """The types of the EC2 instances that EMR has now."""
    running = partial(instance.aws.all, "emr", "list_instances", "Instances", InstanceStates=["RUNNING"])
    clusters = drain.clusters(instance)
    return [one["InstanceType"] for cluster in clusters for one in running(ClusterId=cluster["Id"])]


def _measured(instance: DeployedInstance) -> dict[str, float]:
    """The newest values that CloudWatch has; none when it may not be asked."""
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
