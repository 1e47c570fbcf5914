"""What a month of an instance costs, from its settings, before it is deployed; and an hour, as it is now.

Prices come from prices.toml beside this file, the use made of the instance from `Assumptions`. Nothing is
counted for NAT gateways, as a deployment has none, nor for interface endpoints but
those of the query service and of the host for access.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from dormouse.errors import InvalidInput
from dormouse.settings.database import FREE_DISK_GB, EmrServerlessCompaction, ServerlessDatabase
from dormouse.settings.deployment import ACCESS_HOST, DISK_GB, DeploymentSettings
from dormouse.settings.resources import Resources

HOURS_MONTH = 730
EMR_OF_FARGATE = 1.3
"""What EMR Serverless costs by the price of Fargate: see prices.toml."""

# How much of a `large` a size is; `metal` is priced by family, which the file does not have.
_SIZES = {"nano": 1 / 16, "medium": 0.5, "large": 1, "xlarge": 2}

SECONDS_MONTH = HOURS_MONTH * 3_600
ACU_LEAST = 0.5
"""The least capacity of a database that is awake."""

STARTS_MONTH = HOURS_MONTH / (7 * 24)
START_HOURS = 0.5
"""AWS starts a stopped cluster after seven days; it is awake about so long until it is stopped again."""

PROXY_ACU_LEAST = 8
QUERY_ENDPOINTS = 4
"""Two of ECR, CloudWatch Logs and Secrets Manager, each in one zone."""

ACCESS_ENDPOINTS = 2
"""Of Session Manager, each in one zone."""

QUERY_ALARMS = 5
METRICS = 15
"""Metrics that lambdas write, a lambda and instance."""

ARCHITECTURE = "arm64"
"""An instance does not tell its own; on x86_64 the same costs about a quarter more."""


@dataclass(frozen=True)
class Prices:
    """USD by the names of prices.toml, in which the unit stands last."""

    date: date
    source: str
    usd: Mapping[str, float]
    """What the region charges for everything that no instance is of."""

    aurora_large_hour: Mapping[str, float]
    """By family of instances, in us-east-1."""

    ec2_xlarge_hour: Mapping[str, float]
    """By family of instances, in us-east-1."""

    def __getitem__(self, name: str) -> float:
        return self.usd[name]

    def aurora_hour(self, instance_class: str) -> float | None:
        """Of `r8g.xlarge`, with or without `db.`; None when the file has no price of it."""
        family, size = _parts(instance_class)
        price = self.aurora_large_hour.get(family)
        return None if price is None or size is None else price * size * self["aurora_instance_factor"]

    def ec2_hour(self, instance_type: str, *, with_emr: bool = True) -> float | None:
        """Of the instance, with EMR on it or without; None when the file has no price of it."""
        family, size = _parts(instance_type)
        price = self.ec2_xlarge_hour.get(family)
        if price is None or size is None:
            return None
        return price * size / 2 * self["ec2_factor"] * (1 + with_emr * self["emr_share_of_ec2"])

    @property
    def access_hour(self) -> float:
        """Of the host for access with its disk, without endpoints."""
        return (self.ec2_hour(ACCESS_HOST, with_emr=False) or 0.0) + (
            DISK_GB * self["ebs_gb_month"] / HOURS_MONTH
        )

    def emr_vcpu_hour(self, architecture: str) -> float:
        """Of EMR Serverless, with the 4 GB that go with a vCPU."""
        vcpu, gb = self._emr(architecture)
        return vcpu + 4 * gb

    def fargate_hour(self, architecture: str, cpu: int, memory_mb: int) -> float:
        """Of a task, without its disk; `cpu` is in units of which a vCPU has 1,024."""
        vcpu, gb = self._emr(architecture)
        return (cpu * vcpu + memory_mb * gb) / 1_024 / EMR_OF_FARGATE

    def _emr(self, architecture: str) -> tuple[float, float]:
        kind = "arm" if architecture == "arm64" else "x86"
        return self[f"emr_{kind}_vcpu_hour"], self[f"emr_{kind}_gb_hour"]


def prices_of(region: str) -> Prices:
    """The prices of a region; raises InvalidInput with the regions that are known."""
    content = _content()
    if region not in content["regions"]:
        raise InvalidInput(
            f"there are no prices of the region {region}: they are known of {', '.join(known_regions())}; "
            "name one of these with --region for an estimate"
        )
    families = {name: content[name] for name in ("aurora_large_hour", "ec2_xlarge_hour")}
    return Prices(**content["about"], usd=content["everywhere"] | content["regions"][region], **families)


def known_regions() -> list[str]:
    return list(_content()["regions"])


def vcpus(instance: str) -> int:
    """The virtual CPUs of an instance of this size: 4 of `r8g.xlarge`."""
    _, size = _parts(instance)
    return max(2, round(2 * (size or 1)))


def _parts(instance: str) -> tuple[str, float | None]:
    family, _, size = instance.removeprefix("db.").partition(".")
    if size in _SIZES:
        return family, _SIZES[size]
    number = size.removesuffix("xlarge")
    return family, 2.0 * int(number) if number.isdigit() else None


@cache
def _content() -> dict[str, Any]:
    text = files("dormouse.aws").joinpath("prices.toml").read_text("utf-8")
    return tomllib.loads(text)


@dataclass(frozen=True)
class Assumptions:
    """What is made of the instance in a month; each is an option of `dormouse cost`."""

    requests_million: float = 1.0
    """Commit requests a month, in millions."""
    data_gb: float = 1_000.0
    """Data in the object store."""
    rewritten: float = 1.0
    """How often in a month compactions and deletions replace the data; 1: all of it once."""
    payload_gb: float = 0.0
    """Payloads in the object store."""
    database_gb: float = 20.0
    """The state in the database."""
    row_index_gb: float = 10.0
    """Indexes of row tables, in clusters of their own if there are such."""
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


class _Item(NamedTuple):
    """What is paid for: how much of it a month, and USD for one."""

    what: str
    quantity: float
    price: float
    kept: bool = False
    """Whether a paused instance pays for it, too."""


class _Month:
    def __init__(self, settings: DeploymentSettings, assumptions: Assumptions, prices: Prices) -> None:
        self.settings, self.assumed, self.prices = settings, assumptions, prices
        self.instances = 1 + settings.database.readers
        self.unpriced: list[str] = []

    def lines(self) -> Iterator[Line]:
        yield self._aurora()
        items = [
            ("database", self._database()),
            ("database", self._row_clusters()),
            ("storage", self._storage()),
            ("commit", self._commit()),
            *((stack, self._scheduled(stack)) for stack in ("garbage", "compaction", "maintenance")),
            ("compaction", self._runs()),
            ("query", self._query()),
            ("backup", self._backup()),
            ("audit", self._audit()),
            ("access", self._access()),
            ("all", self._common()),
        ]
        if self.settings.monitoring is not None:
            alarms = alarm_count(self.settings)
            shown = _Item("dashboard", 1, self.prices["dashboard_month"], kept=True)
            watched = _Item(f"{alarms} alarms", alarms, self.prices["alarm_month"], kept=True)
            items.append(("monitoring", iter((watched, shown))))
        for stack, each in items:
            for what, quantity, price, kept in each:
                usd = quantity * price
                asleep = usd if self.settings.database.pauses_itself else None
                yield Line(stack, what, usd, asleep, usd if kept else 0.0)

    def _aurora(self) -> Line:
        database, assumed = self.settings.database, self.assumed
        if isinstance(database, ServerlessDatabase):
            acu = max(ACU_LEAST, database.min_acu + assumed.load * (database.max_acu - database.min_acu))
            least, what, price = max(ACU_LEAST, database.min_acu), f"{acu:.3g} ACU", self.prices["acu_hour"]
        else:
            acu, least, what = 1.0, 1.0, f"db.{database.instance_class}"
            price = self._priced(what, self.prices.aurora_hour(what))
        running = self.instances * acu * price * HOURS_MONTH
        paused = self.instances * least * price * STARTS_MONTH * START_HOURS
        times = "" if self.instances == 1 else f"{self.instances} × "
        asleep = running * assumed.awake if database.pauses_itself else None
        return Line("database", f"Aurora, {times}{what}", running, asleep, paused)

    def _priced(self, kind: str, price: float | None) -> float:
        """Nothing for a kind of instance that has no price, which is noted."""
        if price is None:
            self.unpriced.append(kind)
        return price or 0.0

    def _database(self) -> Iterator[_Item]:
        database, prices, gb = self.settings.database, self.prices, self.assumed.database_gb
        yield _Item(f"Aurora storage, {gb:g} GB", gb, prices["aurora_gb_month"], kept=True)
        accesses = self.assumed.requests_million * self.assumed.io_per_request
        yield _Item(f"Aurora I/O, {accesses:g} million", accesses, prices["aurora_io_million"])
        # As much as the database is free; the backups of more than a day are about as large as it is.
        if (days := database.backup_days) > 1:
            yield _Item(f"Aurora backups of {days} days", gb, prices["aurora_backup_gb_month"], kept=True)
        if database.proxy:  # which nothing takes away
            yield _Item("RDS Proxy", HOURS_MONTH, self._proxy_hour(), kept=True)

    def _row_clusters(self) -> Iterator[_Item]:
        """They pause themselves, whatever the instance does; what they keep is there then, too."""
        rows, prices, gb = self.settings.rows, self.prices, self.assumed.row_index_gb
        if rows is None or not rows.own_clusters:
            return
        acu = rows.databases * max(ACU_LEAST, rows.max_acu * self.assumed.load)
        hours = HOURS_MONTH * self.assumed.awake
        yield _Item(f"Aurora for rows, {acu:.3g} ACU when awake", acu * hours, prices["acu_hour"])
        yield _Item(f"Aurora storage for rows, {gb:g} GB", gb, prices["aurora_gb_month"], kept=True)
        secret = f"Secrets Manager, master passwords of {rows.databases} clusters for rows"
        yield _Item(secret, rows.databases, prices["secret_month"], kept=True)

    def _proxy_hour(self) -> float:
        database, prices = self.settings.database, self.prices
        if isinstance(database, ServerlessDatabase):
            acu = self.instances * database.max_acu * self.assumed.load
            return max(PROXY_ACU_LEAST, acu) * prices["proxy_acu_hour"]
        return self.instances * vcpus(database.instance_class) * prices["proxy_vcpu_hour"]

    def _storage(self) -> Iterator[_Item]:
        prices, assumed = self.prices, self.assumed
        yield _Item(f"S3, {assumed.data_gb:g} GB of data", assumed.data_gb, prices["s3_gb_month"], kept=True)
        days = self.settings.version_days
        versions = assumed.data_gb * assumed.rewritten * days / 30
        replaced = f"S3, {versions:,.0f} GB that was replaced, kept for {days} days"
        yield _Item(replaced, versions, prices["s3_gb_month"])
        payloads = assumed.payload_gb
        yield _Item(f"S3, {payloads:g} GB of payloads", payloads, prices["s3_gb_month"], kept=True)
        # A commit adds about one object, which a compaction and a query or two read.
        request = prices["s3_put_thousand"] + 3 * prices["s3_get_thousand"]
        yield _Item("S3 requests", assumed.requests_million * 1_000, request)

    def _commit(self) -> Iterator[_Item]:
        commit, requests = self.settings.commit, self.assumed.requests_million
        if commit is None:
            return
        # Each message is sent, received and deleted, in tens; a mapping polls with five long polls of 20 s.
        polls = commit.queues * 5 * SECONDS_MONTH / 20 / 1e6
        queues = f"SQS, {commit.queues} queue{'s' * (commit.queues > 1)}"
        yield _Item(queues, requests * 3 / 10 + polls, self.prices["sqs_request_million"])
        batches = max(requests * 1e6 / min(commit.batch_size, 100), 1)
        yield _Item(f"Lambda, {batches:,.0f} batches", batches, self._call(commit.memory_mb))

    def _scheduled(self, stack: str) -> Iterator[_Item]:
        """All but garbage collection run Spark: one lambda makes a run, another reports it."""
        scheduled = getattr(self.settings, stack)
        if scheduled is None:
            return
        runs, every = stack != "garbage", scheduled.every_minutes
        calls = (1 + runs) * SECONDS_MONTH / 60 / every
        yield _Item(f"Lambda, every {every} minutes", calls, self._call(scheduled.memory_mb))
        if runs:
            transitions = calls * 3 + self.assumed.run_hours * 3_600 / 30 * 2
            price = self.prices["transition_thousand"] / 1_000
            yield _Item(f"Step Functions, {transitions:,.0f} transitions", transitions, price)

    def _call(self, memory_mb: int) -> float:
        """Of a lambda, which takes a second."""
        arm = self.settings.architecture == "arm64"
        second = self.prices["lambda_arm_gb_second"] if arm else self.prices["lambda_x86_gb_second"]
        return self.prices["lambda_request_million"] / 1e6 + memory_mb / 1_024 * second

    def _runs(self) -> Iterator[_Item]:
        compaction, assumed = self.settings.compaction, self.assumed
        if compaction is None:
            return
        if isinstance(compaction, EmrServerlessCompaction):
            used = assumed.run_hours * assumed.run_share * compaction.vcpu_max
            hour = self.prices.emr_vcpu_hour(self.settings.architecture)
            yield _Item(f"EMR Serverless, {used:,.0f} vCPU hours", used, hour)
            return
        kind = compaction.instance_types[0]
        hour = self._priced(kind, self.prices.ec2_hour(kind)) + 64 * self.prices["ebs_gb_month"] / HOURS_MONTH
        # The primary node comes on top; a cluster that waits for steps idles after each run.
        nodes = 1 + max(1.0, assumed.run_share * compaction.instances_max)
        yield _Item(f"EMR on EC2, {nodes:.3g} × {kind}", assumed.run_hours * nodes, hour)

    def _query(self) -> Iterator[_Item]:
        """With as many tasks as there are at least, and a load balancer that has little to do."""
        query, prices = self.settings.query, self.prices
        if query is None:
            return
        hour = prices.fargate_hour(self.settings.architecture, query.cpu, query.memory_mb)
        hour += (query.disk_gb - FREE_DISK_GB) * prices["fargate_disk_gb_hour"]
        size = f"{query.cpu / 1_024:g} vCPU, {query.memory_gb:g} GB"
        yield _Item(f"Fargate, {query.tasks_min} × {size}", query.tasks_min * HOURS_MONTH, hour)
        balancer = prices["balancer_hour"] + prices["lcu_hour"]
        yield _Item("load balancer, with one capacity unit", HOURS_MONTH, balancer)
        if query.endpoints != "existing":
            ways, hours = f"{QUERY_ENDPOINTS} interface endpoints", QUERY_ENDPOINTS * HOURS_MONTH
            yield _Item(ways, hours, prices["endpoint_hour"])
        yield _Item("private hosted zone, its name", 1, prices["zone_month"], kept=True)
        yield _Item("Secrets Manager, its token", 1, prices["secret_month"], kept=True)

    def _backup(self) -> Iterator[_Item]:
        """Snapshots that Aurora's own backups reach cost nothing more; copies in another region are whole."""
        backup, prices, assumed = self.settings.backup, self.prices, self.assumed
        if backup is None:
            return
        days, replaced = backup.retention_days, assumed.data_gb * assumed.rewritten
        if (older := days - self.settings.database.backup_days) > 0:
            gb = older * assumed.database_gb
            price = prices["aurora_backup_gb_month"]
            yield _Item(f"{older} snapshots of the database", gb, price, kept=True)
        if backup.objects:
            gb = assumed.data_gb + replaced * (self.settings.version_days + days) / 30
            yield _Item(f"AWS Backup, {gb:,.0f} GB of objects", gb, prices["backup_s3_gb_month"], kept=True)
        if backup.copy_region is None:
            return
        where, gb = backup.copy_region, assumed.data_gb + replaced * (days + 1) / 30
        yield _Item(f"S3 in {where}, {gb:,.0f} GB", gb, prices["s3_gb_month"], kept=True)
        gb = days * assumed.database_gb
        price = prices["aurora_backup_gb_month"]
        yield _Item(f"{days} snapshots of the database in {where}", gb, price, kept=True)
        gb = replaced + 30 * assumed.database_gb
        yield _Item(f"transfer to {where}, {gb:,.0f} GB", gb, prices["region_copy_gb"])

    def _audit(self) -> Iterator[_Item]:
        """An object is written and deleted for a commit, and read by a compaction and a query or two."""
        if (audit := self.settings.audit) is None:
            return
        events = self.assumed.requests_million * (2 if audit.events == "write" else 5)
        price = self.prices["data_event_hundred_thousand"]
        yield _Item(f"CloudTrail, {events:g} million data events", events * 10, price)

    def _access(self) -> Iterator[_Item]:
        access, prices = self.settings.access, self.prices
        if access is None:
            return
        yield _Item(f"EC2, {ACCESS_HOST} with its disk", HOURS_MONTH, prices.access_hour)
        if access.endpoints != "existing":
            ways, hours = f"{ACCESS_ENDPOINTS} interface endpoints", ACCESS_ENDPOINTS * HOURS_MONTH
            yield _Item(ways, hours, prices["endpoint_hour"])

    def _common(self) -> Iterator[_Item]:
        prices, gb = self.prices, self.assumed.log_gb
        keys = key_count(self.settings)
        yield _Item(f"{keys} KMS keys", keys, prices["kms_key_month"], kept=True)
        # Bucket keys and data key reuse leave about one request for a hundred uses.
        requests = self.assumed.requests_million * 100 / 100
        yield _Item("KMS requests", requests, prices["kms_request_ten_thousand"])
        yield _Item("Secrets Manager, the master password", 1, prices["secret_month"], kept=True)
        yield _Item(f"CloudWatch logs, {gb:g} GB written", gb, prices["log_gb"])
        months = self.settings.database.log_days / 30
        yield _Item("CloudWatch logs kept", gb * months, prices["log_gb_month"], kept=True)
        if self.settings.commit or self.settings.compaction:
            yield _Item(f"{METRICS} CloudWatch metrics", METRICS, prices["metric_month"])


