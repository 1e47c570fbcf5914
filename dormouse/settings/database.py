"""The settings of the database, of commits, of the query service and of compaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from dormouse.settings.section import (
    VISIBILITY_FACTOR,
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
"""The memory sizes in GB that Fargate allows for each CPU size."""

FREE_DISK_GB = 20
"""The disk of every task in GB, which costs nothing extra. Fargate accepts no smaller number."""

IDLE_SECONDS_MAX = 4_000
"""The longest time, in seconds, for which a load balancer keeps a silent connection."""

FIRST_ROW_SPARE_SECONDS = 60


class QuerySettings(Section):
    """The query service: `dormouse serve` on Fargate, behind an internal load balancer."""

    cpu: Literal[256, 512, 1024, 2048, 4096, 8192, 16384] = setting(1024)
    """The CPU of a task; 1024 is one virtual CPU."""

    memory_gb: float = setting(4, ge=0.5, le=120)
    """The memory of a task, in GB. Fargate allows certain sizes for each CPU: with cpu = 1024, 2 to 8."""

    disk_gb: int = setting(FREE_DISK_GB, ge=FREE_DISK_GB, le=200)
    """The disk of a task, in GB, to which sorts and joins spill. The first 20 GB are free."""

    tasks_min: int = setting(1, ge=1, le=100)
    """The least number of tasks. With 2, one task may fail and no query is refused."""

    tasks_max: int = setting(4, ge=1, le=100)
    """The largest number of tasks, under load."""

    cpu_percent: int = setting(60, ge=10, le=90)
    """The average CPU, in percent, above which tasks are added and below which they are removed."""

    requests_minute: int = setting(600, ge=1, le=1_000_000)
    """The number of requests a minute that one task takes before another is added."""

    queries_max: int = setting(16, ge=1, le=1_000)
    """The number of queries that one task runs at once. More queries wait for some seconds. Then the task
    refuses them, and clients can retry later."""

    rows_max: int | None = setting(None, ge=1)
    """The largest number of rows of one answer. Left out, there is no limit."""

    bytes_max: int | None = setting(None, ge=1)
    """The largest number of bytes of one answer. Left out, there is no limit."""

    seconds_max: int = setting(300, ge=1, le=3_600)
    """The time in seconds that one query and its answer may take. A task that is stopped waits for its
    answers for the same time."""

    client_cidrs: tuple[ClientCidr, ...] = setting((), strict=False)
    """The private networks whose machines may call the service; other addresses may not."""

    client_security_groups: tuple[SecurityGroupId, ...] = setting((), strict=False)
    """The security groups whose machines may call the service."""

    certificate_arn: str | None = setting(None, pattern=pattern("certificate"))
    """A certificate in ACM for `host`. With it, clients use HTTPS, otherwise HTTP within the VPC."""

    host: str | None = setting(None, change="replacement", pattern=pattern("host"))
    """The host name by which clients in the VPC call the service. Left out, it is
    `query.<id>.dormouse.internal`."""

    image: str | None = setting(None, pattern=pattern("image"))
    """An existing image in ECR. Left out, a deploy builds one with Docker and uploads it."""

    endpoints: Literal["create", "existing"] | None = setting(None)
    """The interface endpoints that tasks need for ECR, CloudWatch Logs and Secrets Manager: `create` them, or
    use `existing` ones. `create` is the default in the instance's own VPC. In an existing VPC, which all its
    machines share, the choice is required."""

    log_days: Literal[7, 14, 30, 60, 90, 180, 365] = setting(30)
    """The number of days that the log of the service is kept."""

    @property
    def memory_mb(self) -> int:
        return round(self.memory_gb * 1_024)

    @property
    def idle_seconds(self) -> int:
        """The time in seconds for which the load balancer keeps a silent connection.

        A connection is silent before the first row of an answer.
        """
        return min(IDLE_SECONDS_MAX, self.seconds_max + FIRST_ROW_SPARE_SECONDS)

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return 443 if self.certificate_arn else 80

    def host_of(self, instance_id: str) -> str:
        return self.host or f"query.{instance_id}.dormouse.internal"

    def url(self, instance_id: str) -> str:
        return f"{'https' if self.certificate_arn else 'http'}://{self.host_of(instance_id)}"

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if trouble := _size_problem("cpu", self.cpu, self.memory_gb):
            yield "memory_gb", trouble
        if self.tasks_max < self.tasks_min:
            yield "tasks_max", f"it must be tasks_min or more, which is {self.tasks_min}"
        if self.certificate_arn is not None and self.host is None:
            yield "certificate_arn", "it is for a name: give that as host"
        yield from client_problems(self.client_cidrs, self.client_security_groups)


def _size_problem(name: str, cpu: int, memory_gb: float) -> str | None:
    """Returns why Fargate has no task of this size, or None. `name` is the name of the setting of the CPU."""
    fitting = CPU_MEMORY_GB[cpu]
    return None if memory_gb in fitting else f"with {name} = {cpu} Fargate has {_listed(fitting)}"


def _listed(sizes: tuple[float, ...]) -> str:
    texts = [f"{size:g}" for size in sizes]
    if len(texts) > 3:
        step = sizes[1] - sizes[0]
        return f"{texts[0]} to {texts[-1]} GB of memory" + (f", in steps of {step:g}" if step > 1 else "")
    return f"{', '.join(texts[:-1])} or {texts[-1]} GB of memory"


# The settings of commits.

RECEIVES_LEAST = 50
COMMIT_THREADS = 4
"""The number of batches that the commit service applies at once, and the least number of its threads."""

_OF_SERVICE = {"endpoints", "image", "log_days", "service_cpu", "service_memory_gb"}


class CommitSettings(Section):
    """The commit queues, and the lambda or the service that applies commit requests."""

    queues: int = setting(1, ge=1, le=16)
    """The number of queues over which the tables are spread. The queues must be empty before you change
    it."""

    concurrency: int = setting(10, ge=2, le=1_000)
    """The largest number of lambdas that work on one queue at once."""

    batch_size: int = setting(500, ge=1, le=10_000)
    """The largest number of requests that a lambda gets at once."""

    batching_window_seconds: int = setting(1, ge=0, le=300)
    """The time in seconds for which a batch is collected. It must be at least 1 if batch_size is more than
    10."""

    memory_mb: MemoryMb = setting(1_024)
    """The memory of the lambda, which also sets its share of a CPU."""

    timeout_seconds: TimeoutSeconds = setting(60)
    """The time in seconds that the lambda may work on a batch. SQS delivers the messages of a failed batch
    again after six times that time."""

    receives_max: int = setting(RECEIVES_LEAST, ge=RECEIVES_LEAST, le=1_000)
    """The number of deliveries after which a message becomes a dead letter. Until then, a request can wait
    for its inputs."""

    retention_days: int = setting(14, ge=1, le=14)
    """The number of days that SQS keeps messages, even while the instance is paused."""

    service: bool = setting(False)
    """A long-running committer on Fargate in place of the lambda. It also runs `dormouse maintain`. The
    lambda stays, but the queues do not call it."""

    service_cpu: Literal[256, 512, 1024, 2048, 4096, 8192, 16384] = setting(1024)
    """The CPU of the service's task; 1024 is one virtual CPU."""

    service_memory_gb: float = setting(4, ge=0.5, le=120)
    """The memory of the service's task, in GB. Fargate allows certain sizes for each CPU: with service_cpu =
    1024, 2 to 8."""

    image: str | None = setting(None, pattern=pattern("image"))
    """An existing image in ECR for the service. Left out, it is `query.image`, or a deploy builds one with
    Docker."""

    endpoints: Literal["create", "existing"] | None = setting(None)
    """The interface endpoints that the service needs for SQS, ECR and CloudWatch Logs: `create` them, or use
    `existing` ones. `create` is the default in the instance's own VPC. In an existing VPC, which all its
    machines share, the choice is required. The query service and this service share endpoints."""

    log_days: Literal[7, 14, 30, 60, 90, 180, 365] = setting(30)
    """The number of days that the log of the service is kept."""

    @property
    def service_memory_mb(self) -> int:
        return round(self.service_memory_gb * 1_024)

    @property
    def visibility_seconds(self) -> int:
        """The time in seconds for which SQS hides a message after a lambda has received it."""
        return VISIBILITY_FACTOR * self.timeout_seconds + self.batching_window_seconds

    def contradictions(self) -> Iterator[tuple[str, str]]:
        for name in () if self.service else sorted(_OF_SERVICE & self.model_fields_set):
            yield name, "it is for the service: set service = true, or leave it out"
        if trouble := _size_problem("service_cpu", self.service_cpu, self.service_memory_gb):
            yield "service_memory_gb", trouble
        if self.batch_size > 10 and self.batching_window_seconds == 0:
            yield "batching_window_seconds", "it must be 1 or more when batch_size is more than 10"
        hidden = self.visibility_seconds
        most = self.retention_days * 86_400 // hidden
        if most < RECEIVES_LEAST:
            longest = self.retention_days * 86_400 // RECEIVES_LEAST - self.batching_window_seconds
            longest //= VISIBILITY_FACTOR
            why = (
                f"it must be {longest} at most with retention_days = {self.retention_days}, "
                f"for {RECEIVES_LEAST} tries of a message"
            )
            yield "timeout_seconds", why
        elif self.receives_max > most:
            why = (
                f"it must be {most} at most: each try hides a message for {hidden:,} s "
                f"({VISIBILITY_FACTOR} × timeout_seconds and the window), which retention_days must cover"
            )
            yield "receives_max", why


