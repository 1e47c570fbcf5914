"""The description of a deployed instance in SSM parameters. Stacks write it, and `dormouse.aws` reads it.

`/dormouse/<id>/desired` is the desired state. The first deploy writes it, and later deploys leave it.
`/dormouse/<id>/resources/<name>` describes one deployed stack, or a part of the stack `application`, as the
JSON text of a model below.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

DesiredState = Literal["running", "paused"]
PREFIX = "/dormouse"
INSTANCE_TAG = "dormouse:instance"
"""The tag of all parts of an instance. Its value is the id of the instance."""


def state_parameter(instance_id: str) -> str:
    """Returns the name of the SSM parameter with the desired state."""
    return f"{PREFIX}/{instance_id}/desired"


def resources_path(instance_id: str) -> str:
    """Returns the path of the SSM parameters that describe the stacks."""
    return f"{PREFIX}/{instance_id}/resources"


def resources_parameter(instance_id: str, stack: str) -> str:
    """Returns the name of the SSM parameter that describes one stack."""
    return f"{resources_path(instance_id)}/{stack}"


def stack_name(instance_id: str, stack: str) -> str:
    """Returns the name in CloudFormation of the instance's stack with this short name."""
    return f"dormouse-{instance_id}-{stack}"


STACKS = ("network", "storage", "database", "migrate", "application", "copy")
"""The short names of all stacks. A deploy has each of them, but for `copy`, which only copies need."""

RUNNING_PARAMETER = "Running"
"""The CloudFormation parameter of the stack `application`, which is "true" or "false"."""


FORWARDING = "AWS-StartPortForwardingSessionToRemoteHost"
"""The Session Manager document for forwarding a port to the database through the host for access."""


def cluster_name(instance_id: str) -> str:
    """Returns the name of the instance's EMR clusters on EC2.

    The name of a cluster for one run continues with its id.
    """
    return f"dormouse-{instance_id}"


class Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class StorageResources(Described):
    data_bucket: str
    payload_bucket: str
    objects: str
    """The URL of the object store: s3://bucket/data."""
    restore_days: int | None = None
    """The number of days that deleted objects are kept; None if they are kept as long as the backups of the
    database."""


class DatabaseResources(Described):
    cluster: str
    kind: Literal["serverless", "fixed"]
    endpoint: str
    port: int
    name: str
    proxy: str | None = None
    row_indexes: tuple[str, ...] | None = None
    """The databases with the indexes of row tables, as `host:port/database`; None if there are none."""
    row_clusters: tuple[str, ...] | None = None
    """The identifiers of the serverless clusters that only index row tables; None if there are none."""
    storage: Literal["standard", "io-optimized"] = "standard"
    """The storage of the cluster, on which its prices depend."""


class TablesResources(Described):
    """The names of the lambdas that answer requests about tables."""

    show: str
    """The lambda that only reads."""
    change: str


class ApplicationResources(Described):
    """The stack with the parts below. What costs money by the hour sleeps by its parameter `Running`."""

    stack: str
    """The name of the stack."""
    switch: str | None = None
    """The name of the function that wakes the stack or puts it to sleep; None if nothing in it sleeps."""
    parts: tuple[str, ...]
    """The names of the parts that the last deploy had."""


class ServiceResources(Described):
    """A service on Fargate, which exists only while the instance runs."""

    cluster: str
    """The name of the cluster in ECS."""
    service: str
    cpu: int
    """The CPU of a task; 1024 is one virtual CPU."""
    memory_mb: int
    endpoints: int
    """The number of the stack's interface endpoints."""


class CommitResources(Described):
    queues: tuple[str, ...]
    """The URLs of the queues."""
    dead_letters: tuple[str, ...]
    mappings: tuple[str, ...]
    """The UUIDs of the event source mappings, which are off if there is a service."""
    function: str
    service: ServiceResources | None = None
    """The service that commits in place of the lambda; None without one."""


class ScheduledResources(Described):
    """The resources of the part `garbage`."""

    rules: tuple[str, ...]
    function: str


class RunResources(ScheduledResources):
    """The resources of the parts `compaction` and `maintenance`.

    `maintenance` has no engine of its own and uses that of `compaction`.
    """

    state_machine: str | None = None
    engine: Literal["emr-serverless", "emr-ec2-steps", "emr-ec2-transient"] | None = None
    application: str | None = None
    """The id of the EMR Serverless application."""
    cluster_name: str | None = None
    """The name of the clusters of EMR on EC2."""
    has_endpoint: bool = False
    """True if the part has an interface endpoint for EMR on EC2."""


class QueryResources(ServiceResources):
    url: str
    """The URL that clients in the VPC call, while the stack runs."""
    token: str
    """The ARN of the secret with the token that clients need."""
    tasks_min: int


class AccessResources(Described):
    host: str
    """The id of the EC2 instance; empty while the stack sleeps."""
    endpoints: int
    """The number of the stack's interface endpoints."""


class PauseResources(Described):
    rule: str
    queue: str
    function: str
    drain_seconds: int


class Resources(Described):
    """The resources of each deployed stack or part; None for one that is not deployed."""

    storage: StorageResources | None = None
    database: DatabaseResources | None = None
    application: ApplicationResources | None = None
    tables: TablesResources | None = None
    commit: CommitResources | None = None
    garbage: ScheduledResources | None = None
    compaction: RunResources | None = None
    maintenance: RunResources | None = None
    query: QueryResources | None = None
    access: AccessResources | None = None
    pause: PauseResources | None = None