def key_count(settings: DeploymentSettings) -> int:
    """The customer managed KMS keys of the instance."""
    has_copy = settings.backup is not None and settings.backup.copy_region is not None
    return 2 + (settings.monitoring is not None) + has_copy


def alarm_count(settings: DeploymentSettings) -> int:
    """About how many alarms the monitoring stack makes."""
    queues = settings.commit.queues if settings.commit else 0
    lambdas = (settings.commit, settings.garbage, settings.pause, "show tables", "change tables")
    runs = (settings.compaction, settings.maintenance)
    parts = 2 * sum(part is not None for part in lambdas) + 4 * sum(part is not None for part in runs)
    query = QUERY_ALARMS if settings.query is not None else 0
    return 5 + isinstance(settings.database, ServerlessDatabase) + 3 * queues + parts + query


def hourly(resources: Resources, live: Mapping[str, Any], region: str) -> list[tuple[str, float | None]]:
    """What costs how much an hour, as the instance is: USD, or None where no price or measure is known.

    `live` may have `database` (its status, like "available" or "stopped"), `instances` (the classes of its
    instances, like "db.r8g.large" or "db.serverless"), `acu` (the sum of their capacities), `database_gb`,
    `data_gb`, `rows_acu` and `rows_gb` (of the clusters that row tables have of their own, in all), `vcpus`
    (of EMR Serverless workers now), `hosts` (the types of EMR's EC2 instances now), `query_tasks` (how many
    tasks of the query service run), `query_sleeps` and `access_sleeps`.
    A region without prices gives None throughout, and no error.
    """
    is_known = region in known_regions()
    prices = prices_of(region if is_known else known_regions()[0])
    return [(name, usd if is_known else None) for name, usd in _lines(resources, live, prices)]


