"""The settings of a deployed instance, which `config_file.load` reads from one TOML file.

Each field records the effect of a change: `deploy` if a `cdk deploy` applies it, or `replacement` if it also
needs a new resource in place of the old one. docs/reference/deployment-settings.md is generated from this
module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from dormouse.settings.database import (
    CommitSettings,
    CompactionSettings,
    DatabaseSettings,
    QuerySettings,
    ServerlessDatabase,
)
from dormouse.settings.section import (
    CONNECT_SECONDS_MAX,
    DRAIN_SECONDS,
    VISIBILITY_FACTOR,
    Acu,
    EveryMinutes,
    MemoryMb,
    RouteTableId,
    Section,
    SubnetId,
    TimeoutSeconds,
    ZoneName,
    architecture_of,
    cidr_problem,
    no_certificates,
    pattern,
    setting,
    tag_problems,
)

# The settings of the access to the database from outside its VPC.

ACCESS_HOST = "t4g.nano"
DISK_GB = 8
"""The size in GB of the disk in the image of the host for access."""

ACCESS_TAG = "dormouse:access"
"""The tag of the host for access, with the instance's id as its value. Policies for people refer to it."""


class AccessSettings(Section):
    """Access to the database from outside the VPC: a host for Session Manager's port forwarding."""

    endpoints: Literal["create", "existing"] | None = setting(None)
    """The two interface endpoints that Session Manager needs: `create` them, or use `existing` ones. `create`
    is the default in the instance's own VPC. In an existing VPC, which all its machines share, the choice is
    required."""


# The settings of row tables.

DATABASES_MAX = 16


class RowsSettings(Section):
    """Row tables: the databases for their indexes, and the query service's work on them."""

    databases: int = setting(2, ge=1, le=DATABASES_MAX)
    """The number of databases for indexes, which are copies of the current rows. Dormouse spreads the tables
    over them by load."""

    own_clusters: bool = setting(False)
    """Separate serverless clusters for these databases, which pause when they get no queries. Without it, the
    databases are in the instance's cluster. After a change, all indexes are built again."""

    max_acu: Acu = setting(4)
    """The largest capacity, in ACU, of each separate cluster."""

    job_threads: int = setting(4, ge=0, le=64)
    """The number of jobs that a task of the query service runs at once: changes and loads of row tables, and
    the work on their indexes. With jobs, the task logs in to the database with the right to change rows. With
    0, it only reads."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if "max_acu" in self.model_fields_set and not self.own_clusters:
            yield "max_acu", "it needs own_clusters = true: set that, or leave it out"


# The settings of the stack that monitors an instance.


class MonitoringSettings(Section):
    """A dashboard, alarms and a budget."""

    email: str | None = setting(None, change="replacement", pattern=pattern("email"))
    """The address for alarms, whose owner must confirm the subscription. Left out, the topic has no
    subscriber until you add one."""

    topic_arn: str | None = setting(None, pattern=pattern("topic"))
    """An existing SNS topic for alarms and the budget; its policy must admit CloudWatch and AWS Budgets."""

    warning_topic_arn: str | None = setting(None, pattern=pattern("topic"))
    """An existing SNS topic for alarms that begin with `Warning`, which can wait for the next working day."""

    slack_workspace: str | None = setting(None, pattern=pattern("slack"))
    """The id of a Slack workspace that is authorized in the console of AWS Chatbot (Amazon Q Developer)."""

    slack_channel: str | None = setting(None, pattern=pattern("slack"))
    """The id of the channel in that workspace that gets the alarms."""

    teams_tenant: str | None = setting(None, change="replacement", pattern=pattern("teams"))
    """The id of a Microsoft Teams tenant that is authorized in the console of AWS Chatbot."""

    teams_team: str | None = setting(None, change="replacement", pattern=pattern("teams"))
    """The id of the team in that tenant, as the console of AWS Chatbot shows it."""

    teams_channel: str | None = setting(None, pattern=pattern("teams_channel"))
    """The id of the channel of that team that gets the alarms."""

    budget_usd_month: float | None = setting(None, gt=0)
    """The monthly budget in USD. A notice is sent when costs exceed it. Left out, there is no budget."""

    oldest_message_seconds_max: int = setting(900, ge=60, le=86_400)
    """The age of the oldest commit request, in seconds, above which an alarm goes off."""

    connections_max: int = setting(500, ge=10, le=5_000)
    """The number of database connections above which an alarm goes off."""

    orphaned_gb_max: float = setting(100, gt=0)
    """The total size of unreferenced objects, in GB, above which an alarm goes off."""

    payload_backlog_days_max: int = setting(3, ge=1)
    """The number of past days with payloads not yet offloaded above which an alarm goes off."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.topic_arn and self.email:
            yield "email", "it is for a new topic: leave out either it or topic_arn"
        for names in (("slack_workspace", "slack_channel"), ("teams_tenant", "teams_team", "teams_channel")):
            given = [name for name in names if getattr(self, name) is not None]
            if given and (missing := [name for name in names if name not in given]):
                together = f"{', '.join(names[:-1])} and {names[-1]} go together"
                yield given[0], f"{together}: give {' and '.join(missing)} too, or none"


