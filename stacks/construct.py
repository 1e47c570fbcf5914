"""A construct for an instance in any CDK app."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_sqs as sqs
from constructs import Construct, IConstruct

import dormouse
from dormouse.errors import InvalidInput
from dormouse.settings.config_file import parse
from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.section import no_certificates
from stacks.assets import Assets, Builder, BuiltAssets
from stacks.commit import Commit
from stacks.compaction import SPARK_OBJECT_ACTIONS
from stacks.constructs.permissions import allow
from stacks.constructs.security_group import let_out_to_s3
from stacks.instance import context, not_built, stacks_of
from stacks.instance_stack import InstanceStack

OWN = Builder("python -m dormouse_cdk.build", "--architecture ")
ClientRole = Literal["dormouse_read", "dormouse_run", "dormouse_owner"]


class Dormouse(Construct):
    """The stacks `dormouse-<id>-<name>` of one instance, within an app, a Stage or another construct.

    `settings` is a dictionary like a file of config/, or the result of `dormouse.settings.config_file.load`.
    The files to upload are in the folder `build`, where `python -m dormouse_cdk.build` puts them.
    Placeholders stand in for missing files. Then the construct adds a warning, and deploys are refused.

    The templates equal those of Dormouse's own app, whatever CDK feature flags the app has. Raises
    `InvalidInput`, with one line for each error in the settings.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        settings: DeploymentSettings | Mapping[str, Any],
        *,
        build: str | Path = "build",
        assets: Assets | None = None,
    ) -> None:
        if not isinstance(settings, DeploymentSettings):
            settings = parse(settings, construct_id)
        super().__init__(scope, construct_id)
        _check_place(cdk.Stage.of(self), settings)
        for key, value in context().items():
            self.node.set_context(key, value)
        self.settings = settings
        assets = assets or _built(settings, Path(build))
        self._foundation, application = stacks_of(settings, assets, self)
        self._commit = application.commit
        if assets.to_run:
            cdk.Annotations.of(self).add_warning_v2("dormouse:not-built", not_built(assets))

    @property
    def vpc(self) -> ec2.IVpc:
        return self._foundation.network.placement.vpc

    @property
    def subnets(self) -> ec2.SubnetSelection:
        """The isolated or private subnets of the instance."""
        return self._foundation.network.placement.selection

    @property
    def data_bucket(self) -> s3.IBucket:
        return self._foundation.storage.data_bucket

    @property
    def database_security_group(self) -> ec2.ISecurityGroup:
        """The security group of the cluster and of its RDS Proxy. `let_in` opens it for clients."""
        return self._foundation.database.security_group

    @property
    def queues(self) -> list[sqs.IQueue]:
        """The commit queues in the order of their numbers; an empty list without `commit` in the settings."""
        return [queue.queue for queue in self._commit.queues] if self._commit else []

    @property
    def dead_letters(self) -> list[sqs.IQueue]:
        """The dead-letter queues, in the order of the commit queues that they belong to."""
        return [queue.dead_letters for queue in self._commit.queues] if self._commit else []

    def let_in(
        self, role: iam.Role, security_group: ec2.SecurityGroup, *, login: ClientRole = "dormouse_read"
    ) -> dict[str, str]:
        """Allows clients to use the tables. Returns the environment variables that the clients need.

        Clients have the IAM role and the security group, and run in the instance's VPC or in one peered with
        it. `login` is their database role: `dormouse_read` reads, `dormouse_run` also changes rows and sends
        commit requests, and `dormouse_owner` also creates and drops tables.
        """
        stack = cdk.Stack.of(role)
        database, storage = self._foundation.database, self._foundation.storage
        database.let_in(login, security_group, role, to_rows=True)
        if not security_group.allow_all_outbound:
            let_out_to_s3(security_group)
        storage.allow_objects(role, ["s3:GetObject"] if login == "dormouse_read" else SPARK_OBJECT_ACTIONS)
        variables = {"DORMOUSE_DSN": database.dsn(stack, login), "DORMOUSE_OBJECTS": storage.objects}
        if indexes := database.row_index_dsns(stack, login):
            variables["DORMOUSE_ROW_INDEXES"] = indexes
        if self._commit is not None and login != "dormouse_read":
            variables |= _let_send(role, self._commit)
        return variables


def _let_send(role: iam.Role, commit: Commit) -> dict[str, str]:
    stack, queues = cdk.Stack.of(role), [queue.queue for queue in commit.queues]
    arns, urls = (
        [commit.fact(stack, f"{name}-{number}", value) for number, value in enumerate(values, 1)]
        for name, values in (
            ("commits", [queue.queue_arn for queue in queues]),
            ("url", [queue.queue_url for queue in queues]),
        )
    )
    allow(role, ["sqs:GetQueueAttributes", "sqs:SendMessage"], arns)
    return {"DORMOUSE_COMMIT_QUEUE": ",".join(urls), "DORMOUSE_QUEUES": str(len(urls))}


def _check_place(stage: cdk.Stage | None, settings: DeploymentSettings) -> None:
    """Checks that the app can contain this instance.

    Raises `InvalidInput` without a Stage, for a region whose RDS certificates are not known, or if the Stage
    has an instance with this id.
    """
    if stage is None:
        raise InvalidInput(f"{settings.id}: an instance must be in an app or a Stage, and this is in neither")
    region = settings.region or stage.region
    if region and not cdk.Token.is_unresolved(region) and (trouble := no_certificates(region)):
        raise InvalidInput(trouble)
    if settings.id in _instances(stage):
        raise InvalidInput(f"there is an instance {settings.id} here already: choose another id")


def _instances(scope: IConstruct) -> Iterator[str]:
    """Yields the ids of the instances in a scope. Does not descend into stacks and other Stages."""
    for child in scope.node.children:
        if isinstance(child, InstanceStack):
            yield child.settings.id
        elif not isinstance(child, cdk.Stack | cdk.Stage):
            yield from _instances(child)


def _built(settings: DeploymentSettings, build: Path) -> BuiltAssets:
    stubs = Path(tempfile.mkdtemp(prefix="dormouse-"))
    atexit.register(shutil.rmtree, stubs, ignore_errors=True)
    home = Path(dormouse.__file__).parents[1]
    return BuiltAssets(home, settings.architecture, stubs, build=build.resolve(), builder=OWN)
