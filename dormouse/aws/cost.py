"""The costs of an instance: an estimate for a month before the deploy, and the current cost of an hour.

Prices come from prices.toml beside this file, not from the network. The use of the instance comes from
`Assumptions`. A deployment has no NAT gateways, and interface endpoints only for the services,
EMR on EC2 and the host for access.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from dormouse.errors import InvalidInput
from dormouse.settings.database import (
    COMMIT_THREADS,
    FREE_DISK_GB,
    EmrServerlessCompaction,
    ServerlessDatabase,
)
from dormouse.settings.deployment import ACCESS_HOST, DISK_GB, DeploymentSettings
from dormouse.settings.resources import Resources

HOURS = 730
"""The number of hours in a month."""

EMR_OF_FARGATE = 1.3
"""The price of EMR Serverless divided by that of Fargate (see prices.toml)."""

LIVE_ARCHITECTURE = "arm64"
"""The assumed architecture of a running instance; x86_64 costs about a quarter more."""

ACU_LEAST, PROXY_ACU_LEAST = 0.5, 8
"""The least capacity, in ACU, of a database that is awake, and the least for which an RDS Proxy is billed."""

STARTED_HOURS = HOURS / (7 * 24) * 0.5
"""The hours a month in which a paused cluster runs. AWS starts it once a week, and it stops after half an
hour."""

QUERY_ENDPOINTS, ACCESS_ENDPOINTS, COMMIT_ENDPOINTS, SHARED_ENDPOINTS = 4, 2, 4, 3
"""The numbers of interface endpoints, each in one zone.

The query service has two for ECR, one for CloudWatch Logs and one for Secrets Manager. The commit service
has one for SQS, and shares the first three with the query service. The host for access has two for Session
Manager.
"""

METRICS = 14
"""The number of metrics that the lambdas of a running instance write. The lambda `pause` also writes one
during a pause."""

# The size as a multiple of `large`; `metal` is priced by family, which the price file lacks.
_LARGES = {"nano": 1 / 16, "medium": 0.5, "large": 1, "xlarge": 2} | {
    f"{n}xlarge": 2 * n for n in range(2, 500)
}


@dataclass(frozen=True)
class Prices:
    """Prices in USD by the names of prices.toml, which end with the unit."""

    date: date
    source: str
    usd: Mapping[str, float]
    """The region's prices, except those of EC2 and database instances."""

    aurora_large_hour: Mapping[str, float]
    """The price of an hour of a database instance of size `large`, by family, in us-east-1."""

    ec2_xlarge_hour: Mapping[str, float]
    """The price of an hour of an EC2 instance of size `xlarge`, by family, in us-east-1."""

    def __getitem__(self, name: str) -> float:
        return self.usd[name]

    def aurora_factors(self, storage: str) -> tuple[float, float, float]:
        """Returns the factors of the prices of capacity, storage and I/O for a kind of storage of Aurora."""
        if storage == "standard":
            return 1.0, 1.0, 1.0
        return self["io_optimized_instance_factor"], self["io_optimized_storage_factor"], 0.0

    def aurora_hour(self, instance_class: str) -> float | None:
        """Returns the price of an hour of an instance class such as `r8g.xlarge`; None if it is not known.

        The class may begin with `db.`.
        """
        family, _, size = instance_class.removeprefix("db.").partition(".")
        usd = self.aurora_large_hour.get(family, 0.0) * _LARGES.get(size, 0) * self["aurora_instance_factor"]
        return usd or None

    def ec2_hour(self, instance_type: str, *, with_emr: bool = True) -> float | None:
        """Returns the price of an hour of an EC2 instance; None if it is not known.

        By default, the price includes EMR on the instance.
        """
        family, _, size = instance_type.removeprefix("db.").partition(".")
        usd = self.ec2_xlarge_hour.get(family, 0.0) * _LARGES.get(size, 0) / 2 * self["ec2_factor"]
        return usd * (1 + with_emr * self["emr_share_of_ec2"]) or None

    @property
    def access_hour(self) -> float:
        """The price of an hour of the host for access with its disk, without endpoints."""
        return (self.ec2_hour(ACCESS_HOST, with_emr=False) or 0.0) + DISK_GB * self["ebs_gb_month"] / HOURS

    def emr_hour(self, architecture: str, vcpu: float = 1, gb: float = 4) -> float:
        """Returns the price of an hour of an EMR Serverless worker, by default with one vCPU and 4 GB."""
        kind = "arm" if architecture == "arm64" else "x86"
        return vcpu * self[f"emr_{kind}_vcpu_hour"] + gb * self[f"emr_{kind}_gb_hour"]

    def fargate_hour(self, architecture: str, cpu: int, memory_mb: int) -> float:
        """Returns the price of an hour of a Fargate task without its disk.

        `cpu` is in units of 1/1,024 of a virtual CPU.
        """
        return self.emr_hour(architecture, cpu / 1_024, memory_mb / 1_024) / EMR_OF_FARGATE