# The settings of copies and records outside the instance: backups, a copy in another region, an audit log.


class BackupSettings(Section):
    """AWS Backup: daily snapshots of the database, continuous backup of the data bucket, and a copy of both.

    The copy is in another region. AWS makes no backup of a stopped database: while the instance is paused,
    there are no new snapshots of its database, and the old ones expire.
    """

    retention_days: int = setting(14, ge=1, le=35)
    """The number of days that backups are kept, also in the other region. For that time, the database and the
    data bucket can be restored."""

    hour_utc: int = setting(3, ge=0, le=23)
    """The hour, in UTC, in which the daily snapshot of the database begins."""

    objects: bool = setting(True)
    """A backup of the data bucket in addition to the database. Without it, retention_days must not exceed
    storage.restore_days."""

    copy_region: str | None = setting(None, change="replacement", pattern=pattern("region"))
    """Another region for a copy of each object, as soon as it is written, and of each snapshot of the
    database. The copy requires the settings account and region, and `cdk bootstrap` in the other region."""

    def problems(
        self, account: str | None, region: str | None, restore_days: int
    ) -> Iterator[tuple[str, str]]:
        """Yields each setting of this table that contradicts other tables, and the reason."""
        if not self.objects and self.retention_days > restore_days:
            yield (
                "retention_days",
                f"it must be at most storage.restore_days, which is {restore_days}, unless objects = true: "
                "the bucket loses objects to which older snapshots of the database still refer",
            )
        if self.copy_region is None:
            return
        if account is None or region is None:
            yield "copy_region", "it needs account and region: CloudFormation must know both regions"
        elif self.copy_region == region:
            yield "copy_region", f"it must be another region than {region}, which is the instance's own"
        elif trouble := no_certificates(self.copy_region):
            yield "copy_region", trouble


class AuditSettings(Section):
    """CloudTrail's data events of the data bucket, which record each access to an object."""

    events: Literal["write", "all"] = setting("write")
    """The recorded events: writes and deletions (`write`), or also reads (`all`). Queries and compactions
    make many reads."""

    log_days: int = setting(90, ge=1, le=3_650)
    """The number of days that the events are kept."""


# The settings for an organization's rules for roles.


class IamSettings(Section):
    """The roles of the instance, and the policies for people."""

    permissions_boundary: str | None = setting(None, pattern=pattern("policy"))
    """The ARN of a policy that limits the rights of every role."""

    role_path: str = setting("/", pattern=pattern("role_path"))
    """The path of all roles. A change of the path or of role_prefix creates new roles."""

    role_prefix: str | None = setting(None, pattern=pattern("role_prefix"))
    """The prefix of the names of all roles. Left out, CloudFormation chooses the names."""

    policies: tuple[Literal["operator", "reader"], ...] = setting((), strict=False)
    """The managed policies to create for people. An `operator` pauses and resumes the instance, handles dead
    letters and changes tables. A `reader` reads tables."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if len(set(self.policies)) < len(self.policies):
            yield "policies", "each may be listed only once"


ZONES_MAX = 3
"""The largest number of zones of the instance's own VPC."""

SUBNETS_MAX = 16
"""The largest number of subnets of a lambda."""

EMR_TAG_BYTES_MAX = 680
"""The largest size, in bytes, of the tags of clusters on EC2. The tags are in the environment of a lambda,
which has 4 KB at most, and everything else takes up to 3.4 KB."""


