"""What a month of an instance costs, from its settings, before it is deployed.

Prices come from prices.toml beside this file, the use made of the instance from `Assumptions`. Nothing is
counted for NAT gateways, as a deployment has none, nor for interface endpoints but
those of the query service.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from dormouse.errors import InvalidInput
from dormouse.settings.deployment import DeploymentSettings, EmrServerlessCompaction, ServerlessDatabase
from dormouse.settings.query import FREE_DISK_GB
from dormouse.system.prices import Prices, known_regions, prices_of, vcpus

HOURS_MONTH = 730
SECONDS_MONTH = HOURS_MONTH * 3_600
ACU_LEAST = 0.5
"""The least capacity of a database that is awake."""

STARTS_MONTH = HOURS_MONTH / (7 * 24)
START_HOURS = 0.5
"""AWS starts a stopped cluster after seven days; it is awake about so long until it is stopped again."""

PROXY_ACU_LEAST = 8
QUERY_ENDPOINTS = 4
"""Two of ECR, CloudWatch Logs and Secrets Manager, each in one zone."""

QUERY_ALARMS = 4
METRICS = 15
"""Metrics that lambdas write, a lambda and instance."""


@dataclass(frozen=True)
class Assumptions:
    """What is made of the instance in a month; each is an option of `dormouse cost`."""

    requests_million: float = 1.0
    """Commit requests a month, in millions."""
    data_gb: float = 1_000.0
    """Data in the object store."""
    payload_gb: float = 0.0
    """Payloads in the object store."""
    database_gb: float = 20.0
    """The state in the database."""
    io_per_request: float = 20.0
    """Reads and writes of the database's storage for a commit request."""
    load: float = 0.25
    """The average share of the range from min_acu to max_acu that a database which is awake takes."""
    awake: float = 0.25
    """The share of the month in which a database that pauses itself is awake."""
    run_hours: float = 60.0
    """Hours a month in which Spark runs."""
    run_share: float = 0.5
    """The average share of the most vCPUs or instances that a run takes."""
    log_gb: float = 5.0
    """Logs written a month, with the flow log."""

    def __post_init__(self) -> None:
        shares = {"load", "awake", "run_share"}
        for each in fields(self):
            value = getattr(self, each.name)
            if not 0 <= value < float("inf") or (each.name in shares and value > 1):
                most = "1" if each.name in shares else "any finite number"
                raise InvalidInput(f"{each.name} = {value:g}: it must be 0 to {most}")


@dataclass(frozen=True)
class Line:
    """USD a month of one resource; `auto_paused` is None where the database does not pause itself."""

    stack: str
    resource: str
    running: float
    auto_paused: float | None
    paused: float


@dataclass(frozen=True)
class Estimate:
    region: str
    prices_of: str
    source: str
    assumptions: Assumptions
    lines: tuple[Line, ...]
    unpriced: tuple[str, ...]
    """Instance classes that the price file does not have; they count as nothing."""

    @property
    def running(self) -> float:
        return sum(line.running for line in self.lines)

    @property
    def auto_paused(self) -> float | None:
        parts = [line.auto_paused for line in self.lines]
        return None if None in parts else sum(part for part in parts if part is not None)

    @property
    def paused(self) -> float:
        return sum(line.paused for line in self.lines)


def estimate(settings: DeploymentSettings, region: str | None, assumptions: Assumptions) -> Estimate:
    """A month: running, with a database that pauses itself meanwhile, and paused by `dormouse pause`.

    Raises InvalidInput for a region whose prices are not known, or when none is given.
    """
    region = region or settings.region
    if region is None:
        raise InvalidInput(f"no region is given: use --region with one of {', '.join(known_regions())}")
    month = _Month(settings, assumptions, prices_of(region))
    lines = tuple(line for line in month.lines() if line.running or line.paused)
    return Estimate(
        region, str(month.prices.date), month.prices.source, assumptions, lines, tuple(month.unpriced)
    )


