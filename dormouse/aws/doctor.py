"""Checks of what a deploy needs on this machine and in the account. They change nothing."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dormouse.aws.aws import Aws, AwsRefused, open_session
from dormouse.aws.database import left_behind, snapshot, taken, version_numbers
from dormouse.aws.drain import depth
from dormouse.aws.instance import how_to_delete, left_stacks
from dormouse.aws.switches import stack
from dormouse.errors import DormouseError
from dormouse.settings.database import EmrServerlessCompaction, FixedDatabase
from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.resources import (
    INSTANCE_TAG,
    CommitResources,
    DatabaseResources,
    resources_parameter,
    stack_name,
    state_parameter,
)
from dormouse.settings.section import no_certificates

NODE_LEAST = 20
COMMAND_SECONDS_MAX = 60
INSTALL_NODE = "install Node 20 or later from https://nodejs.org, or put .venv/bin, which has it, on PATH"
LAMBDAS = ("migrate", "commit", "garbage", "compaction", "runs", "maintenance", "pause")
Result = Literal["ok", "warning", "wrong"]

BOOTSTRAP_LEAST = 6
QUALIFIER = "hnb659fds"
"""The qualifier of the CDK's bootstrap, unless the settings have another."""

BUCKET = "cdk-{qualifier}-assets-{account}-{region}"
OWN_KEY = "alias/aws/s3"
"""The KMS key of S3 itself. AWS lets every reader of an object use it."""

POOR_ZONES = frozenset({"use1-az3"})
"""Ids of zones that lack services an instance needs. Names of zones differ between accounts."""

BOOTSTRAP = "/cdk-bootstrap/{qualifier}/version"

# service, code, description → quotas that a deploy may reach
LAMBDA_CONCURRENCY = ("lambda", "L-B99A9384", "lambdas at once")
VPCS = ("vpc", "L-F678F1CE", "VPCs")
CLUSTERS = ("rds", "L-952B80B8", "database clusters")
EMR_VCPU = ("emr-serverless", "L-D05C8A75", "vCPUs of EMR Serverless at once")
FARGATE_VCPU = ("fargate", "L-3032A538", "vCPUs of Fargate at once")

ENDPOINTS = {
    "query": frozenset({"ecr.api", "ecr.dkr", "logs", "secretsmanager"}),
    "access": frozenset({"ssm", "ssmmessages"}),
    "compaction": frozenset({"emr-service-cell01"}),
}
"""The endpoints that tasks on Fargate, the agent of Session Manager and clusters of EMR on EC2 call."""


@dataclass(frozen=True)
class Check:
    name: str
    result: Result
    found: str
    mend: str = ""
    """The remedy; empty if the check is fine."""

    @classmethod
    def of(cls, name: str, fine: str, trouble: str | None, mend: str, result: Result = "wrong") -> Check:
        """Returns a check. Its text is `fine`, or `trouble` with `result` if there is trouble."""
        return cls(name, result, trouble, mend) if trouble else cls(name, "ok", fine)


def examine(
    settings: DeploymentSettings,
    *,
    region: str | None = None,
    profile: str | None = None,
    root: Path,
    session: Any = None,
) -> list[Check]:
    """Returns every check, in order. Without credentials, the checks of the account are left out."""
    checks = [*machine(root), *packages(settings, root), *image(settings, root)]
    try:
        session = session or open_session(region or settings.region, profile)
        aws = Aws(session)
        account, here = aws.account, aws.region
    except DormouseError as error:
        mend = "fix this, then run this command again to check the account too"
        return [*checks, Check("credentials", "wrong", str(error), mend)]
    checks.append(Check("credentials", "ok", f"account {account}, {here}"))
    if settings.account and (settings.account, settings.region) != (account, here):
        wanted = f"the settings are for account {settings.account}, {settings.region}"
        return [*checks, Check("account", "wrong", wanted, "use the --profile and --region of that account")]
    if trouble := no_certificates(here):
        return [
            *checks,
            Check("certificates", "wrong", trouble, "append the certificates, or choose another region"),
        ]
    return [*checks, *_Account(settings, aws).checks()]


