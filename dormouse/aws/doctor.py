"""Checks of what a deploy needs on this machine and in the account. They change nothing."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dormouse.aws.aws import Aws, AwsRefused, open_session
from dormouse.aws.check import Check, Look
from dormouse.aws.database import left_behind, snapshot, taken, version_numbers
from dormouse.aws.drain import depth
from dormouse.aws.instance import how_to_delete, left_stacks
from dormouse.aws.linked_roles import check_roles
from dormouse.aws.quotas import Quotas
from dormouse.aws.switches import stack
from dormouse.aws.vpc import Network
from dormouse.errors import DormouseError
from dormouse.settings.database import FixedDatabase
from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.resources import (
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

BOOTSTRAP_LEAST = 6
QUALIFIER = "hnb659fds"
"""The qualifier of the CDK's bootstrap, unless the settings have another."""

BUCKET = "cdk-{qualifier}-assets-{account}-{region}"
OWN_KEY = "alias/aws/s3"
"""The KMS key of S3 itself. AWS lets every reader of an object use it."""

BOOTSTRAP = "/cdk-bootstrap/{qualifier}/version"


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
                first = "get that permission" if refused.is_denied else "run this command again"
                mend = f"{first}, or check by hand"
                yield Check(name, "warning", f"not checked: {refused}", mend)
            except DormouseError as error:
                yield Check(name, "wrong", str(error), "fix this, then run this command again")

    def _looks(self) -> Iterator[Look]:
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
        yield from Quotas(settings, aws).looks()
        yield from Network(settings, aws).looks()
        qualifier = settings.qualifier or QUALIFIER
        yield "service-linked roles", partial(check_roles, settings, aws, qualifier)
        if settings.compaction:
            yield "bootstrap bucket", self._bucket
            yield "EMR release", self._release
        if settings.backup:
            yield "backups", self._backups
        if settings.query:
            yield "clients", self._clients
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
        found = self.aws.look("iam", "get_policy", PolicyArn=policy)
        trouble = None if found else f"there is no policy {policy}"
        mend = "create it, or name another policy in iam.permissions_boundary"
        yield Check.of("permissions boundary", f"{policy} exists", trouble, mend)

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
        """Checks for stacks that a deploy no longer has, and does not delete."""
        left = left_stacks(self.aws, self.settings.id)
        trouble = f"{', '.join(left)} is no stack of a deploy, and may cost money"
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

    def _release(self) -> Iterator[Check]:
        """Checks EMR's list of releases, which is also the only one for EMR Serverless."""
        assert self.settings.compaction is not None  # noqa: S101
        release = self.settings.compaction.release
        labels = self.aws.call("emr", "list_release_labels", Filters={"Prefix": release})["ReleaseLabels"]
        here = f"{release} in {self.aws.region}"
        trouble = None if release in labels else f"EMR does not list {here}: runs of Spark may be refused"
        mend = "choose another compaction.release or region, or leave out the table compaction"
        yield Check.of("EMR release", f"EMR has {here}", trouble, mend, "warning")

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
    # the guard of the database is in the package `pause`
    parts = {"migrate", "pause", "tables"}
    parts |= {name for name in LAMBDAS if getattr(settings, name, None) is not None}
    if settings.compaction or settings.maintenance:
        parts.add("runs")
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
    """Yields checks of the tools that the build of the image of the services needs."""
    query, commit = settings.query, settings.commit
    of_query = query.image if query else None
    images = [of_query] if query else []
    images += [commit.image or of_query] if commit and commit.service else []
    if None not in images:
        return
    is_made = (root / "build/query-image/Dockerfile").exists()
    trouble = None if is_made else "build/query-image is not made"
    yield Check.of("query image", "build/query-image is made", trouble, "run make query-image")
    version = _output(["docker", "version", "--format", "{{.Server.Version}}"])
    mend = f"install and start Docker, or name an image in ECR in {'query' if query else 'commit'}.image"
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
