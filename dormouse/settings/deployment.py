"""The settings of a deployed instance: one TOML file, read by `config_file.load`.

Each field says what a change of it needs: `deploy`, a `cdk deploy`; `replacement`, a new resource in place of
the old. docs/reference/deployment-settings.md is made from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from dormouse.settings.database import CompactionSettings, DatabaseSettings, QuerySettings, ServerlessDatabase
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

# The settings of the way to the database from outside of its VPC.

ACCESS_HOST = "t4g.nano"
DISK_GB = 8
"""What its image has."""

ACCESS_TAG = "dormouse:access"
"""Of the host, with the instance's id: who may reach it has a right by this."""


class AccessSettings(Section):
    """A way to the database from outside of the VPC: a host for Session Manager's port forwarding."""

    endpoints: Literal["create", "existing"] | None = setting(None)
    """Whether the VPC gets the two interface endpoints that Session Manager needs, or has a way to it.
    `create` in an own VPC. An existing one needs a word: all in it would use them."""


# The settings of row tables.

DATABASES_MAX = 16


class RowsSettings(Section):
    """Row tables: the databases in which they are indexed, and the query service's work on them."""

    databases: int = setting(2, ge=1, le=DATABASES_MAX)
    """How many databases have the indexes, copies of the current rows; tables are spread by load."""

    own_clusters: bool = setting(False)
    """Whether each of these databases is a serverless cluster of its own, which pauses itself when it is not
    asked; else they are databases of the instance's cluster. Indexes are made anew when it changes."""

    max_acu: Acu = setting(4)
    """The most capacity of each cluster of its own."""

    job_threads: int = setting(4, ge=0, le=64)
    """How many jobs a task of the query service runs at once: changes and loads of row tables, the work on
    their indexes. It logs in to the database as who may change rows then; with 0 it only reads."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if "max_acu" in self.model_fields_set and not self.own_clusters:
            yield "max_acu", "it is of clusters of their own: set own_clusters to true, or leave it out"


# The settings of the stack that watches an instance.


class MonitoringSettings(Section):
    """Dashboard, alarms and a budget."""

    email: str | None = setting(None, change="replacement", pattern=pattern("email"))
    """The address for alarms, once confirmed; left out, the topic has no subscriber until you add one."""

    topic_arn: str | None = setting(None, pattern=pattern("topic"))
    """An existing SNS topic for alarms and the budget, whose policy lets CloudWatch and AWS Budgets in."""

    warning_topic_arn: str | None = setting(None, pattern=pattern("topic"))
    """An existing SNS topic for alarms that begin with `Warning`, which can wait for the next working day."""

    slack_workspace: str | None = setting(None, pattern=pattern("slack"))
    """The id of a Slack workspace that AWS Chatbot (Amazon Q Developer) was once let into in its console."""

    slack_channel: str | None = setting(None, pattern=pattern("slack"))
    """The id of the channel there that is told of alarms."""

    teams_tenant: str | None = setting(None, change="replacement", pattern=pattern("teams"))
    """The id of a Microsoft Teams tenant that AWS Chatbot was once let into, likewise."""

    teams_team: str | None = setting(None, change="replacement", pattern=pattern("teams"))
    """The id of the team there, as that console shows it."""

    teams_channel: str | None = setting(None, pattern=pattern("teams_channel"))
    """The id of the team's channel that is told of alarms."""

    budget_usd_month: float | None = setting(None, gt=0)
    """The monthly budget whose excess is reported; left out, there is no budget."""

    oldest_message_seconds_max: int = setting(900, ge=60, le=86_400)
    """The age of the oldest commit request that raises an alarm."""

    connections_max: int = setting(500, ge=10, le=5_000)
    """The number of database connections that raises an alarm."""

    orphaned_gb_max: float = setting(100, gt=0)
    """How many GB of objects that nothing refers to raise an alarm."""

    payload_backlog_days_max: int = setting(3, ge=1)
    """How many days whose payloads wait to be offloaded raise an alarm."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.topic_arn and self.email:
            yield "email", "it is of an own topic: leave it out, or topic_arn"
        for names in (("slack_workspace", "slack_channel"), ("teams_tenant", "teams_team", "teams_channel")):
            given = [name for name in names if getattr(self, name) is not None]
            if given and (missing := [name for name in names if name not in given]):
                together = f"{', '.join(names[:-1])} and {names[-1]} go together"
                yield given[0], f"{together}: give {' and '.join(missing)} too, or none"


# The settings of what is kept beside the instance: backups, a copy in another region, a log of who read.


class BackupSettings(Section):
    """AWS Backup: snapshots of the database by day, the data bucket at any moment; a copy in another region.

    AWS backs no stopped database up: while the instance is paused there are no new snapshots of it, and the
    old ones expire.
    """

    retention_days: int = setting(14, ge=1, le=35)
    """How many days backups are kept, also in the other region; how far back both can be restored."""

    hour_utc: int = setting(3, ge=0, le=23)
    """The hour in which the daily snapshot of the database begins."""

    objects: bool = setting(True)
    """Whether the data bucket is backed up, too; if not, retention_days is at most storage.restore_days."""

    copy_region: str | None = setting(None, change="replacement", pattern=pattern("region"))
    """Another region that gets each object as it is written, and each snapshot of the database; account and
    region must be given, too, and `cdk bootstrap` have been run there."""

    def problems(
        self, account: str | None, region: str | None, restore_days: int
    ) -> Iterator[tuple[str, str]]:
        """What does not go with the other tables: the setting, and why."""
        if not self.objects and self.retention_days > restore_days:
            yield (
                "retention_days",
                f"it must be at most storage.restore_days, which is {restore_days}, unless objects = true: "
                "the bucket forgets before what older snapshots of the database refer to",
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
    """CloudTrail's data events of the data bucket: who wrote, or read, which object."""

    events: Literal["write", "all"] = setting("write")
    """Writes and deletions, or reads as well, of which queries and compactions make many."""

    log_days: int = setting(90, ge=1, le=3_650)
    """How long they are kept."""