class _Account:
    def __init__(self, settings: DeploymentSettings, aws: Aws) -> None:
        self.settings, self.aws = settings, aws

    def checks(self) -> Iterator[Check]:
        for name, look in self._looks():
            try:
                yield from look()
            except AwsRefused as refused:
                mend = "get that permission, or check by hand"
                yield Check(name, "warning", f"not checked: {refused}", mend)
            except DormouseError as error:
                yield Check(name, "wrong", str(error), "fix this, then run this command again")

    def _looks(self) -> Iterator[tuple[str, Callable[[], Iterator[Check]]]]:
        settings, aws = self.settings, self.aws
        yield "bootstrap", partial(self._bootstrap, aws)
        if settings.backup and (elsewhere := settings.backup.copy_region):
            yield "bootstrap", partial(self._bootstrap, aws.of_region(elsewhere))
        if boundary := settings.iam.permissions_boundary:
            yield "permissions boundary", partial(self._boundary, boundary)
        yield "state", self._state
        yield "snapshot", self._snapshot
        yield "other clusters", self._other_clusters
        yield "other snapshots", self._other_snapshots
        yield "queues", self._queues
        yield "other stacks", self._other_stacks
        yield "engine version", self._engine
        in_use = partial(aws.all, "rds", "describe_db_clusters", "DBClusters")
        rows = settings.rows
        clusters = 1 + (rows.databases if rows is not None and rows.own_clusters else 0)
        yield "quotas of the database", lambda: self._quota(CLUSTERS, clusters, len(in_use()))
        if settings.network.vpc_id is None:
            vpcs = partial(aws.all, "ec2", "describe_vpcs", "Vpcs")
            yield "quotas of the network", lambda: self._quota(VPCS, 1, len(vpcs()))
            yield "zones", self._zones
        else:
            yield "vpc", self._vpc
        if commit := settings.commit:
            yield (
                "quota of lambdas",
                partial(self._quota, LAMBDA_CONCURRENCY, commit.queues * commit.concurrency),
            )
        if compaction := settings.compaction:
            yield "bootstrap bucket", self._bucket
        if isinstance(compaction, EmrServerlessCompaction):
            yield "quota of EMR Serverless", partial(self._quota, EMR_VCPU, compaction.vcpu_max)
        if settings.backup:
            yield "backups", self._backups
        if query := settings.query:
            yield "clients", self._clients
            vcpus = -(-query.tasks_max * query.cpu // 1_024)
            yield "quota of Fargate", partial(self._quota, FARGATE_VCPU, vcpus)
        if settings.monitoring:
            yield "alarms", self._alarms

    def _bootstrap(self, aws: Aws) -> Iterator[Check]:
        qualifier, where = self.settings.qualifier, aws.region
        version = aws.parameter(BOOTSTRAP.format(qualifier=qualifier or QUALIFIER))
        named = f" with the qualifier {qualifier}" if qualifier else ""
        trouble = None if version else f"the CDK is not bootstrapped in {where}{named}"
        if version and not (version.isdigit() and int(version) >= BOOTSTRAP_LEAST):
            trouble = f"version {version} in {where}, but {BOOTSTRAP_LEAST} is needed"
        option = f" --qualifier {qualifier}" if qualifier else ""
        mend = f"run npx cdk bootstrap aws://{self.aws.account}/{where}{option}"
        yield Check.of("bootstrap", f"version {version} in {where}", trouble, mend)

    def _boundary(self, policy: str) -> Iterator[Check]:
        try:
            self.aws.call("iam", "get_policy", PolicyArn=policy)
        except AwsRefused as refused:
            if refused.code != "NoSuchEntity":
                raise
            mend = "create it, or name another policy in iam.permissions_boundary"
            yield Check("permissions boundary", "wrong", f"there is no policy {policy}", mend)
        else:
            yield Check("permissions boundary", "ok", f"{policy} exists")

    def _bucket(self) -> Iterator[Check]:
        """Checks the encryption of the bootstrap's bucket.

        Spark reads its archive from that bucket, and has the right to use only the KMS key of S3 itself.
        """
        qualifier = self.settings.qualifier or QUALIFIER
        bucket = BUCKET.format(qualifier=qualifier, account=self.aws.account, region=self.aws.region)
        try:
            found = self.aws.call("s3", "get_bucket_encryption", Bucket=bucket)
        except AwsRefused as refused:
            if refused.code == "NoSuchBucket":
                return  # the check of the bootstrap reports it
            raise
        rules = found["ServerSideEncryptionConfiguration"]["Rules"]
        keys = [rule.get("ApplyServerSideEncryptionByDefault", {}).get("KMSMasterKeyID") for rule in rules]
        others = [key for key in keys if key and not key.endswith(OWN_KEY)]
        said = f"{bucket} is encrypted with the key {', '.join(others)}"
        trouble = f"{said}: Spark's role cannot read its archive there" if others else None
        mend = "allow the account to use that key through S3, or bootstrap with an AWS managed key"
        fine = f"{bucket} has no key of its own"
        yield Check.of("bootstrap bucket", fine, trouble, mend, "warning")

    def _backups(self) -> Iterator[Check]:
        """Checks that AWS Backup is enabled for Aurora and S3.

        AWS Backup skips a disabled service without an error.
        """
        wanted = ["Aurora", *(["S3"] if self.settings.backup and self.settings.backup.objects else [])]
        found = self.aws.call("backup", "describe_region_settings")["ResourceTypeOptInPreference"]
        lacking = [one for one in wanted if not found.get(one)]
        given = ",".join(f"{one}=true" for one in lacking)
        mend = f"run aws backup update-region-settings --resource-type-opt-in-preference {given}"
        trouble = f"AWS Backup is not enabled for {' and '.join(lacking)} in this region"
        fine = f"AWS Backup is enabled for {' and '.join(wanted)}"
        yield Check.of("backups", fine, trouble if lacking else None, mend)

    def _state(self) -> Iterator[Check]:
        if (state := self.aws.parameter(state_parameter(self.settings.id))) is not None:
            said = "the instance is paused: a deploy leaves it paused, and may not change its database"
            trouble = said if state == "paused" else None
            mend = "resume it before a deploy of another version, other tags or another database"
            yield Check.of("state", f"the desired state is {state}", trouble, mend, "warning")

    def _snapshot(self) -> Iterator[Check]:
        """Checks the snapshot in the settings.

        Without this check, only the deploy itself would refuse a wrong one.
        """
        name, database, made = stack_name(self.settings.id, "database"), self.settings.database, None
        if stack(self.aws, name) is not None:
            template = self.aws.call("cloudformation", "get_template", StackName=name)["TemplateBody"]
            given = (one.get("Properties", {}) for one in template["Resources"].values())
            made = next((one["SnapshotIdentifier"] for one in given if "SnapshotIdentifier" in one), None)
        if made and not database.snapshot:
            what = "the database was made from a snapshot: a deploy without it is refused"
            mend = f'keep database.snapshot = "{made}", or name a newer one'
            yield Check("snapshot", "wrong", what, mend)
        elif database.snapshot and database.snapshot != made:
            yield self._restorable()

    def _restorable(self) -> Check:
        """Returns a check of whether a deploy can create the cluster from the snapshot in the settings."""
        arn, wanted = str(self.settings.database.snapshot), self.settings.database.engine_version
        if (owner := arn.split(":")[4]) != self.aws.account:
            mend = f"its version must not be later than database.engine_version, {wanted}"
            return Check("snapshot", "warning", f"not checked: it belongs to the account {owner}", mend)
        # names that AWS Backup gives contain a colon
        if (found := snapshot(self.aws, arn.split(":", 6)[6])) is None:
            return Check("snapshot", "wrong", f"there is no snapshot {arn}", "correct database.snapshot")
        version = str(found["EngineVersion"])
        fine = f"it is of Aurora PostgreSQL {version}"
        newer = f"{fine}, which AWS cannot restore as the earlier version {wanted}"
        trouble = newer if version_numbers(version) > version_numbers(wanted) else None
        return Check.of("snapshot", fine, trouble, f'set database.engine_version = "{version}"')

    def _other_snapshots(self) -> Iterator[Check]:
        """Checks for snapshots that earlier restores took.

        RDS keeps them, and charges for them, until they are deleted.
        """
        found = [
            str(one["DBClusterSnapshotIdentifier"])
            for one in taken(self.aws, self.settings.id)
            if one["DBClusterSnapshotArn"] != self.settings.database.snapshot
        ]
        trouble = (
            f"{', '.join(found)}, taken by a restore, costs money until it is deleted" if found else None
        )
        mend = "run aws rds delete-db-cluster-snapshot when no deploy needs it"
        yield Check.of("other snapshots", "there are none", trouble, mend, "warning")

    def _other_clusters(self) -> Iterator[Check]:
        if (recorded := self.aws.parameter(resources_parameter(self.settings.id, "database"))) is None:
            return
        others = left_behind(self.aws, self.settings.id, DatabaseResources.model_validate_json(recorded))
        trouble = f"{', '.join(others)} is no longer used but still costs money" if others else None
        mend = "delete it when the instance works without it: AWS starts a stopped cluster again after "
        "seven days"
        yield Check.of("other clusters", "there are none", trouble, mend, "warning")

    def _other_stacks(self) -> Iterator[Check]:
        """Checks for stacks that the settings no longer have, which a deploy does not delete."""
        left = left_stacks(self.aws, self.settings.id, self.settings.parts)
        trouble = f"{', '.join(left)} stays when its table is not in the settings, and costs money"
        advice = "; ".join(how_to_delete(stack, self.aws.region) for stack in left)
        yield Check.of("other stacks", "there are none", trouble if left else None, advice, "warning")

    def _queues(self) -> Iterator[Check]:
        """Checks for messages in deployed queues that are no longer in the settings.

        A deploy would delete or abandon these messages.
        """
        if (recorded := self.aws.parameter(resources_parameter(self.settings.id, "commit"))) is None:
            return
        ours, wanted = CommitResources.model_validate_json(recorded), self.settings.commit
        number = wanted.queues if wanted else 0
        urls = [*ours.queues[number:], *ours.dead_letters[number:]]
        counts = {url.rpartition("/")[2]: sum(depth(self.aws, url).values()) for url in urls}
        full = [f"about {count:,} in {name}" for name, count in counts.items() if count]
        trouble = f"commit.queues leaves out queues with messages: {', '.join(full)}" if full else None
        mend = "wait until they are applied; for dead letters, see dormouse dead-letters"
        yield Check.of("queues", "no removed queue has messages", trouble, mend)

    def _zones(self) -> Iterator[Check]:
        """Checks the zones of the instance's own VPC.

        They are those in the settings, else CloudFormation's choice. That choice, `Fn::GetAZs`, changes with
        the account's default subnets and the region's zones. CloudFormation refuses to replace a subnet by
        one in another zone with the same address range.
        """
        network = self.settings.network
        ordinary = [{"Name": "zone-type", "Values": ["availability-zone"]}]
        zones = self.aws.call("ec2", "describe_availability_zones", Filters=ordinary)["AvailabilityZones"]
        ids = {one["ZoneName"]: one["ZoneId"] for one in zones}
        names = list(network.availability_zones)
        if not names:
            default = [{"Name": "default-for-az", "Values": ["true"]}]
            subnets = self.aws.all("ec2", "describe_subnets", "Subnets", Filters=default)
            names = sorted({one["AvailabilityZone"] for one in subnets} or ids)[: network.zones]
            if len(names) < network.zones:  # Fn::Select would fail
                here = f"this account has only {len(names)} in {self.aws.region}"
                what = f"network.zones = {network.zones}, but {here}"
                mend = "lower network.zones, or list the available zones in network.availability_zones"
                yield Check("zones", "wrong", what, mend)
        there = self._deployed_zones()
        if names[: len(there)] != there[: len(names)]:
            what = f"{self.settings.id} is in {', '.join(there)}; a deploy would now take {', '.join(names)}"
            listed = ", ".join(f'"{name}"' for name in there)
            yield Check("zones", "wrong", what, f"set network.availability_zones = [{listed}]")
        for name in names:
            if (zone := ids.get(name)) is None:
                what = f"{name} is not a zone of {self.aws.region} in this account"
                yield Check("zone", "wrong", what, "correct network.availability_zones")
            else:
                lacks = f"{name} is {zone} in this account, which lacks services that are needed"
                trouble, mend = (
                    lacks if zone in POOR_ZONES else None,
                    "name others in network.availability_zones",
                )
                yield Check.of("zone", f"{name}, {zone}", trouble, mend, "warning")

    def _deployed_zones(self) -> list[str]:
        """Returns the zones of the instance's subnets, in the order of their names; empty before a deploy."""
        ours = [{"Name": f"tag:{INSTANCE_TAG}", "Values": [self.settings.id]}]
        found = {
            tag["Value"]: subnet["AvailabilityZone"]
            for subnet in self.aws.all("ec2", "describe_subnets", "Subnets", Filters=ours)
            for tag in subnet.get("Tags", ())
            if tag["Key"] == "Name"
        }
        return [found[name] for name in sorted(found)]

    def _engine(self) -> Iterator[Check]:
        database, region = self.settings.database, self.aws.region
        wanted = {"Engine": "aurora-postgresql", "EngineVersion": database.engine_version}
        found = self.aws.call("rds", "describe_db_engine_versions", **wanted)["DBEngineVersions"]
        fine = f"Aurora PostgreSQL {database.engine_version}"
        lacking = None if found else f"{fine} is not offered in {region}"
        yield Check.of("engine version", fine, lacking, "name another in database.engine_version")
        if not found:
            return
        name = f"db.{database.instance_class}" if isinstance(database, FixedDatabase) else "db.serverless"
        given = {"DBInstanceClass": name, "MaxRecords": 20, **wanted}
        found = self.aws.call("rds", "describe_orderable_db_instance_options", **given)
        lacking = f"{name} is not offered with {database.engine_version} in {region}"
        offers, mend = found["OrderableDBInstanceOptions"], "name another class, version or region"
        yield Check.of("instance class", name, None if offers else lacking, mend)

    def _vpc(self) -> Iterator[Check]:
        network = self.settings.network
        vpcs = self._in_vpc("describe_vpcs", "Vpcs")
        if not vpcs:
            yield Check("vpc", "wrong", f"there is no VPC {network.vpc_id} here", "correct network.vpc_id")
            return
        subnets = {one["SubnetId"]: one for one in self._in_vpc("describe_subnets", "Subnets")}
        yield from self._subnets(subnets)
        tables = self._tables()
        yield from self._routes(tables)
        endpoints = self._in_vpc("describe_vpc_endpoints", "VpcEndpoints")
        yield self._endpoint([one for one in endpoints if one["ServiceName"].endswith(".s3")], tables)
        for name in ENDPOINTS:
            part = getattr(self.settings, name)
            if part is not None and not isinstance(part, EmrServerlessCompaction):
                yield self._ways(name, part.endpoints == "create", endpoints)

    def _subnets(self, subnets: dict[str, Any]) -> Iterator[Check]:
        network = self.settings.network
        for subnet, zone in zip(network.subnet_ids, network.availability_zones, strict=True):
            if (found := subnets.get(subnet)) is None:
                what = f"{subnet} is not a subnet of {network.vpc_id}"
                yield Check("subnet", "wrong", what, "correct network.subnet_ids")
            else:
                real, mend = found["AvailabilityZone"], "correct network.availability_zones"
                trouble = f"{subnet} is in {real}, not {zone}" if real != zone else None
                yield Check.of("subnet", f"{subnet} in {zone}", trouble, mend)

    def _tables(self) -> dict[str, str]:
        """Returns the route table of each subnet.

        A subnet without one of its own has the main table of the VPC.
        """
        tables = self._in_vpc("describe_route_tables", "RouteTables")
        links = [(table["RouteTableId"], link) for table in tables for link in table.get("Associations", ())]
        used = {link["SubnetId"]: table for table, link in links if "SubnetId" in link}
        main = next((table for table, link in links if link.get("Main")), "none")
        return {subnet: used.get(subnet, main) for subnet in self.settings.network.subnet_ids}

    def _routes(self, tables: dict[str, str]) -> Iterator[Check]:
        network = self.settings.network
        for subnet, table in zip(network.subnet_ids, network.route_table_ids, strict=False):
            real = tables[subnet]
            other = f"{subnet} has the route table {real}, not {table}" if real != table else None
            yield Check.of("route table", f"{table} of {subnet}", other, "correct network.route_table_ids")

    def _endpoint(self, endpoints: list[Any], tables: dict[str, str]) -> Check:
        """Checks the gateway endpoint to S3, of which a route table can have only one."""
        gateways = [one for one in endpoints if one.get("VpcEndpointType") == "Gateway"]
        ways = {table: one["VpcEndpointId"] for one in gateways for table in one.get("RouteTableIds", ())}
        has = {table: ways[table] for table in tables.values() if table in ways}
        if self.settings.network.s3_endpoint == "create":
            trouble = f"{', '.join(has)} has an S3 gateway endpoint already" if has else None
            mend = 'set network.s3_endpoint = "existing"'
            return Check.of("s3 endpoint", "it will be made", trouble, mend)
        lacking = sorted({*tables.values()} - has.keys())
        trouble = f"{', '.join(lacking)} has no S3 gateway endpoint" if lacking else None
        mend = 'make one, or add it to one, or set network.s3_endpoint = "create" with route_table_ids'
        return Check.of("s3 endpoint", ", ".join({*has.values()}), trouble, mend)

    def _clients(self) -> Iterator[Check]:
        query = self.settings.query
        if query and not (query.client_cidrs or query.client_security_groups):
            mend = "name them in query.client_cidrs or query.client_security_groups"
            yield Check("clients", "warning", "no client may call the query service", mend)

    def _alarms(self) -> Iterator[Check]:
        receivers = self.settings.monitoring
        if receivers and not (
            receivers.email or receivers.topic_arn or receivers.slack_channel or receivers.teams_channel
        ):
            mend = "name a receiver, as in monitoring.email or topic_arn, or subscribe to the topic later"
            yield Check("alarms", "warning", "no person receives alarms", mend)

    def _ways(self, part: str, is_made: bool, endpoints: list[Any]) -> Check:
        """Checks that the interface endpoints of the part `query` or `access` exist, or can be created.

        `is_made` is True if the deploy creates them.
        """
        name, needed, found = f"{part} endpoints", ENDPOINTS[part], set()
        for one in endpoints:
            is_ours = {"Key": INSTANCE_TAG, "Value": self.settings.id} in one.get("Tags", ())
            service = one["ServiceName"].split(".", 3)[-1]
            if service in needed and one.get("PrivateDnsEnabled") and not is_ours:
                found.add(service)
        named = ", ".join(sorted(found))
        if is_made:
            if found:
                mend = f'set {part}.endpoints = "existing", and make those that are missing'
                return Check(name, "wrong", f"the VPC has some already: {named}", mend)
            return Check(name, "ok", "they will be made")
        if missing := sorted(needed - found):
            mend = f'let the subnets have a NAT gateway, make them, or set {part}.endpoints = "create"'
            return Check(name, "warning", f"the VPC has none for {', '.join(missing)}", mend)
        return Check(name, "ok", named)

    def _in_vpc(self, operation: str, key: str) -> list[Any]:
        filters = [{"Name": "vpc-id", "Values": [self.settings.network.vpc_id]}]
        return self.aws.all("ec2", operation, key, Filters=filters)

    def _quota(self, quota: tuple[str, str, str], needed: int, used: int = 0) -> Iterator[Check]:
        service, code, what = quota
        try:
            found = self.aws.call("service-quotas", "get_service_quota", ServiceCode=service, QuotaCode=code)
        except AwsRefused as refused:
            if refused.code != "NoSuchResourceException":
                raise
            yield Check("quota", "warning", f"{what}: not known", f"look it up in Service Quotas ({code})")
            return
        limit = int(found["Quota"]["Value"])
        counted = f"{what}: {needed:,} needed{f', {used:,} in use' if used else ''}, {limit:,} allowed"
        mend = f"ask for more in Service Quotas ({service}, {code}), or lower the settings"
        yield Check.of("quota", counted, None if used + needed <= limit else counted, mend)


# Checks of this machine: Node, the CDK, built packages.


def machine(root: Path) -> Iterator[Check]:
    node = _output(["node", "--version"])
    number = re.match(r"v(\d+)", node or "")
    old = f"Node {node}, which is too old for the CDK" if number and int(number[1]) < NODE_LEAST else None
    yield Check.of("node", f"Node {node}", old if number else "there is no Node", INSTALL_NODE)
    yield _cdk(root)


def _cdk(root: Path) -> Check:
    try:
        package = json.loads((root / "package.json").read_text("utf-8"))
        pin = str(package["devDependencies"]["aws-cdk"])
    except (OSError, ValueError, KeyError, TypeError):
        return Check(
            "cdk", "wrong", "there is no package.json that pins it", "run this in Dormouse's checkout"
        )
    command = root / "node_modules/.bin/cdk"
    found = (_output([str(command), "--version"], root) or "").split(" ")[0]
    other = f"the CDK {found or 'that does not start'}, not {pin}" if found != pin else None
    trouble = other if command.exists() else f"the CDK {pin} is not installed"
    return Check.of("cdk", f"the CDK {pin}", trouble, "run npm ci")


def packages(settings: DeploymentSettings, root: Path) -> Iterator[Check]:
    parts = {"migrate", "tables", *(name for name in LAMBDAS if getattr(settings, name, None) is not None)}
    if settings.compaction or settings.maintenance:
        parts.add("runs")
    if settings.query or settings.access:
        parts.add("pause")
    folders = [root / f"build/lambdas/{name}-{settings.architecture}" for name in sorted(parts)]
    missing = ", ".join(folder.name for folder in folders if not folder.is_dir())
    trouble = f"not built: {missing}" if missing else None
    yield Check.of("lambdas", f"{len(folders)} packages are built", trouble, "run make lambdas")
    if settings.compaction:
        archive = root / f"build/emr/dormouse-{settings.architecture}.tgz"
        trouble = None if archive.exists() else f"{archive.name} is not built"
        mend = f"run make emr-package ARCHITECTURE={settings.architecture}"
        yield Check.of("emr package", f"{archive.name} is built", trouble, mend)


def image(settings: DeploymentSettings, root: Path) -> Iterator[Check]:
    """Yields checks of the tools that the build of the query service's image needs."""
    if settings.query is None or settings.query.image is not None:
        return
    is_made = (root / "build/query-image/Dockerfile").exists()
    trouble = None if is_made else "build/query-image is not made"
    yield Check.of("query image", "build/query-image is made", trouble, "run make query-image")
    version = _output(["docker", "version", "--format", "{{.Server.Version}}"])
    mend = "install and start Docker, or name an image in ECR in query.image"
    trouble = "there is no Docker that runs, to build the query image with" if version is None else None
    yield Check.of("docker", f"Docker {version}", trouble, mend)


def _output(command: list[str], folder: Path | None = None) -> str | None:
    """Returns the output of a command, or None if the command cannot be started or fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=COMMAND_SECONDS_MAX
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