class NetworkSettings(Section):
    """The network: the instance's own VPC, or an existing one that is given by its id."""

    cidr: str = setting("10.40.0.0/16", change="replacement", pattern=pattern("cidr"))
    """The address range of the own VPC."""

    zones: int = setting(2, ge=2, le=ZONES_MAX)
    """The number of availability zones of the own VPC. It can be raised but not lowered. If
    availability_zones is given, its length is the number."""

    flow_log_days: Literal[7, 14, 30, 60, 90, 180, 365] = setting(30)
    """The number of days that the own VPC's flow log is kept."""

    availability_zones: tuple[ZoneName, ...] = setting((), strict=False)
    """The zone of each subnet in subnet_ids, in the same order. An own VPC has 2 or 3 zones, by default the
    first ones of the region. A third can be appended. Other changes need a new instance."""

    vpc_id: str | None = setting(None, change="replacement", pattern=pattern("vpc"))
    """The id of an existing VPC. The settings below belong to an existing VPC. The settings above, except
    availability_zones, belong to an own VPC."""

    subnet_ids: tuple[SubnetId, ...] = setting((), strict=False)
    """The 2 to 16 private or isolated subnets of the existing VPC. A change replaces an RDS Proxy."""

    route_table_ids: tuple[RouteTableId, ...] = setting((), strict=False)
    """The route table of each subnet, in the same order. It is not needed with s3_endpoint = "existing"."""

    s3_endpoint: Literal["create", "existing"] = setting("create")
    """The S3 gateway endpoint of the existing VPC: `create` one, or use an `existing` one. With `create`, all
    traffic to S3 from these route tables goes through it, and only requests for objects in buckets of this
    account pass."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if re.fullmatch(pattern("cidr"), self.cidr) and (why := cidr_problem(self.cidr)):
            yield "cidr", why
        if self.vpc_id is None:
            yield from self._own_zones()
            for name in ("subnet_ids", "route_table_ids"):
                if getattr(self, name):
                    yield name, "it is for an existing VPC: give vpc_id too, or leave it out"
            if self.s3_endpoint == "existing":
                yield "s3_endpoint", "it is for an existing VPC: give vpc_id too, or leave it out"
            return
        for name in ("cidr", "zones", "flow_log_days"):
            if name in self.model_fields_set:
                yield name, "it is for an own VPC: leave out either it or vpc_id"
        yield from self._lists()

    def _own_zones(self) -> Iterator[tuple[str, str]]:
        count = len(self.availability_zones)
        if count == 0:
            return
        if not 2 <= count <= ZONES_MAX or len(set(self.availability_zones)) < count:
            yield "availability_zones", f"2 or {ZONES_MAX} different zones are needed by an own VPC"
        elif "zones" in self.model_fields_set and self.zones != count:
            yield "zones", f"availability_zones has {count}: leave zones out, or let both agree"

    def _lists(self) -> Iterator[tuple[str, str]]:
        if not max(2, len(self.subnet_ids)) <= len(set(self.subnet_ids)) <= SUBNETS_MAX:
            yield "subnet_ids", f"2 to {SUBNETS_MAX} different subnets are needed"
        count = len(self.subnet_ids)
        if len(self.availability_zones) != count:
            yield "availability_zones", f"there must be one for each of subnet_ids, which are {count}"
        elif count > 1 and len(set(self.availability_zones)) < 2:
            yield "availability_zones", "two different zones or more are needed by the database"
        if len(self.route_table_ids) != count and (self.route_table_ids or self.s3_endpoint == "create"):
            needed = ' (or s3_endpoint = "existing")' if not self.route_table_ids else ""
            yield "route_table_ids", f"there must be one for each of subnet_ids, which are {count}{needed}"


class StorageSettings(Section):
    """The buckets, and the times for which they keep data."""

    payload_days: int = setting(90, ge=1, le=3_650)
    """The number of days that payloads are kept. Their objects are kept longer, by restore_days and one more
    day."""

    payloads_hot_seconds: int = setting(25_200, ge=0, le=31_536_000)
    """The time of day, in seconds after midnight UTC, from which maintenance offloads the payloads of the day
    before. The default, 25,200, is 7:00."""

    jobs_days: int = setting(30, ge=1, le=3_650)
    """The number of days that ended jobs are kept, with their requests, results and answers."""

    restore_days: int = setting(3, ge=1, le=35)
    """The number of days that a restore of the instance can go back, at most database.backup_days. Objects
    that compactions replace are kept, and paid for, one day longer."""

    key_arn: str | None = setting(None, change="replacement", pattern=pattern("key"))
    """An existing KMS key for the objects, whose policy leaves its use to IAM. Left out, the instance gets
    its own key."""

    access_log_days: int = setting(90, ge=1, le=3_650)
    """The number of days that the access logs of the buckets are kept."""

    incomplete_upload_days: int = setting(3, ge=1, le=30)
    """The number of days after which the parts of an interrupted upload are deleted."""


class GarbageSettings(Section):
    """Garbage collection."""

    every_minutes: EveryMinutes = setting(15)
    """The pause in minutes between two searches for unreferenced files."""

    memory_mb: MemoryMb = setting(512)
    """The memory of the lambda."""

    timeout_seconds: TimeoutSeconds = setting(300)
    """The time in seconds that a round may take. The next round continues the work that is left."""


class MaintenanceSettings(Section):
    """Maintenance: daily partitions, old jobs, payloads, and splits of full leaves.

    Compaction's engine makes the splits.
    """

    every_minutes: EveryMinutes = setting(60)
    """The pause in minutes between two rounds."""

    memory_mb: MemoryMb = setting(512)
    """The memory of the lambda."""

    timeout_seconds: TimeoutSeconds = setting(300)
    """The time in seconds that a round may take. A round spends the time that is left on offloading
    payloads."""


class PauseSettings(Section):
    """The command `dormouse pause`, and a lambda that stops the database if AWS starts it during a pause."""

    drain_seconds: int = setting(DRAIN_SECONDS, ge=0, le=86_400)
    """The time in seconds that a pause waits for running commits and runs, before it cancels the runs."""


class DeploymentSettings(Section):
    """The settings of one deployed instance.

    `commit`, `garbage`, `compaction`, `maintenance`, `query`, `rows`, `access`, `pause`, `monitoring`,
    `backup` and `audit` are deployed only if the file contains their tables. A table may be empty.
    """

    id: str = setting(change="replacement", pattern=pattern("id"), max_length=20)
    """The name of the instance, unique in the account and region."""

    account: str | None = setting(None, change="replacement", pattern=pattern("account"))
    """The AWS account. Left out, it is the account of the deployer's credentials."""

    region: str | None = setting(None, change="replacement", pattern=pattern("region"))
    """The AWS region. Left out, it is the region of the deployer's credentials."""

    qualifier: str | None = setting(None, change="replacement", pattern=pattern("qualifier"))
    """The qualifier of the CDK's bootstrap (`cdk bootstrap --qualifier`). Left out, it is the CDK's
    default."""

    architecture: Literal["arm64", "x86_64"] = setting("arm64")
    """The processor architecture of the lambdas and of EMR."""

    protected: bool = setting(False)
    """Protection of the instance. A protected instance cannot be destroyed, and its data outlives its
    stacks."""

    deploy_paused: bool = setting(False)
    """A first deploy that leaves the instance paused. It needs the table `pause`, unless the database pauses
    itself. If you change the setting, the next deploy pauses or resumes the instance. Other deploys leave a
    paused instance paused."""

    tags: dict[str, str] = setting({})
    """Tags of all resources, in addition to `dormouse:instance`."""

    iam: IamSettings = setting(IamSettings())
    network: NetworkSettings = setting(NetworkSettings())
    storage: StorageSettings = setting(StorageSettings())
    database: DatabaseSettings = setting(ServerlessDatabase(kind="serverless"))
    commit: CommitSettings | None = setting(None)
    garbage: GarbageSettings | None = setting(None)
    compaction: CompactionSettings | None = setting(None)
    maintenance: MaintenanceSettings | None = setting(None)
    query: QuerySettings | None = setting(None)
    rows: RowsSettings | None = setting(None)
    access: AccessSettings | None = setting(None)
    pause: PauseSettings | None = setting(None)
    monitoring: MonitoringSettings | None = setting(None)
    backup: BackupSettings | None = setting(None)
    audit: AuditSettings | None = setting(None)

    @property
    def has_commit_service(self) -> bool:
        return self.commit is not None and self.commit.service

    @property
    def has_tasks(self) -> bool:
        """True if tasks run on Fargate, whose image comes from ECR."""
        return self.query is not None or self.has_commit_service

    @property
    def version_days(self) -> int:
        """The number of days that S3 keeps a deleted object.

        It is one more than the days for which the instance can be restored, because S3 counts whole days.
        """
        return min(self.storage.restore_days, self.database.backup_days) + 1

    @property
    def scheduled_seconds(self) -> int:
        """The longest time in seconds that a scheduled lambda may run."""
        return max((one.timeout_seconds for one in (self.garbage, self.maintenance) if one), default=0)

    def _addresses(self) -> Iterator[tuple[str, str]]:
        """Yields a problem if Spark needs more addresses than the own VPC has."""
        network = self.network
        if self.compaction and network.vpc_id is None:
            zones = len(network.availability_zones) or network.zones
            for key, why in self.compaction.address_problems(network.cidr, zones):
                yield f"compaction.{key}", why

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if (self.account is None) != (self.region is None):
            given, other = ("account", "region") if self.region is None else ("region", "account")
            yield given, f"account and region go together: give {other} too, or neither"
        if self.deploy_paused and self.pause is None and not self.database.pauses_itself:
            why = "nothing would stop the database: add the table [pause], or run dormouse pause later"
            yield "deploy_paused", why
        yield from ((f"tags.{key}", why) for key, why in tag_problems(self.tags))
        zones = self.network.availability_zones
        region = self.region or (zones[0][:-1] if zones else None)
        if region and (trouble := no_certificates(region)):
            yield "region" if self.region else "network.availability_zones", trouble
        if others := [zone for zone in zones if zone[:-1] != region]:
            yield "network.availability_zones", f"{others[0]} is not of the region {region}"
        yield from self._elsewhere(region)
        yield from self._commit_service()
        service = self.commit if self.has_commit_service else None
        parts = (("commit", service), ("query", self.query), ("access", self.access))
        for name, part in (*parts, ("compaction", self.compaction)):
            # EMR Serverless has no such setting
            if part and self.network.vpc_id and getattr(part, "endpoints", "") is None:
                why = 'it must be "create" or "existing" in the VPC that network.vpc_id names'
                yield f"{name}.endpoints", why
        storage, days = self.storage, self.database.backup_days
        if "restore_days" in storage.model_fields_set and storage.restore_days > days:
            yield "storage.restore_days", f"it must be at most database.backup_days, which is {days}"
        if self.backup:
            found = self.backup.problems(self.account, self.region, self.version_days - 1)
            yield from ((f"backup.{key}", why) for key, why in found)
        yield from self._addresses()
        types = getattr(self.compaction, "instance_types", ())
        if wrong := [one for one in types if architecture_of(one) != self.architecture]:
            yield (
                "compaction.instance_types",
                f'{", ".join(wrong)}: other processors than architecture = "{self.architecture}"',
            )
        size = sum(len(f'{{"Key":"{key}","Value":"{value}"}},') for key, value in self.tags.items())
        if types and size > EMR_TAG_BYTES_MAX:
            yield (
                "tags",
                f"they are too long for clusters on EC2: {size:,} bytes as JSON, and at most "
                f"{EMR_TAG_BYTES_MAX} are allowed; shorten some, or leave some out",
            )
        if self.monitoring and self.commit:
            least = self.commit.visibility_seconds + CONNECT_SECONDS_MAX
            if self.monitoring.oldest_message_seconds_max <= least:
                yield (
                    "monitoring.oldest_message_seconds_max",
                    f"it must be more than {least}: a message that is retried comes again after "
                    f"{self.commit.visibility_seconds} s, {VISIBILITY_FACTOR} × commit.timeout_seconds and "
                    f"the window, and a database wakes in {CONNECT_SECONDS_MAX} s",
                )

    def _commit_service(self) -> Iterator[tuple[str, str]]:
        """Yields each setting that contradicts a service that commits, and the reason."""
        commit, query = self.commit, self.query
        if commit is None or not commit.service:
            return
        if self.database.pauses_itself:
            why = "it keeps the database awake: set database.min_acu to 0.5 or more, or service to false"
            yield "commit.service", why
        ours, theirs = commit.endpoints or "create", query and (query.endpoints or "create")
        is_chosen = commit.endpoints is not None or self.network.vpc_id is None
        if theirs and ours != theirs and is_chosen:
            why = f'it must be "{theirs}" like query.endpoints: the two services share endpoints'
            yield "commit.endpoints", why

    def _elsewhere(self, region: str | None) -> Iterator[tuple[str, str]]:
        """Yields each setting with an ARN of another region or account, and the reason why AWS refuses it."""
        storage, database, monitoring, query = self.storage, self.database, self.monitoring, self.query
        named = {
            "storage.key_arn": storage.key_arn,
            "database.key_arn": database.key_arn,
            "database.snapshot": database.snapshot,
            "monitoring.topic_arn": monitoring and monitoring.topic_arn,
            "monitoring.warning_topic_arn": monitoring and monitoring.warning_topic_arn,
            "query.certificate_arn": query and query.certificate_arn,
        }
        for name, arn in named.items():
            if region and arn and (there := arn.split(":")[3]) != region:
                yield name, f"it is in {there}, and must be in {region}, the instance's own region"
        for name, part in (("commit", self.commit), ("query", query)):
            image = part.image if part and part.endpoints != "existing" else None
            if region and image and (there := image.split(".")[3]) != region:
                yield f"{name}.image", f"it is in {there}, and the endpoints of ECR reach only {region}"
        there = (self.iam.permissions_boundary or "::::aws").split(":")[4]
        if self.account and there not in {self.account, "aws"}:
            yield "iam.permissions_boundary", f"it must be of the account {self.account}, not {there}"