# The settings of what an organization demands of roles.


class IamSettings(Section):
    """All roles of the instance, and policies for people."""

    permissions_boundary: str | None = setting(None, pattern=pattern("policy"))
    """A policy that bounds what every role may do."""

    role_path: str = setting("/", pattern=pattern("role_path"))
    """The path of all roles. With another, or with another role_prefix, a deploy makes other roles."""

    role_prefix: str | None = setting(None, pattern=pattern("role_prefix"))
    """What the names of all roles begin with; left out, CloudFormation names them."""

    policies: tuple[Literal["operator", "reader"], ...] = setting((), strict=False)
    """Managed policies to make for people: an `operator` pauses, resumes and handles dead letters; a `reader`
    reads tables."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if len(set(self.policies)) < len(self.policies):
            yield "policies", "each is named once"


RECEIVES_LEAST = 50
ZONES_MAX = 3
"""Of an own VPC."""

SUBNETS_MAX = 16
"""Of a lambda."""

EMR_TAG_BYTES_MAX = 680
"""Lambda takes 4 KB of environment, in which the tags of clusters on EC2 are; all else is up to 3.4 KB."""


class NetworkSettings(Section):
    """The network: a VPC of its own, or an existing one by id."""

    cidr: str = setting("10.40.0.0/16", change="replacement", pattern=pattern("cidr"))
    """The addresses of the own VPC."""

    zones: int = setting(2, ge=2, le=ZONES_MAX)
    """Over how many availability zones the own VPC is spread; it can be raised, not lowered. If
    availability_zones are given, it is their number."""

    flow_log_days: Literal[7, 14, 30, 60, 90, 180, 365] = setting(30)
    """How many days the own VPC's flow log is kept."""

    availability_zones: tuple[ZoneName, ...] = setting((), strict=False)
    """The zone of each of subnet_ids, in the same order. Of an own VPC: its 2 or 3 zones, the first of the
    region if left out; a third can be added behind, for others deploy another instance."""

    vpc_id: str | None = setting(None, change="replacement", pattern=pattern("vpc"))
    """An existing VPC; the settings below go with it, those above but availability_zones do not."""

    subnet_ids: tuple[SubnetId, ...] = setting((), strict=False)
    """Its private or isolated subnets, 2 to 16. An RDS Proxy is replaced when they change."""

    route_table_ids: tuple[RouteTableId, ...] = setting((), strict=False)
    """The route table of each subnet, in the same order; not needed with s3_endpoint = "existing"."""

    s3_endpoint: Literal["create", "existing"] = setting("create")
    """Whether the existing VPC gets an S3 gateway endpoint, or has one. `create` takes all that is sent to S3
    from these route tables, also by others, and lets through only what is for objects in buckets of this
    account."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if re.fullmatch(pattern("cidr"), self.cidr) and (why := cidr_problem(self.cidr)):
            yield "cidr", why
        if self.vpc_id is None:
            yield from self._own_zones()
            for name in ("subnet_ids", "route_table_ids"):
                if getattr(self, name):
                    yield name, "it is of an existing VPC: give vpc_id too, or leave it out"
            if self.s3_endpoint == "existing":
                yield "s3_endpoint", "it is of an existing VPC: give vpc_id too, or leave it out"
            return
        for name in ("cidr", "zones", "flow_log_days"):
            if name in self.model_fields_set:
                yield name, "it is of an own VPC: leave it out, or vpc_id"
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
    """The buckets."""

    payload_days: int = setting(90, ge=1, le=3_650)
    """How long payloads are kept; their objects restore_days and a day longer."""

    payloads_hot_seconds: int = setting(25_200, ge=0, le=31_536_000)
    """The time of day, in seconds after midnight UTC, from which payloads of the day before are offloaded, by
    the next round of maintenance; 25,200 is 7:00."""

    jobs_days: int = setting(30, ge=1, le=3_650)
    """How long jobs are told of that ended, with their requests, results and answers."""

    restore_days: int = setting(3, ge=1, le=35)
    """How far back the instance can be restored, at most database.backup_days: objects that compactions
    replace are kept a day longer, and paid for."""

    key_arn: str | None = setting(None, change="replacement", pattern=pattern("key"))
    """An existing KMS key for the objects, whose policy leaves its use to IAM; left out, one of its own."""

    access_log_days: int = setting(90, ge=1, le=3_650)
    """How long the access logs of the buckets are kept."""

    incomplete_upload_days: int = setting(3, ge=1, le=30)
    """After how many days what is left of an interrupted upload is deleted."""


class CommitSettings(Section):
    """The commit queues and the lambda that applies commit requests."""

    queues: int = setting(1, ge=1, le=16)
    """Over how many queues the tables are spread. Empty them before you change it."""

    concurrency: int = setting(10, ge=2, le=1_000)
    """How many lambdas work on one queue at once, at most."""

    batch_size: int = setting(500, ge=1, le=10_000)
    """How many requests a lambda gets at once, at most."""

    batching_window_seconds: int = setting(1, ge=0, le=300)
    """How long a batch is collected; it must not be 0 for more than 10 requests."""

    memory_mb: MemoryMb = setting(1_024)
    """The memory of the lambda, which also sets its share of a CPU."""

    timeout_seconds: TimeoutSeconds = setting(60)
    """How long the lambda may work on a batch; messages of one that fails come again after six times that."""

    receives_max: int = setting(RECEIVES_LEAST, ge=RECEIVES_LEAST, le=1_000)
    """How often a message is tried before it is a dead letter; a request waits for its inputs meanwhile."""

    retention_days: int = setting(14, ge=1, le=14)
    """How long messages wait, also while the instance is paused."""

    @property
    def visibility_seconds(self) -> int:
        """How long a message that a lambda has is hidden from others."""
        return VISIBILITY_FACTOR * self.timeout_seconds + self.batching_window_seconds

    def contradictions(self) -> Iterator[tuple[str, str]]:
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
                f"({VISIBILITY_FACTOR} × timeout_seconds and the window), and retention_days end before"
            )
            yield "receives_max", why


class GarbageSettings(Section):
    """Garbage collection."""

    every_minutes: EveryMinutes = setting(15)
    """How often files that nothing refers to are looked for."""

    memory_mb: MemoryMb = setting(512)
    """The memory of the lambda."""

    timeout_seconds: TimeoutSeconds = setting(300)
    """How long a round may take; what is left over waits for the next."""


class MaintenanceSettings(Section):
    """Upkeep: days of removals, jobs, payloads, and splits of full partitions, run where compactions are."""

    every_minutes: EveryMinutes = setting(60)
    """How often it is looked for."""

    memory_mb: MemoryMb = setting(512)
    """The memory of the lambda."""

    timeout_seconds: TimeoutSeconds = setting(300)
    """How long a round may take; what is left of it goes into cooling payloads down."""


class PauseSettings(Section):
    """`dormouse pause`, and what keeps a paused instance asleep when AWS starts its database."""

    drain_seconds: int = setting(DRAIN_SECONDS, ge=0, le=86_400)
    """How long a pause waits for running commits and runs, before it cancels the runs."""


class DeploymentSettings(Section):
    """One deployed instance. `commit`, `garbage`, `compaction`, `maintenance`, `query`, `rows`, `access`,
    `pause`, `monitoring`, `backup`, `audit` are deployed when their table is in the file, even if empty."""

    id: str = setting(change="replacement", pattern=pattern("id"), max_length=20)
    """The name of the instance, one of its own in the account and region."""

    account: str | None = setting(None, change="replacement", pattern=pattern("account"))
    """The AWS account; left out, that of the deployer's credentials."""

    region: str | None = setting(None, change="replacement", pattern=pattern("region"))
    """The AWS region; left out, that of the deployer's credentials."""

    qualifier: str | None = setting(None, change="replacement", pattern=pattern("qualifier"))
    """That of the CDK's bootstrap (`cdk bootstrap --qualifier`); left out, that of the CDK."""

    architecture: Literal["arm64", "x86_64"] = setting("arm64")
    """The processors of lambdas and of EMR."""

    protected: bool = setting(False)
    """Whether the instance refuses to be destroyed, and its data outlives its stacks."""

    deploy_paused: bool = setting(False)
    """Whether the first deploy leaves the instance paused, which needs the table `pause` unless the database
    pauses itself. A change of it pauses or resumes with the next deploy; all others leave a paused instance
    paused."""

    tags: dict[str, str] = setting({})
    """Tags of all resources, beside `dormouse:instance`."""

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
    def version_days(self) -> int:
        """How long an object outlives its deletion: a day more than the instance can be restored, since S3
        counts whole days."""
        return min(self.storage.restore_days, self.database.backup_days) + 1

    @property
    def scheduled_seconds(self) -> int:
        """How long what a schedule calls may run, at most."""
        return max((one.timeout_seconds for one in (self.garbage, self.maintenance) if one), default=0)

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
        for name, part in (("query", self.query), ("access", self.access)):
            if part and self.network.vpc_id and part.endpoints is None:
                why = 'it must be "create" or "existing" in the VPC that network.vpc_id names'
                yield f"{name}.endpoints", why
        storage, days = self.storage, self.database.backup_days
        if "restore_days" in storage.model_fields_set and storage.restore_days > days:
            yield "storage.restore_days", f"it must be at most database.backup_days, which is {days}"
        if self.backup:
            found = self.backup.problems(self.account, self.region, self.version_days - 1)
            yield from ((f"backup.{key}", why) for key, why in found)
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
                f"they are too long for clusters on EC2: with all that belongs to them {size:,} bytes, and "
                f"{EMR_TAG_BYTES_MAX} may be; shorten some, or leave some out",
            )
        if self.monitoring and self.commit:
            least = self.commit.visibility_seconds + CONNECT_SECONDS_MAX
            if self.monitoring.oldest_message_seconds_max <= least:
                yield (
                    "monitoring.oldest_message_seconds_max",
                    f"it must be more than {least}: a message that is tried again comes after "
                    f"{self.commit.visibility_seconds} s, {VISIBILITY_FACTOR} × commit.timeout_seconds and "
                    f"the window, and a database wakes in {CONNECT_SECONDS_MAX} s",
                )

    def _elsewhere(self, region: str | None) -> Iterator[tuple[str, str]]:
        """What is named by its ARN, and AWS takes from the instance's own region or account only."""
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
                yield name, f"it is of {there}, and must be of {region}, the instance's own region"
        there = (self.iam.permissions_boundary or "::::aws").split(":")[4]
        if self.account and there not in {self.account, "aws"}:
            yield "iam.permissions_boundary", f"it must be of the account {self.account}, not {there}"
