"""What of a deployed instance runs, what sleeps, what waits in queues, and what an hour costs as it is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from dormouse.errors import InstanceError
from dormouse.settings.resources import DesiredState
from dormouse.system import drain
from dormouse.system.cost import hourly
from dormouse.system.database import ASLEEP, SERVES, STOPPING, describe
from dormouse.system.instance import DeployedInstance
from dormouse.system.query import GONE, query_state
from dormouse.system.switches import mapping_state, mappings, rule_state, schedules

GB = 1_000_000_000
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
    runs: tuple[str, ...]
    """Executions of state machines, job runs and clusters."""

    spark: str | None
    """Of the EMR Serverless application, or how many EMR clusters there are; None without either."""

    query: str | None
    """Of the query service: running, asleep, or the state of its stack; None without one."""

    query_url: str | None
    """What clients in the VPC call."""

    usd_hour: tuple[tuple[str, float | None], ...]
    """What costs how much an hour now; None where it is not known."""

    @property
    def awake(self) -> list[str]:
        """What runs or could begin to."""
        on = [name for name, state in self.schedules.items() if state not in ("DISABLED", GONE)]
        on += [name for name, state in self.mappings.items() if state not in ("Disabled", GONE)]
        runs = ["EMR"] if self.spark is not None and _is_awake(self.spark) else []
        runs += ["query service"] if self.query not in (None, "asleep", GONE) else []
        return [*([] if self.database in {STOPPING, *ASLEEP} else ["database"]), *runs, *on]


def status(instance: DeployedInstance) -> Status:
    """Raises InstanceError when AWS cannot be asked; a cost that cannot be found out is None."""
    cluster = describe(instance.aws, instance.cluster)
    database = str(cluster["Status"]) if cluster else GONE
    rules = {rule: rule_state(instance, rule) or GONE for rule in schedules(instance)}
    switched = {uuid: mapping_state(instance, uuid) or GONE for uuid in mappings(instance)}
    desired, runs, spark = instance.desired, _runs(instance), _spark(instance)
    told, query = instance.resources.query, query_state(instance)
    live = {**_live(instance, cluster, bool(runs)), **_query_live(instance, query)}
    usd = hourly(instance.resources, live, instance.region)
    return Status(
        instance=instance.id,
        account=instance.account,
        region=instance.region,
        desired=desired,
        summary=_summary(desired, database, rules, switched, spark, query),
        database=database,
        schedules=rules,
        mappings=switched,
        queues=tuple(_queues(instance)),
        runs=runs,
        spark=spark,
        query=query,
        query_url=told.url if told else None,
        usd_hour=tuple(usd),
    )


def _summary(
    desired: str,
    database: str,
    rules: dict[str, str],
    switched: dict[str, str],
    spark: str | None,
    query: str | None,
) -> str:
    off = [*(state == "DISABLED" for state in rules.values()), *(s == "Disabled" for s in switched.values())]
    if desired == "paused":
        quiet = all(off) and not (spark and _is_awake(spark)) and query in (None, "asleep", GONE)
        if quiet and database in ASLEEP:
            return "paused"
        if quiet and database == STOPPING:
            return "paused; AWS is still stopping the database"
        return "should be paused, but is not wholly: pause it again"
    if database in SERVES and not any(off) and query in (None, "running"):
        return "running"
    if database == GONE:
        return "should be running, but its database is gone"
    return "should be running, but is not wholly: resume it again"


def _is_awake(spark: str) -> bool:
    return spark not in drain.APPLICATION_ASLEEP and not spark.startswith("no cluster")


def _queues(instance: DeployedInstance) -> list[QueueState]:
    told = instance.resources.commit
    if told is None:
        return []
    dead = [*told.dead_letters, *[""] * len(told.queues)]
    return [_queue(instance, url, letters) for url, letters in zip(told.queues, dead, strict=False)]


def _queue(instance: DeployedInstance, url: str, dead_letters: str) -> QueueState:
    waiting, in_flight, delayed = drain.depth(instance, url).values()
    dead = next(iter(drain.depth(instance, dead_letters).values())) if dead_letters else 0
    return QueueState(url, waiting, in_flight, delayed, dead)


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
    return f"{number} cluster{'' if number == 1 else 's'}" if number else "no cluster"


def _live(instance: DeployedInstance, cluster: Any, runs: bool) -> dict[str, Any]:
    """What `cost.hourly` wants to know; what cannot be found out is left out."""
    measured = _measured(instance)
    classes = _instance_classes(instance) if cluster else []
    serverless = classes.count("db.serverless")
    serves = drain.application(instance) is not None
    live = {
        "database": str(cluster["Status"]) if cluster else "stopped",
        "instances": classes,
        "acu": measured["acu"] * serverless if "acu" in measured else None,
        "database_gb": measured["database_bytes"] / GB if "database_bytes" in measured else None,
        "data_gb": measured["data_bytes"] / GB if "data_bytes" in measured else None,
        "vcpus": 0 if serves and not runs else None,
        "hosts": None if serves else _hosts(instance),
    }
    return {name: value for name, value in live.items() if value is not None}


def _query_live(instance: DeployedInstance, state: str | None) -> dict[str, Any]:
    """How many tasks of the query service run; none are asked for while it sleeps."""
    told = instance.resources.query
    if told is None:
        return {}
    if state in ("asleep", GONE):
        return {"query_tasks": 0, "query_sleeps": True}
    try:
        found = instance.aws.call("ecs", "describe_services", cluster=told.cluster, services=[told.service])[
            "services"
        ]
    except InstanceError:
        return {}
    return {"query_tasks": sum(one["runningCount"] for one in found if one["status"] != "INACTIVE")}


def _instance_classes(instance: DeployedInstance) -> list[str]:
    filters = [{"Name": "db-cluster-id", "Values": [instance.cluster]}]
    found = instance.aws.all("rds", "describe_db_instances", "DBInstances", Filters=filters)
    return [one["DBInstanceClass"] for one in found]


def _hosts(instance: DeployedInstance) -> list[str]:
    """The types of the EC2 instances that EMR has now."""
    return [
        one["InstanceType"]
        for cluster in drain.clusters(instance)
        for one in instance.aws.all(
            "emr", "list_instances", "Instances", ClusterId=cluster["Id"], InstanceStates=["RUNNING"]
        )
    ]


def _measured(instance: DeployedInstance) -> dict[str, float]:
    """The newest values that CloudWatch has; none when it may not be asked."""
    storage, now = instance.resources.storage, datetime.now(UTC)
    by_cluster = [{"Name": "DBClusterIdentifier", "Value": instance.cluster}]
    queries = [
        _query("acu", "AWS/RDS", "ServerlessDatabaseCapacity", by_cluster, _MINUTES),
        _query("database_bytes", "AWS/RDS", "VolumeBytesUsed", by_cluster, _MINUTES),
    ]
    if storage is not None:
        bucket = [
            {"Name": "BucketName", "Value": storage.data_bucket},
            {"Name": "StorageType", "Value": "StandardStorage"},
        ]
        queries.append(_query("data_bytes", "AWS/S3", "BucketSizeBytes", bucket, _DAY))
    try:
        found = instance.aws.call(
            "cloudwatch",
            "get_metric_data",
            MetricDataQueries=queries,
            StartTime=now - timedelta(days=3),
            EndTime=now,
            ScanBy="TimestampDescending",
        )
    except InstanceError:
        return {}
    results = found["MetricDataResults"]
    return {one["Id"]: float(one["Values"][0]) for one in results if one["Values"]}


def _query(
    name: str, namespace: str, metric: str, dimensions: list[dict[str, str]], period: int
) -> dict[str, Any]:
    measured = {"Namespace": namespace, "MetricName": metric, "Dimensions": dimensions}
    return {"Id": name, "MetricStat": {"Metric": measured, "Period": period, "Stat": "Average"}}