# The settings of compaction, one model for each engine that Spark runs on.

INSTANCE_TYPES_MAX = 5
"""The largest number of instance types in a fleet of EMR."""


ADDRESSES_OF_OTHERS = 32
"""The addresses that are left for lambdas, databases, tasks and endpoints."""


def addresses_of(prefix_bits: int) -> int:
    """Returns the number of addresses of a subnet that instances can use: AWS keeps five."""
    return int(2 ** (32 - prefix_bits)) - 5


def addresses_of_zone(cidr: str) -> int:
    """Returns that number for the subnet of a zone in the own VPC, a quarter of the VPC's network."""
    return addresses_of(int(cidr.rpartition("/")[2]) + 2)


class _Compaction(Section):
    release: Literal["emr-spark-8.0.0", "emr-spark-8.1.0"] = setting("emr-spark-8.0.0")
    """The release of EMR: with Spark 4.0 (`emr-spark-8.0.0`), or Spark 4.1 (`emr-spark-8.1.0`). Other
    releases do not have the Python and Spark that Dormouse is tested with. A running cluster keeps its
    release until it ends."""

    every_minutes: EveryMinutes = setting(15)
    """The pause in minutes between two rounds that make compaction jobs."""

    jobs_max: int = setting(20_000, ge=1, le=100_000)
    """The largest number of jobs of one run."""

    run_minutes_max: int = setting(360, ge=10, le=2_880)
    """The time in minutes after which a run is cancelled. Jobs that it has finished stay finished."""

    memory_mb: MemoryMb = setting(1_024)
    """The memory of the lambdas."""

    timeout_seconds: TimeoutSeconds = setting(300)
    """The time in seconds that the lambda may take to make jobs."""

    log_days: Literal[7, 14, 30, 60, 90, 180, 365] = setting(30)
    """The number of days that the logs of runs are kept."""