def _lines(
    resources: Resources, live: Mapping[str, Any], prices: Prices
) -> Iterator[tuple[str, float | None]]:
    if resources.database is not None:
        yield "database", _database_hour(prices, live)
        yield "database storage", _storage_hour(live.get("database_gb"), prices["aurora_gb_month"])
        if resources.database.proxy is not None:
            yield "proxy", _proxy_hour(prices, live)
        if resources.database.row_clusters:
            acu = live.get("rows_acu")
            yield "clusters of rows", None if acu is None else acu * prices["acu_hour"]
            yield "their storage", _storage_hour(live.get("rows_gb"), prices["aurora_gb_month"])
    if resources.storage is not None:
        yield "objects", _storage_hour(live.get("data_gb"), prices["s3_gb_month"])
    if resources.compaction is not None:
        yield "runs", _runs_hour(prices, live.get("vcpus"), live.get("hosts"))
    if (query := resources.query) is not None:
        tasks, task = live.get("query_tasks"), prices.fargate_hour(ARCHITECTURE, query.cpu, query.memory_mb)
        yield "query tasks", None if tasks is None else tasks * task
        ways = prices["balancer_hour"] + query.endpoints * prices["endpoint_hour"]
        yield "load balancer and endpoints", 0.0 if live.get("query_sleeps") else ways
    if (access := resources.access) is not None:
        runs = prices.access_hour + access.endpoints * prices["endpoint_hour"]
        yield "host for access and endpoints", 0.0 if live.get("access_sleeps") else runs