@cache
def _content() -> dict[str, Any]:
    return tomllib.loads(files("dormouse.aws").joinpath("prices.toml").read_text("utf-8"))


def prices_of(region: str) -> Prices:
    """Returns the prices of a region. Raises `InvalidInput`, which lists the known regions."""
    content = _content()
    if region not in content["regions"]:
        raise InvalidInput(
            f"the prices of the region {region} are not known. They are known for "
            f"{', '.join(known_regions())}; "
            "name one of these with --region for an estimate"
        )
    families = {name: content[name] for name in ("aurora_large_hour", "ec2_xlarge_hour")}
    return Prices(**content["about"], usd=content["everywhere"] | content["regions"][region], **families)


def known_regions() -> list[str]:
    return list(_content()["regions"])


def vcpus(instance: str) -> int:
    """Returns the number of virtual CPUs of an instance class, such as 4 for `r8g.xlarge`."""
    return max(2, round(2 * _LARGES.get(instance.rpartition(".")[2], 1)))


@dataclass(frozen=True)
class Assumptions:
    """The assumed use of an instance in a month; each field is an option of `dormouse cost`."""

    requests_million: Annotated[float, "Commit requests a month, in millions."] = 1.0
    data_gb: Annotated[float, "GB of data in the object store."] = 1_000.0
    rewritten: Annotated[
        float, "How many times a month all data is replaced, for example by compactions."
    ] = 1.0
    payload_gb: Annotated[float, "GB of payloads in the object store."] = 0.0
    database_gb: Annotated[float, "GB in the database."] = 20.0
    row_index_gb: Annotated[float, "GB of indexes of row tables, where these have clusters of their own."] = (
        10.0
    )
    io_per_request: Annotated[float, "Storage I/Os of the database per commit request."] = 20.0
    load: Annotated[float, "The share of the range from min_acu to max_acu that is used, 0 to 1."] = 0.25
    awake: Annotated[
        float, "The share of the month in which a database that pauses itself is awake, 0 to 1."
    ] = 0.25
    run_hours: Annotated[float, "Hours of Spark runs a month."] = 60.0
    run_share: Annotated[float, "The share of its limit that a run uses, 0 to 1."] = 0.5
    log_gb: Annotated[float, "GB of logs a month."] = 5.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_share = name in {"load", "awake", "run_share"}
            if not 0 <= value < float("inf") or (is_share and value > 1):
                most = "1" if is_share else "any finite number"
                raise InvalidInput(f"{name} = {value:g}: it must be 0 to {most}")


@dataclass(frozen=True)
class Line:
    """The costs of one resource in USD a month, in three states of the instance.

    `running` is the cost while everything runs, and `paused` the cost after `dormouse pause`. `auto_paused`
    is the cost while the database pauses itself; None if its settings do not let it.
    """

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
    """Instance classes without a price, which count as 0 USD."""

    @property
    def running(self) -> float:
        return sum(line.running for line in self.lines)

    @property
    def auto_paused(self) -> float | None:
        return _sum([line.auto_paused for line in self.lines])

    @property
    def paused(self) -> float:
        return sum(line.paused for line in self.lines)


def estimate(settings: DeploymentSettings, region: str | None, assumptions: Assumptions) -> Estimate:
    """Returns the costs of a month in three states: running, with a self-paused database, and paused.

    Raises `InvalidInput` without a region, or for a region without known prices.
    """
    region = region or settings.region
    if region is None:
        raise InvalidInput(f"no region is given: use --region with one of {', '.join(known_regions())}")
    month = _Month(settings, assumptions, prices_of(region))
    month.data()
    month.work()
    month.commit_service()
    month.services()
    about = (region, str(month.prices.date), month.prices.source, assumptions)
    return Estimate(*about, tuple(month.lines), tuple(month.unpriced))