class EmrServerlessCompaction(_Compaction):
    """Compaction on EMR Serverless."""

    engine: Literal["emr-serverless"] = setting(change="replacement")
    """`emr-serverless`, `emr-ec2-steps` or `emr-ec2-transient`."""

    vcpu_max: int = setting(64, ge=4, le=4_000)
    """The largest number of virtual CPUs of the application at once. Its memory and disk follow from this
    number."""

    idle_minutes: int = setting(5, ge=1, le=10_080)
    """The time in minutes without a run after which the application stops."""

    worker_vcpu: Literal[1, 2, 4, 8, 16] = setting(4)
    """The number of virtual CPUs of each executor. An executor has 4 GB of memory for each CPU."""

    @property
    def machines_max(self) -> int:
        """The largest number of workers at once. Each has an address in one of the subnets."""
        return self.vcpu_max // self.worker_vcpu

    def address_problems(self, cidr: str, zones: int) -> Iterator[tuple[str, str]]:
        free = zones * addresses_of_zone(cidr) - ADDRESSES_OF_OTHERS
        if self.machines_max > free:
            yield (
                "vcpu_max",
                f"its {self.machines_max:,} workers need an address each, and {cidr} has {free:,} for them: "
                f"choose at most {free * self.worker_vcpu:,}, a larger worker_vcpu, or a larger network.cidr",
            )

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.vcpu_max < 2 * self.worker_vcpu:
            yield "vcpu_max", f"it must be at least twice worker_vcpu, which is {self.worker_vcpu}"


