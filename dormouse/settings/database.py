"""The settings of the database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from dormouse.settings.section import (
    Acu,
    ClientCidr,
    EveryMinutes,
    InstanceClass,
    MemoryMb,
    Section,
    SecurityGroupId,
    TimeoutSeconds,
    client_problems,
    has_instance_store,
    pattern,
    setting,
)

# The settings of the query service.

CPU_MEMORY_GB = {
    256: (0.5, 1, 2),
    512: tuple(range(1, 5)),
    1_024: tuple(range(2, 9)),
    2_048: tuple(range(4, 17)),
    4_096: tuple(range(8, 31)),
    8_192: tuple(range(16, 61, 4)),
    16_384: tuple(range(32, 121, 8)),
}
"""Which memory goes with which CPU on Fargate."""

FREE_DISK_GB = 20
"""What every task has; Fargate takes no smaller number."""

IDLE_SECONDS_MAX = 4_000
"""Of a load balancer."""

FIRST_ROW_SPARE_SECONDS = 60


class QuerySettings(Section):
    """The query service: `dormouse serve` on Fargate, behind an internal load balancer."""

    cpu: Literal[256, 512, 1024, 2048, 4096, 8192, 16384] = setting(1024)
    """The CPU of a task; 1024 is one virtual CPU."""

    memory_gb: float = setting(4, ge=0.5, le=120)
    """The memory of a task. Fargate says which goes with which CPU: with cpu = 1024, 2 to 8."""

    disk_gb: int = setting(FREE_DISK_GB, ge=FREE_DISK_GB, le=200)
    """The disk of a task, where sorts and joins spill; 20 are free."""

    tasks_min: int = setting(1, ge=1, le=100)
    """How many tasks run at least; with 2 one may be lost without a query being refused."""

    tasks_max: int = setting(4, ge=1, le=100)
    """How many tasks run at most, when there is much to do."""

    cpu_percent: int = setting(60, ge=10, le=90)
    """The average CPU at which tasks are added, and below which they are taken away."""

    requests_minute: int = setting(600, ge=1, le=1_000_000)
    """How many requests a minute one task takes before another is added."""

    queries_max: int = setting(16, ge=1, le=1_000)
    """How many queries one task runs at once; more wait for some seconds, then are told to come later."""

    rows_max: int | None = setting(None, ge=1)
    """The most rows of one answer; left out, as many as there are."""

    bytes_max: int | None = setting(None, ge=1)
    """The most bytes of one answer; left out, as many as there are."""

    seconds_max: int = setting(300, ge=1, le=3_600)
    """How long one query may take, with its answer; tasks that end let answers end for as long."""

    client_cidrs: tuple[ClientCidr, ...] = setting((), strict=False)
    """The private networks whose machines may call it, at any address within. No others may."""

    client_security_groups: tuple[SecurityGroupId, ...] = setting((), strict=False)
    """The security groups whose machines may call it."""

    certificate_arn: str | None = setting(None, pattern=pattern("certificate"))
    """A certificate in ACM for `host`: clients speak HTTPS then, else HTTP within the VPC."""

    host: str | None = setting(None, change="replacement", pattern=pattern("host"))
    """The name by which clients in the VPC call it; `query.<id>.dormouse.internal` if left out."""

    image: str | None = setting(None, pattern=pattern("image"))
    """An image in ECR that is there already; left out, a deploy builds one with Docker and uploads it."""

    endpoints: Literal["create", "existing"] | None = setting(None)
    """Whether the VPC gets the interface endpoints that tasks need, or has a way to ECR, CloudWatch Logs and
    Secrets Manager. `create` in an own VPC. An existing one needs a word: all in it would use them."""

    log_days: Literal[7, 14, 30, 60, 90, 180, 365] = setting(30)
    """How long the log of the service is kept."""

    @property
    def memory_mb(self) -> int:
        return round(self.memory_gb * 1_024)

    @property
    def idle_seconds(self) -> int:
        """How long the load balancer lets a connection be silent, as before the first row."""
        return min(IDLE_SECONDS_MAX, self.seconds_max + FIRST_ROW_SPARE_SECONDS)

    @property
    def port(self) -> int:
        """Where clients connect to."""
        return 443 if self.certificate_arn else 80

    def host_of(self, instance_id: str) -> str:
        return self.host or f"query.{instance_id}.dormouse.internal"

    def url(self, instance_id: str) -> str:
        return f"{'https' if self.certificate_arn else 'http'}://{self.host_of(instance_id)}"

    def contradictions(self) -> Iterator[tuple[str, str]]:
        fitting = CPU_MEMORY_GB[self.cpu]
        if self.memory_gb not in fitting:
            yield "memory_gb", f"with cpu = {self.cpu} Fargate has {_listed(fitting)}"
        if self.tasks_max < self.tasks_min:
            yield "tasks_max", f"it must be tasks_min or more, which is {self.tasks_min}"
        if self.certificate_arn is not None and self.host is None:
            yield "certificate_arn", "it is for a name: give that as host"
        yield from client_problems(self.client_cidrs, self.client_security_groups)


def _listed(sizes: tuple[float, ...]) -> str:
    texts = [f"{size:g}" for size in sizes]
    if len(texts) > 3:
        step = sizes[1] - sizes[0]
        return f"{texts[0]} to {texts[-1]} GB of memory" + (f", in steps of {step:g}" if step > 1 else "")
    return f"{', '.join(texts[:-1])} or {texts[-1]} GB of memory"


# The settings of compaction, one model for each engine that Spark runs on.

INSTANCE_TYPES_MAX = 5
"""Of a fleet of EMR."""


class _Compaction(Section):
    every_minutes: EveryMinutes = setting(15)
    """How often compaction jobs are made."""

    jobs_max: int = setting(20_000, ge=1, le=100_000)
    """How many jobs one run gets at most."""

    run_minutes_max: int = setting(360, ge=10, le=2_880)
    """After how long a run is cancelled; what it finished stays finished."""

    memory_mb: MemoryMb = setting(1_024)
    """The memory of the lambdas."""

    timeout_seconds: TimeoutSeconds = setting(300)
    """How long the lambda may take to make jobs."""

    log_days: Literal[7, 14, 30, 60, 90, 180, 365] = setting(30)
    """How long the logs of runs are kept."""


class EmrServerlessCompaction(_Compaction):
    """Compaction on EMR Serverless."""

    engine: Literal["emr-serverless"] = setting(change="replacement")
    """`emr-serverless`, `emr-ec2-steps` or `emr-ec2-transient`."""

    vcpu_max: int = setting(64, ge=4, le=4_000)
    """The most virtual CPUs of the application at once; memory and disk follow from it."""

    idle_minutes: int = setting(5, ge=1, le=10_080)
    """After how long without a run the application stops itself."""

    worker_vcpu: Literal[1, 2, 4, 8, 16] = setting(4)
    """The virtual CPUs of each executor, with 4 GB of memory to each."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.vcpu_max < 2 * self.worker_vcpu:
            yield "vcpu_max", f"it must be at least twice worker_vcpu, which is {self.worker_vcpu}"