class _Month:
    def __init__(self, settings: DeploymentSettings, assumptions: Assumptions, prices: Prices) -> None:
        self.settings, self.assumed, self.prices = settings, assumptions, prices
        self.lines: list[Line] = []
        self.unpriced: list[str] = []

    def add(self, stack: str, resource: str, usd: float, *, kept: bool = False) -> None:
        """Adds a line of cost unless it is 0. A paused instance also pays for resources that are `kept`."""
        asleep = usd if self.settings.database.pauses_itself else None
        self.lines += [Line(stack, resource, usd, asleep, usd if kept else 0.0)] if usd else []

    def priced(self, kind: str, price: float | None) -> float:
        """Returns a price. If there is none, returns 0 and records the kind of instance as unpriced."""
        self.unpriced += [kind] if price is None else []
        return price or 0.0

    def data(self) -> None:
        """Adds the costs of the database, the object store, and the clusters that only index row tables.

        These clusters pause themselves.
        """
        assumed, prices, gb = self.assumed, self.prices, self.assumed.database_gb
        database, rows, requests = self.settings.database, self.settings.rows, assumed.requests_million
        count = 1 + database.readers
        capacity_factor, storage_factor, io_factor = prices.aurora_factors(database.storage)
        if isinstance(database, ServerlessDatabase):
            least = max(ACU_LEAST, database.min_acu)
            acu = max(ACU_LEAST, database.min_acu + assumed.load * (database.max_acu - database.min_acu))
            kind, price, proxied = (
                f"{acu:.3g} ACU",
                prices["acu_hour"],
                count * database.max_acu * assumed.load,
            )
            proxy = max(PROXY_ACU_LEAST, proxied) * prices["proxy_acu_hour"]
        else:
            kind, acu, least = f"db.{database.instance_class}", 1.0, 1.0
            price = self.priced(kind, prices.aurora_hour(kind))
            proxy = count * vcpus(kind) * prices["proxy_vcpu_hour"]
        price *= capacity_factor
        usd = count * acu * price * HOURS
        asleep = usd * assumed.awake if database.pauses_itself else None
        what = f"Aurora, {f'{count} × ' * (count > 1)}{kind}"
        aurora = Line("database", what, usd, asleep, count * least * price * STARTED_HOURS)
        self.lines += [aurora] if usd else []
        usd = gb * prices["aurora_gb_month"] * storage_factor
        self.add("database", f"Aurora storage, {gb:g} GB", usd, kept=True)
        accesses = requests * assumed.io_per_request
        usd = accesses * prices["aurora_io_million"] * io_factor
        self.add("database", f"Aurora I/O, {accesses:g} million", usd)
        # Backups are free up to the size of the database; those of more than a day are about as large.
        usd, days = gb * prices["aurora_backup_gb_month"], database.backup_days
        self.add("database", f"Aurora backups of {days} days", usd * (days > 1), kept=True)
        self.add("database", "RDS Proxy", proxy * HOURS * bool(database.proxy), kept=True)
        if rows is not None and rows.own_clusters:
            acu, gb = rows.databases * max(ACU_LEAST, rows.max_acu * assumed.load), assumed.row_index_gb
            usd = acu * HOURS * assumed.awake * prices["acu_hour"]
            self.add("database", f"Aurora for rows, {acu:.3g} ACU when awake", usd)
            usd = gb * prices["aurora_gb_month"]
            self.add("database", f"Aurora storage for rows, {gb:g} GB", usd, kept=True)
            what = f"Secrets Manager, master passwords of {rows.databases} clusters for rows"
            self.add("database", what, rows.databases * prices["secret_month"], kept=True)
        days, gb, price = self.settings.version_days, assumed.data_gb, prices["s3_gb_month"]
        self.add("storage", f"S3, {gb:g} GB of data", gb * price, kept=True)
        gb *= assumed.rewritten * days / 30
        self.add("storage", f"S3, {gb:,.0f} GB that was replaced, kept for {days} days", gb * price)
        gb = assumed.payload_gb
        self.add("storage", f"S3, {gb:g} GB of payloads", gb * price, kept=True)
        # A commit adds about one object, which is read by a compaction and one or two queries.
        request = prices["s3_put_thousand"] + 3 * prices["s3_get_thousand"]
        self.add("storage", "S3 requests", requests * 1_000 * request)

    def work(self) -> None:
        """Adds the costs of the committer and of scheduled work."""
        settings, assumed, prices = self.settings, self.assumed, self.prices
        commit, requests, seconds = settings.commit, assumed.requests_million, HOURS * 3_600
        is_arm, call = settings.architecture == "arm64", prices["lambda_request_million"] / 1e6
        # One call of a lambda takes a second.
        mb = (prices["lambda_arm_gb_second"] if is_arm else prices["lambda_x86_gb_second"]) / 1_024
        if commit is not None:
            # Each message is sent, received and deleted, in tens. A mapping has five long polls of 20 s; a
            # thread of the service has one of a second.
            polls = max(COMMIT_THREADS, commit.queues) if commit.service else commit.queues * 5 / 20
            calls = requests * 3 / 10 + polls * seconds / 1e6
            what = f"SQS, {commit.queues} queue{'s' * (commit.queues > 1)}"
            self.add("commit", what, calls * prices["sqs_request_million"])
        if commit is not None and not commit.service:
            batches = max(requests * 1e6 / min(commit.batch_size, 100), 1)
            self.add("commit", f"Lambda, {batches:,.0f} batches", batches * (call + commit.memory_mb * mb))
        for stack in ("garbage", "compaction", "maintenance"):
            if (scheduled := getattr(settings, stack)) is not None:
                # All but garbage collection run Spark: one lambda creates a run, another records its end.
                runs, every = stack != "garbage", scheduled.every_minutes
                calls = (1 + runs) * seconds / 60 / every
                self.add(stack, f"Lambda, every {every} minutes", calls * (call + scheduled.memory_mb * mb))
                steps = runs * (calls * 3 + assumed.run_hours * 3_600 / 30 * 2)
                usd = steps * prices["transition_thousand"] / 1_000
                self.add(stack, f"Step Functions, {steps:,.0f} transitions", usd)
        if isinstance(compaction := settings.compaction, EmrServerlessCompaction):
            used = assumed.run_hours * assumed.run_share * compaction.vcpu_max
            usd = used * prices.emr_hour(settings.architecture)
            self.add("compaction", f"EMR Serverless, {used:,.0f} vCPU hours", usd)
        elif compaction is not None:
            kind = compaction.instance_types[0]
            hour = self.priced(kind, prices.ec2_hour(kind)) + 64 * prices["ebs_gb_month"] / HOURS
            # The primary node is extra; a cluster that waits for steps idles after each run.
            nodes = 1 + max(1.0, assumed.run_share * compaction.instances_max)
            self.add("compaction", f"EMR on EC2, {nodes:.3g} × {kind}", assumed.run_hours * nodes * hour)
            usd = HOURS * prices["endpoint_hour"] * (compaction.endpoints != "existing")
            self.add("compaction", "1 interface endpoint", usd)

    def commit_service(self) -> None:
        settings, prices, commit = self.settings, self.prices, self.settings.commit
        if commit is None or not commit.service:
            return
        hour = prices.fargate_hour(settings.architecture, commit.service_cpu, commit.service_memory_mb)
        what = f"Fargate, {commit.service_cpu / 1_024:g} vCPU, {commit.service_memory_gb:g} GB"
        self.add("commit", what, HOURS * hour)
        count = COMMIT_ENDPOINTS - (SHARED_ENDPOINTS if settings.query else 0)
        usd = HOURS * count * prices["endpoint_hour"] * (commit.endpoints != "existing")
        self.add("commit", f"{count} interface endpoint{'s' * (count > 1)}", usd)

    def services(self) -> None:
        """Adds the costs of the query service, copies, the host for access, and monitoring.

        The query service counts with its least number of tasks.
        """
        settings, assumed, prices, endpoint = self.settings, self.assumed, self.prices, "interface endpoints"
        backup, audit, replaced = settings.backup, settings.audit, assumed.data_gb * assumed.rewritten
        endpoint_month = HOURS * prices["endpoint_hour"]
        if (query := settings.query) is not None:
            hour = prices.fargate_hour(settings.architecture, query.cpu, query.memory_mb)
            hour += (query.disk_gb - FREE_DISK_GB) * prices["fargate_disk_gb_hour"]
            what = f"Fargate, {query.tasks_min} × {query.cpu / 1_024:g} vCPU, {query.memory_gb:g} GB"
            self.add("query", what, query.tasks_min * HOURS * hour)
            usd = HOURS * (prices["balancer_hour"] + prices["lcu_hour"])
            self.add("query", "load balancer, with one capacity unit", usd)
            usd = QUERY_ENDPOINTS * endpoint_month * (query.endpoints != "existing")
            self.add("query", f"{QUERY_ENDPOINTS} {endpoint}", usd)
            self.add("query", "private hosted zone, its name", prices["zone_month"], kept=True)
            self.add("query", "Secrets Manager, its token", prices["secret_month"], kept=True)
        if backup is not None:
            # Snapshots within Aurora's backup window are free; those in another region are full copies.
            days, where, usd = backup.retention_days, backup.copy_region, prices["aurora_backup_gb_month"]
            usd, older = usd * assumed.database_gb, max(0, days - settings.database.backup_days)
            self.add("backup", f"{older} snapshots of the database", older * usd, kept=True)
            gb = (assumed.data_gb + replaced * (settings.version_days + days) / 30) * backup.objects
            what, price = f"AWS Backup, {gb:,.0f} GB of objects", prices["backup_s3_gb_month"]
            self.add("backup", what, gb * price, kept=True)
            if where is not None:
                gb = assumed.data_gb + replaced * (days + 1) / 30
                self.add("backup", f"S3 in {where}, {gb:,.0f} GB", gb * prices["s3_gb_month"], kept=True)
                self.add("backup", f"{days} snapshots of the database in {where}", days * usd, kept=True)
                gb = replaced + 30 * assumed.database_gb
                self.add("backup", f"transfer to {where}, {gb:,.0f} GB", gb * prices["region_copy_gb"])
        if audit is not None:
            # An object is written and deleted for a commit, and read by a compaction and a query or two.
            events = assumed.requests_million * (2 if audit.events == "write" else 5)
            usd = events * 10 * prices["data_event_hundred_thousand"]
            self.add("audit", f"CloudTrail, {events:g} million data events", usd)
        if (access := settings.access) is not None:
            self.add("access", f"EC2, {ACCESS_HOST} with its disk", HOURS * prices.access_hour)
            usd = ACCESS_ENDPOINTS * endpoint_month * (access.endpoints != "existing")
            self.add("access", f"{ACCESS_ENDPOINTS} {endpoint}", usd)
        keys, gb = key_count(settings), assumed.log_gb
        self.add("all", f"{keys} KMS keys", keys * prices["kms_key_month"], kept=True)
        # Bucket keys and data key reuse leave about one request for a hundred uses.
        self.add("all", "KMS requests", assumed.requests_million * prices["kms_request_ten_thousand"])
        self.add("all", "Secrets Manager, the master password", prices["secret_month"], kept=True)
        self.add("all", f"CloudWatch logs, {gb:g} GB written", gb * prices["log_gb"])
        usd = gb * settings.database.log_days / 30 * prices["log_gb_month"]
        self.add("all", "CloudWatch logs kept", usd, kept=True)
        if settings.commit or settings.compaction:
            self.add("all", f"{METRICS} CloudWatch metrics", METRICS * prices["metric_month"])
        self.add(
            "pause", "1 CloudWatch metric", prices["metric_month"] * (settings.pause is not None), kept=True
        )
        if settings.monitoring is not None:
            alarms = alarm_count(settings)
            self.add("monitoring", f"{alarms} alarms", alarms * prices["alarm_month"], kept=True)
            self.add("monitoring", "dashboard", prices["dashboard_month"], kept=True)