class _Month:
    def __init__(self, settings: DeploymentSettings, assumptions: Assumptions, prices: Prices) -> None:
        self.settings, self.assumed, self.prices = settings, assumptions, prices
        self.unpriced: list[str] = []

    def lines(self) -> Iterator[Line]:
        yield from self._database()
        yield from self._storage()
        yield from self._commit()
        yield from self._scheduled()
        yield from self._runs()
        yield from self._query()
        yield from self._common()
        if self.settings.monitoring is not None:
            alarms = alarm_count(self.settings)
            yield self._always("monitoring", f"{alarms} alarms", alarms * self.prices.alarm_month)
            yield self._always("monitoring", "dashboard", self.prices.dashboard_month)

    def _database(self) -> Iterator[Line]:
        database, prices, assumed = self.settings.database, self.prices, self.assumed
        instances = 1 + database.readers
        if isinstance(database, ServerlessDatabase):
            acu = max(ACU_LEAST, database.min_acu + assumed.load * (database.max_acu - database.min_acu))
            hour = instances * acu * prices.acu_hour
            least = instances * max(ACU_LEAST, database.min_acu) * prices.acu_hour
            what = f"{_times(instances)}{acu:.3g} ACU"
        else:
            price = prices.aurora_hour(database.instance_class)
            if price is None:
                self.unpriced.append(f"db.{database.instance_class}")
            hour = least = instances * (price or 0.0)
            what = f"{_times(instances)}db.{database.instance_class}"
        running = hour * HOURS_MONTH
        paused = STARTS_MONTH * START_HOURS * least
        asleep = running * assumed.awake if database.pauses_itself else None
        yield Line("database", f"Aurora, {what}", running, asleep, paused)
        storage = assumed.database_gb * prices.aurora_gb_month
        yield self._always("database", f"Aurora storage, {assumed.database_gb:g} GB", storage)
        accesses = assumed.requests_million * assumed.io_per_request
        reads_and_writes = accesses * prices.aurora_io_million
        yield self._in_use("database", f"Aurora I/O, {accesses:g} million", reads_and_writes)
        # As much as the database is free; the backups of more than a day are about as large as it is.
        if database.backup_days > 1:
            backup = assumed.database_gb * prices.aurora_backup_gb_month
            yield self._always("database", f"Aurora backups of {database.backup_days} days", backup)
        if database.proxy:
            yield self._in_use("database", "RDS Proxy", self._proxy_hour(instances) * HOURS_MONTH, stays=True)

    def _proxy_hour(self, instances: int) -> float:
        database = self.settings.database
        if isinstance(database, ServerlessDatabase):
            return (
                max(PROXY_ACU_LEAST, instances * database.max_acu * self.assumed.load)
                * self.prices.proxy_acu_hour
            )
        return instances * vcpus(database.instance_class) * self.prices.proxy_vcpu_hour

    def _storage(self) -> Iterator[Line]:
        prices, assumed = self.prices, self.assumed
        yield self._always(
            "storage", f"S3, {assumed.data_gb:g} GB of data", assumed.data_gb * prices.s3_gb_month
        )
        payloads = assumed.payload_gb * prices.s3_gb_month
        yield self._always("storage", f"S3, {assumed.payload_gb:g} GB of payloads", payloads)
        # A commit adds about one object, which a compaction and a query or two read.
        puts = assumed.requests_million * 1_000 * prices.s3_put_thousand
        gets = assumed.requests_million * 3_000 * prices.s3_get_thousand
        yield self._in_use("storage", "S3 requests", puts + gets)

    def _commit(self) -> Iterator[Line]:
        commit, prices = self.settings.commit, self.prices
        if commit is None:
            return
        requests = self.assumed.requests_million
        # Each message is sent, received and deleted, in tens; a mapping polls with five long polls of 20 s.
        polls = commit.queues * 5 * SECONDS_MONTH / 20 / 1e6
        sent = requests * 3 / 10 * prices.sqs_request_million
        yield self._in_use(
            "commit",
            f"SQS, {commit.queues} queue{'s' * (commit.queues > 1)}",
            sent + polls * prices.sqs_request_million,
        )
        batches = max(requests * 1e6 / min(commit.batch_size, 100), 1)
        cost = self._invocations(batches, 1.0, commit.memory_mb)
        yield self._in_use("commit", f"Lambda, {batches:,.0f} batches", cost)

    def _scheduled(self) -> Iterator[Line]:
        for stack, every, memory, calls in self._schedules():
            count = calls * SECONDS_MONTH / 60 / every
            yield self._in_use(stack, f"Lambda, every {every} minutes", self._invocations(count, 1.0, memory))
            if stack != "garbage":
                transitions = count * 3 + self.assumed.run_hours * 3_600 / 30 * 2
                price = transitions / 1_000 * self.prices.transition_thousand
                yield self._in_use(stack, f"Step Functions, {transitions:,.0f} transitions", price)

    def _schedules(self) -> Iterator[tuple[str, int, int, int]]:
        settings = self.settings
        if settings.garbage is not None:
            yield "garbage", settings.garbage.every_minutes, settings.garbage.memory_mb, 1
        if settings.compaction is not None:
            yield "compaction", settings.compaction.every_minutes, settings.compaction.memory_mb, 2
        if settings.maintenance is not None:
            yield "maintenance", settings.maintenance.every_minutes, settings.maintenance.memory_mb, 2

    def _invocations(self, count: float, seconds: float, memory_mb: int) -> float:
        arm = self.settings.architecture == "arm64"
        second = self.prices.lambda_arm_gb_second if arm else self.prices.lambda_x86_gb_second
        return count * (self.prices.lambda_request_million / 1e6 + seconds * memory_mb / 1_024 * second)

    def _runs(self) -> Iterator[Line]:
        compaction, assumed = self.settings.compaction, self.assumed
        if compaction is None:
            return
        if isinstance(compaction, EmrServerlessCompaction):
            used = assumed.run_hours * assumed.run_share * compaction.vcpu_max
            cost = used * self.prices.emr_vcpu_hour(self.settings.architecture)
            yield self._in_use("compaction", f"EMR Serverless, {used:,.0f} vCPU hours", cost)
            return
        kind = compaction.instance_types[0]
        price = self.prices.ec2_hour(kind)
        if price is None:
            self.unpriced.append(kind)
        # The primary node comes on top; a cluster that waits for steps idles after each run.
        nodes = 1 + max(1.0, assumed.run_share * compaction.instances_max)
        disk = 64 * self.prices.ebs_gb_month / HOURS_MONTH
        cost = assumed.run_hours * nodes * ((price or 0.0) + disk)
        yield self._in_use("compaction", f"EMR on EC2, {nodes:.3g} × {kind}", cost)

    def _query(self) -> Iterator[Line]:
        """With as many tasks as there are at least, and a load balancer that has little to do."""
        query, prices = self.settings.query, self.prices
        if query is None:
            return
        hour = prices.fargate_hour(self.settings.architecture, query.cpu, query.memory_mb)
        hour += (query.disk_gb - FREE_DISK_GB) * prices.fargate_disk_gb_hour
        size = f"{query.cpu / 1_024:g} vCPU, {query.memory_gb:g} GB"
        tasks = query.tasks_min * hour * HOURS_MONTH
        yield self._in_use("query", f"Fargate, {query.tasks_min} × {size}", tasks)
        balancer = (prices.balancer_hour + prices.lcu_hour) * HOURS_MONTH
        yield self._in_use("query", "load balancer, with one capacity unit", balancer)
        if query.endpoints != "existing":
            endpoints = QUERY_ENDPOINTS * prices.endpoint_hour * HOURS_MONTH
            yield self._in_use("query", f"{QUERY_ENDPOINTS} interface endpoints", endpoints)
        yield self._always("query", "private hosted zone, its name", prices.zone_month)
        yield self._always("query", "Secrets Manager, its token", prices.secret_month)

    def _common(self) -> Iterator[Line]:
        prices, assumed = self.prices, self.assumed
        keys = key_count(self.settings)
        yield self._always("all", f"{keys} KMS keys", keys * prices.kms_key_month)
        # Bucket keys and data key reuse leave about one request for a hundred uses.
        kms = assumed.requests_million * 100 / 100 * prices.kms_request_ten_thousand
        yield self._in_use("all", "KMS requests", kms)
        yield self._always("all", "Secrets Manager, the master password", prices.secret_month)
        yield self._in_use(
            "all", f"CloudWatch logs, {assumed.log_gb:g} GB written", assumed.log_gb * prices.log_gb
        )
        kept = assumed.log_gb * prices.log_gb_month * self.settings.database.log_days / 30
        yield self._always("all", "CloudWatch logs kept", kept)
        if self.settings.commit or self.settings.compaction:
            metrics = METRICS * prices.metric_month
            yield self._in_use("all", f"{METRICS} CloudWatch metrics", metrics)

    def _always(self, stack: str, resource: str, usd: float) -> Line:
        return Line(stack, resource, usd, usd if self.settings.database.pauses_itself else None, usd)

    def _in_use(self, stack: str, resource: str, usd: float, *, stays: bool = False) -> Line:
        """What a paused instance does not need; the proxy `stays`, as nothing takes it away."""
        auto = usd if self.settings.database.pauses_itself else None
        return Line(stack, resource, usd, auto, usd if stays else 0.0)


def key_count(settings: DeploymentSettings) -> int:
    """The customer managed KMS keys of the instance."""
    return 2 + (settings.monitoring is not None)


def alarm_count(settings: DeploymentSettings) -> int:
    """About how many alarms the monitoring stack makes."""
    queues = settings.commit.queues if settings.commit else 0
    lambdas = (settings.commit, settings.garbage, settings.pause)
    runs = (settings.compaction, settings.maintenance)
    parts = 2 * sum(part is not None for part in lambdas) + 4 * sum(part is not None for part in runs)
    query = QUERY_ALARMS if settings.query is not None else 0
    return 5 + isinstance(settings.database, ServerlessDatabase) + 2 * queues + parts + query


def _times(count: int) -> str:
    return "" if count == 1 else f"{count} × "