class _Ec2Compaction(_Compaction):
    instance_types: tuple[InstanceClass, ...] = setting(
        ("m7g.xlarge", "m6g.xlarge"), strict=False, min_length=1
    )
    """Up to five instance types of the cluster, the most wanted first, of the instance's architecture."""

    instances_max: int = setting(10, ge=1, le=500)
    """The most core instances."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if len(set(self.instance_types)) < len(self.instance_types):
            yield "instance_types", "each must be there only once"
        if len(self.instance_types) > INSTANCE_TYPES_MAX:
            yield "instance_types", f"EMR takes {INSTANCE_TYPES_MAX} at most"
        if storing := [one for one in self.instance_types if has_instance_store(one)]:
            yield (
                "instance_types",
                f"{', '.join(storing)}: the disks of such an instance are encrypted with KMS, which the "
                "network does not reach; take a type without, like m7g.xlarge",
            )


class EmrStepsCompaction(_Ec2Compaction):
    """Compaction as steps on a cluster that scales, and ends when it is idle."""

    engine: Literal["emr-ec2-steps"] = setting(change="replacement")
    """`emr-serverless`, `emr-ec2-steps` or `emr-ec2-transient`."""

    idle_minutes: int = setting(15, ge=1, le=10_080)
    """After how long without a step the cluster ends."""


class EmrTransientCompaction(_Ec2Compaction):
    """Compaction on a cluster of its own for each run."""

    engine: Literal["emr-ec2-transient"] = setting(change="replacement")
    """`emr-serverless`, `emr-ec2-steps` or `emr-ec2-transient`."""


CompactionSettings = Annotated[
    EmrServerlessCompaction | EmrStepsCompaction | EmrTransientCompaction, Field(discriminator="engine")
]


class _Database(Section):
    engine_version: str = setting("17.7", pattern=pattern("engine_version"))
    """The version of Aurora PostgreSQL; a change must not go back behind what minor_upgrades have brought,
    and a new `snapshot` must not be of a later one."""

    minor_upgrades: bool = setting(True)
    """Whether AWS upgrades it to later minor versions by itself, in the weekly window for maintenance."""

    backup_days: int = setting(7, ge=1, le=35)
    """How far back the database alone can be restored; all of the instance, storage.restore_days."""

    idle_session_seconds: int = setting(300, ge=60, le=86_400)
    """After how long the server ends a session that does nothing."""

    log_days: Literal[7, 14, 30, 60, 90, 180, 365] = setting(30)
    """How long the database's log is kept in CloudWatch."""

    readers: int = setting(0, ge=0, le=15)
    """Read replicas, which also take over when the writer fails."""

    key_arn: str | None = setting(None, change="replacement", pattern=pattern("key"))
    """An existing KMS key, whose policy leaves its use to IAM; left out, one of its own."""

    snapshot: str | None = setting(None, change="replacement", pattern=pattern("snapshot"))
    """A snapshot that the cluster is made from, by its ARN; keep the setting as long as the cluster."""

    proxy: bool = setting(False)
    """An RDS Proxy in front; its connections keep a serverless database awake."""

    client_security_groups: tuple[SecurityGroupId, ...] = setting((), strict=False)
    """Security groups, of this VPC or one peered with it, whose machines may connect."""

    client_cidrs: tuple[ClientCidr, ...] = setting((), strict=False)
    """Private networks whose machines may connect: of peered VPCs, say, or behind a VPN. No others may."""

    @property
    def pause_after_seconds(self) -> int | None:
        """After how long without connections it pauses itself; None when it never does."""
        return None

    def contradictions(self) -> Iterator[tuple[str, str]]:
        yield from client_problems(self.client_cidrs, self.client_security_groups)

    @property
    def pauses_itself(self) -> bool:
        return self.pause_after_seconds is not None