def key_count(settings: DeploymentSettings) -> int:
    """Returns the number of customer managed KMS keys of the instance."""
    has_copy = settings.backup is not None and settings.backup.copy_region is not None
    return 2 + (settings.monitoring is not None) + has_copy


def alarm_count(settings: DeploymentSettings) -> int:
    """Returns the number of alarms that the monitoring stack creates."""
    queues = settings.commit.queues if settings.commit else 0
    lambdas = (settings.commit, settings.garbage, settings.pause, "show tables", "change tables")
    runs = (settings.compaction, settings.maintenance)
    parts = 2 * sum(part is not None for part in lambdas) + 4 * sum(part is not None for part in runs)
    calls = (settings.garbage, settings.compaction, settings.maintenance, settings.pause)
    parts += sum(part is not None for part in calls)
    query = 5 * (settings.query is not None)
    service = int(settings.has_commit_service)
    return 9 + 3 * queues + parts + query + service


def hourly(resources: Resources, live: Mapping[str, Any], region: str) -> list[tuple[str, float | None]]:
    """Returns the names of the parts of a running instance, each with its current cost in USD an hour.

    The cost of a part is None if its price or its measure is not known. All costs are None in a region
    without known prices. `live` may have these keys:

    - `database`: the status of the cluster, like "available" or "stopped"
    - `instances`: the classes of its instances, like "db.r8g.large" or "db.serverless"
    - `acu`: the sum of their capacities
    - `database_gb`, `data_gb`: the sizes of the database and of the objects
    - `rows_acu`, `rows_gb`: the capacity and size of all clusters that only index row tables
    - `vcpus`: the vCPUs of the EMR Serverless workers that run now
    - `hosts`: the types of EMR's EC2 instances that run now
    - `query_tasks`, `commit_tasks`: the number of running tasks of the query service and commit service
    - `query_sleeps`, `commit_sleeps`, `access_sleeps`: True if the part sleeps
    """
    is_known = region in known_regions()
    prices = prices_of(region if is_known else known_regions()[0])
    return [(name, usd if is_known else None) for name, usd in _hour(resources, live, prices)]