def _database_hour(prices: Prices, live: Mapping[str, Any]) -> float | None:
    if live.get("database") in ("stopped", "stopping"):
        return 0.0
    instances, acu = live.get("instances"), live.get("acu")
    if instances is None:
        return None
    parts = [prices.aurora_hour(one) for one in instances if one != "db.serverless"]
    if len(parts) < len(instances):
        parts.append(None if acu is None else acu * prices["acu_hour"])
    return _sum(parts)


def _proxy_hour(prices: Prices, live: Mapping[str, Any]) -> float | None:
    instances = live.get("instances")
    if instances is None:
        return None
    if "db.serverless" in instances:
        return max(PROXY_ACU_LEAST, live.get("acu") or 0.0) * prices["proxy_acu_hour"]
    return float(sum(vcpus(one) for one in instances) * prices["proxy_vcpu_hour"])


def _runs_hour(prices: Prices, workers: float | None, hosts: list[str] | None) -> float | None:
    if workers is None and hosts is None:
        return None
    usd = (workers or 0.0) * prices.emr_vcpu_hour(ARCHITECTURE)
    return _sum([usd, *(prices.ec2_hour(host) for host in hosts or ())])


def _storage_hour(gb: float | None, price: float) -> float | None:
    return None if gb is None else gb * price / HOURS_MONTH


def _sum(parts: list[float | None]) -> float | None:
    return None if None in parts else sum(part for part in parts if part is not None)