class _Ec2Compaction(_Compaction):
    instance_types: tuple[InstanceClass, ...] = setting(
        ("m7g.xlarge", "m6g.xlarge"), strict=False, min_length=1
    )
    """Up to five instance types of the cluster, the preferred one first. They must have the instance's
    architecture."""

    instances_max: int = setting(10, ge=1, le=500)
    """The largest number of core instances."""

    endpoints: Literal["create", "existing"] | None = setting(None)
    """The interface endpoint by which EMR controls clusters, `emr-service-cell01`: `create` it, or use an
    `existing` one. `create` is the default in the instance's own VPC. In an existing VPC, which all its
    machines share, the choice is required."""

    @property
    def machines_max(self) -> int:
        """The largest number of instances of a cluster, with its primary one. All are in one subnet."""
        return self.instances_max + 1

    def address_problems(self, cidr: str, zones: int) -> Iterator[tuple[str, str]]:
        if self.machines_max > (each := addresses_of_zone(cidr)):
            yield (
                "instances_max",
                f"a cluster is in one subnet, and those of {cidr} have {each:,} addresses each: "
                f"choose at most {each - 1:,}, or a larger network.cidr",
            )

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if len(set(self.instance_types)) < len(self.instance_types):
            yield "instance_types", "each may be listed only once"
        if len(self.instance_types) > INSTANCE_TYPES_MAX:
            yield "instance_types", f"EMR accepts at most {INSTANCE_TYPES_MAX}"
        if storing := [one for one in self.instance_types if has_instance_store(one)]:
            yield (
                "instance_types",
                f"{', '.join(storing)}: the disks of such an instance are encrypted with KMS, which this "
                "network does not reach; choose a type without disks, like m7g.xlarge",
            )


class EmrStepsCompaction(_Ec2Compaction):
    """Compaction as steps on a cluster that scales with the load and ends when it is idle."""

    engine: Literal["emr-ec2-steps"] = setting(change="replacement")
    """`emr-serverless`, `emr-ec2-steps` or `emr-ec2-transient`."""

    idle_minutes: int = setting(15, ge=1, le=10_080)
    """The time in minutes without a step after which the cluster ends."""


class EmrTransientCompaction(_Ec2Compaction):
    """Compaction on a new cluster for each run."""

    engine: Literal["emr-ec2-transient"] = setting(change="replacement")
    """`emr-serverless`, `emr-ec2-steps` or `emr-ec2-transient`."""


CompactionSettings = Annotated[
    EmrServerlessCompaction | EmrStepsCompaction | EmrTransientCompaction, Field(discriminator="engine")
]


WINDOW_MINUTES_MIN = 30
DAY_MINUTES = 24 * 60
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def _window_problems(backup: str | None, maintenance: str | None) -> Iterator[tuple[str, str]]:
    """Yields the settings of windows that AWS would refuse, each with the reason.

    A window that AWS chooses could overlap with a given one, so both must be given or none.
    """
    if backup is None or maintenance is None:
        if backup != maintenance:
            name = "backup_window" if backup is None else "maintenance_window"
            yield name, "give both backup_window and maintenance_window, or neither"
        return
    (daily, daily_minutes), (weekly, weekly_minutes) = _window(backup), _window(maintenance)
    if daily_minutes < WINDOW_MINUTES_MIN:
        yield "backup_window", f"it must be at least {WINDOW_MINUTES_MIN} minutes long"
    if not WINDOW_MINUTES_MIN <= weekly_minutes < DAY_MINUTES:
        yield (
            "maintenance_window",
            f"it must be at least {WINDOW_MINUTES_MIN} minutes long, and less than a day",
        )
    elif any(
        start < weekly + weekly_minutes and weekly < start + daily_minutes
        for start in (daily + day * DAY_MINUTES for day in range(-1, 9))
    ):
        yield "maintenance_window", f"it overlaps with backup_window, which is {backup} each day"


def _window(text: str) -> tuple[int, int]:
    """Returns the start of a window, in minutes since the day or week began, and its length in minutes."""
    start, end = (one.split(":") for one in text.split("-"))
    period = DAY_MINUTES if len(start) == 2 else 7 * DAY_MINUTES
    first, last = (
        (_DAYS.index(parts[0]) * DAY_MINUTES if len(parts) == 3 else 0) + int(parts[-2]) * 60 + int(parts[-1])
        for parts in (start, end)
    )
    return first, (last - first) % period