class ServerlessDatabase(_Database):
    """Aurora Serverless v2: capacity follows the load."""

    kind: Literal["serverless"] = setting()
    """`serverless`, or `fixed`."""

    min_acu: Annotated[Acu, Field(ge=0)] = setting(0)
    """The least capacity; with 0 the database pauses itself when no client is connected."""

    max_acu: Annotated[Acu, Field(ge=1)] = setting(4)
    """The most capacity."""

    auto_pause_seconds: int | None = setting(None, ge=300, le=86_400)
    """After how long without connections it pauses itself; 300 if left out, and only with min_acu = 0."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super().contradictions()
        if self.max_acu <= self.min_acu:
            yield "max_acu", f"it must be more than min_acu, which is {self.min_acu:g}"
        if self.min_acu > 0 and self.auto_pause_seconds is not None:
            yield "auto_pause_seconds", f"it goes with min_acu = 0 only, which is {self.min_acu:g}"
        if self.min_acu == 0 and self.proxy:
            yield "proxy", "it keeps the database awake: set min_acu to 0.5 or more, or proxy to false"

    @property
    def pause_after_seconds(self) -> int | None:
        return (self.auto_pause_seconds or 300) if self.min_acu == 0 else None


class FixedDatabase(_Database):
    """Aurora with instances of a fixed size."""

    kind: Literal["fixed"] = setting()
    """`serverless`, or `fixed`."""

    instance_class: InstanceClass = setting("r8g.large")
    """The class of the writer and the readers, without `db.`"""


DatabaseSettings = Annotated[ServerlessDatabase | FixedDatabase, Field(discriminator="kind")]