def _hour(
    resources: Resources, live: Mapping[str, Any], prices: Prices
) -> Iterator[tuple[str, float | None]]:
    def times(name: str, price: float) -> float | None:
        return None if live.get(name) is None else live[name] * price

    gb_hour = prices["aurora_gb_month"] / HOURS
    if resources.database is not None:
        instances, acu = live.get("instances"), times("acu", prices["acu_hour"])
        fixed = [one for one in instances or () if one != "db.serverless"]
        parts = [*map(prices.aurora_hour, fixed), *([acu] if len(fixed) < len(instances or ()) else [])]
        capacity_factor, storage_factor, _ = prices.aurora_factors(resources.database.storage)
        usd = None if instances is None else _sum(parts)
        is_stopped = live.get("database") in ("stopped", "stopping")
        yield "database", 0.0 if is_stopped else usd and usd * capacity_factor
        yield "database storage", times("database_gb", gb_hour * storage_factor)
        if resources.database.proxy is not None:
            usd = sum(map(vcpus, fixed)) * prices["proxy_vcpu_hour"]
            if len(fixed) < len(instances or ()):
                usd = max(PROXY_ACU_LEAST, live.get("acu") or 0.0) * prices["proxy_acu_hour"]
            yield "proxy", None if instances is None else usd
        if resources.database.row_clusters:
            yield "clusters of rows", times("rows_acu", prices["acu_hour"])
            yield "their storage", times("rows_gb", gb_hour)
    if resources.storage is not None:
        yield "objects", times("data_gb", prices["s3_gb_month"] / HOURS)
    if resources.compaction is not None:
        workers, hosts = times("vcpus", prices.emr_hour(LIVE_ARCHITECTURE)), live.get("hosts")
        is_measured = workers is not None or hosts is not None
        yield "runs", _sum([workers or 0.0, *map(prices.ec2_hour, hosts or ())]) if is_measured else None
        if resources.compaction.has_endpoint:
            yield "endpoint of EMR", 0.0 if live.get("sleeps") else prices["endpoint_hour"]
    if resources.commit is not None and (service := resources.commit.service) is not None:
        task = prices.fargate_hour(LIVE_ARCHITECTURE, service.cpu, service.memory_mb)
        yield "commit task", times("commit_tasks", task)
        usd = service.endpoints * prices["endpoint_hour"]
        yield "endpoints of commits", 0.0 if live.get("sleeps") else usd
    if (query := resources.query) is not None:
        task = prices.fargate_hour(LIVE_ARCHITECTURE, query.cpu, query.memory_mb)
        yield "query tasks", times("query_tasks", task)
        ways = prices["balancer_hour"] + query.endpoints * prices["endpoint_hour"]
        yield "load balancer and endpoints", 0.0 if live.get("sleeps") else ways
    if (access := resources.access) is not None:
        usd = prices.access_hour + access.endpoints * prices["endpoint_hour"]
        yield "host for access and endpoints", 0.0 if live.get("sleeps") else usd


def _sum(parts: list[float | None]) -> float | None:
    return None if None in parts else sum(part for part in parts if part is not None)