class _Database(Section):
    engine_version: str = setting("17.7", pattern=pattern("engine_version"))
    """The version of Aurora PostgreSQL. It must not be older than the version that automatic upgrades have
    reached, nor older than that of a new `snapshot`."""

    minor_upgrades: bool = setting(True)
    """Automatic upgrades by AWS to later minor versions, in the weekly maintenance window."""

    backup_days: int = setting(7, ge=1, le=35)
    """The number of days that a restore of the database alone can go back. For the whole instance, see
    storage.restore_days."""

    backup_window: str | None = setting(None, pattern=pattern("backup_window"))
    """The time of each day, in UTC, in which AWS takes the backup: at least 30 minutes. Left out, AWS chooses
    both windows."""

    maintenance_window: str | None = setting(None, pattern=pattern("maintenance_window"))
    """The time of the week, in UTC, in which AWS may upgrade and restart the database: at least 30 minutes,
    less than a day, and outside `backup_window`."""

    storage: Literal["standard", "io-optimized"] = setting("standard")
    """`io-optimized` makes I/O free, but capacity costs 30 % more and storage 2.25 times as much. AWS changes
    to it once in 30 days, and back at any time. Clusters that only index row tables stay `standard`."""

    insights: bool = setting(False)
    """Performance Insights, which CloudWatch shows as Database Insights in standard mode. Its values are kept
    for 7 days at no cost. It can keep the capacity of a serverless database above `min_acu`."""

    idle_session_seconds: int = setting(300, ge=60, le=86_400)
    """The time in seconds after which the server ends an idle session."""

    log_days: Literal[7, 14, 30, 60, 90, 180, 365] = setting(30)
    """The number of days that the database's log is kept in CloudWatch."""

    readers: int = setting(0, ge=0, le=15)
    """The number of read replicas, one of which takes over when the writer fails."""

    key_arn: str | None = setting(None, change="replacement", pattern=pattern("key"))
    """An existing KMS key, whose policy leaves its use to IAM. Left out, the database gets its own key."""

    snapshot: str | None = setting(None, change="replacement", pattern=pattern("snapshot"))
    """The ARN of a snapshot from which the cluster is created. Keep the setting as long as the cluster
    exists."""

    proxy: bool = setting(False)
    """An RDS Proxy in front of the database. Its connections keep a serverless database awake."""

    client_security_groups: tuple[SecurityGroupId, ...] = setting((), strict=False)
    """The security groups, of this VPC or one peered with it, whose machines may connect to the database."""

    client_cidrs: tuple[ClientCidr, ...] = setting((), strict=False)
    """The private networks whose machines may connect to the database, for example of peered VPCs or behind a
    VPN. Other addresses may not."""

    @property
    def pause_after_seconds(self) -> int | None:
        """The time in seconds without connections after which the database pauses; None if it never does."""
        return None

    def contradictions(self) -> Iterator[tuple[str, str]]:
        yield from client_problems(self.client_cidrs, self.client_security_groups)
        yield from _window_problems(self.backup_window, self.maintenance_window)

    @property
    def pauses_itself(self) -> bool:
        return self.pause_after_seconds is not None


class ServerlessDatabase(_Database):
    """Aurora Serverless v2, whose capacity follows the load."""

    kind: Literal["serverless"] = setting()
    """`serverless` or `fixed`."""

    min_acu: Annotated[Acu, Field(ge=0)] = setting(0)
    """The least capacity, in ACU. With 0, the database pauses when no client is connected."""

    max_acu: Annotated[Acu, Field(ge=1)] = setting(4)
    """The largest capacity, in ACU."""

    auto_pause_seconds: int | None = setting(None, ge=300, le=86_400)
    """The time in seconds without connections after which the database pauses. Left out, it is 300. The
    setting needs min_acu = 0."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super().contradictions()
        if self.max_acu <= self.min_acu:
            yield "max_acu", f"it must be more than min_acu, which is {self.min_acu:g}"
        if self.min_acu > 0 and self.auto_pause_seconds is not None:
            yield "auto_pause_seconds", f"it needs min_acu = 0, which is {self.min_acu:g}"
        if self.min_acu == 0 and self.proxy:
            yield "proxy", "it keeps the database awake: set min_acu to 0.5 or more, or proxy to false"

    @property
    def pause_after_seconds(self) -> int | None:
        return (self.auto_pause_seconds or 300) if self.min_acu == 0 else None


class FixedDatabase(_Database):
    """Aurora with instances of a fixed size."""

    kind: Literal["fixed"] = setting()
    """`serverless` or `fixed`."""

    instance_class: InstanceClass = setting("r8g.large")
    """The class of the writer and the readers, without `db.`"""


DatabaseSettings = Annotated[ServerlessDatabase | FixedDatabase, Field(discriminator="kind")]
