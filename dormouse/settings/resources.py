"""What a deployed instance tells of itself in SSM parameters: stacks write it, `dormouse.aws` reads it.

`/dormouse/<id>/desired` is the desired state, which the first deploy makes, and no other writes anew.
`/dormouse/<id>/resources/<stack>` is one of the models below as JSON, for each stack that is deployed.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

DesiredState = Literal["running", "paused"]
PREFIX = "/dormouse"
INSTANCE_TAG = "dormouse:instance"
"""Of all that an instance consists of, with its id."""


def state_parameter(instance_id: str) -> str:
    """The name of the parameter with the desired state."""
    return f"{PREFIX}/{instance_id}/desired"


def resources_path(instance_id: str) -> str:
    """The path of the parameters that tell of the stacks."""
    return f"{PREFIX}/{instance_id}/resources"


def resources_parameter(instance_id: str, stack: str) -> str:
    """The name of the parameter that tells of one stack."""
    return f"{resources_path(instance_id)}/{stack}"


def stack_name(instance_id: str, stack: str) -> str:
    """The name of one of its stacks in CloudFormation."""
    return f"dormouse-{instance_id}-{stack}"


RUNNING_PARAMETER = "Running"
"""Of the stacks `query` and `access`: "true" or "false"."""


FORWARDING = "AWS-StartPortForwardingSessionToRemoteHost"
"""The document of Session Manager by which people reach the database through the host for access."""


def cluster_name(instance_id: str) -> str:
    """The name of the instance's clusters of EMR on EC2; those of one run only have its id behind."""
    return f"dormouse-{instance_id}"


class Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class StorageResources(Described):
    data_bucket: str
    payload_bucket: str
    objects: str
    """The URL of the object store: s3://bucket/data."""
    restore_days: int | None = None
    """How far back its deleted objects reach; None: as far as the backups of the database."""


class DatabaseResources(Described):
    cluster: str
    kind: Literal["serverless", "fixed"]
    endpoint: str
    port: int
    name: str
    proxy: str | None = None
    row_indexes: tuple[str, ...] | None = None
    """Where row tables are indexed: `host:port/database` of each; None: nowhere."""
    row_clusters: tuple[str, ...] | None = None
    """The identifiers of the serverless clusters that row tables have of their own; None: of none."""


class TablesResources(Described):
    """The names of the functions that answer what is asked of tables."""

    show: str
    """Changes nothing."""
    change: str


class CommitResources(Described):
    queues: tuple[str, ...]
    """URLs."""
    dead_letters: tuple[str, ...]
    mappings: tuple[str, ...]
    """UUIDs of the event source mappings."""
    function: str


class ScheduledResources(Described):
    """Of `garbage`."""

    rules: tuple[str, ...]
    function: str


class RunResources(ScheduledResources):
    """Of `compaction` and `maintenance`; the latter has no engine, and runs on that of the former."""

    state_machine: str | None = None
    engine: Literal["emr-serverless", "emr-ec2-steps", "emr-ec2-transient"] | None = None
    application: str | None = None
    """The id of the EMR Serverless application."""
    cluster_name: str | None = None
    """The name of the clusters of EMR on EC2."""


class SleepingResources(Described):
    """Of a stack that sleeps by its parameter `Running`."""

    stack: str
    """Its name."""
    switch: str | None = None
    """The name of the function that lets it run or sleep; None before there was one."""


class QueryResources(SleepingResources):
    url: str
    """What clients in the VPC call, while it runs."""
    token: str
    """The ARN of the secret with the token that clients need."""
    cluster: str
    """Of ECS."""
    service: str
    tasks_min: int
    cpu: int
    """1024 is one virtual CPU."""
    memory_mb: int
    endpoints: int
    """How many interface endpoints it has."""


class AccessResources(SleepingResources):
    host: str
    """The id of the EC2 instance; empty while it sleeps."""
    endpoints: int
    """How many interface endpoints it has."""


class PauseResources(Described):
    rule: str
    queue: str
    function: str
    drain_seconds: int


class Resources(Described):
    """What is deployed."""

    storage: StorageResources | None = None
    database: DatabaseResources | None = None
    tables: TablesResources | None = None
    commit: CommitResources | None = None
    garbage: ScheduledResources | None = None
    compaction: RunResources | None = None
    maintenance: RunResources | None = None
    query: QueryResources | None = None
    access: AccessResources | None = None
    pause: PauseResources | None = None
