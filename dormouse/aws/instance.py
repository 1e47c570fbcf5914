"""A deployed instance, found by its id in an account and region, and access to its database."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, cast

from pydantic import TypeAdapter, ValidationError

from dormouse.aws.aws import Aws, AwsRefused
from dormouse.errors import InstanceError, InvalidInput, NotAnInstance
from dormouse.settings import resources
from dormouse.settings.resources import FORWARDING, DesiredState, Resources

ID = re.compile(r"[a-z](-?[a-z0-9]){1,19}")
NAMES_MAX = 20
_MODELS = {stack: TypeAdapter(cast(Any, field.annotation)) for stack, field in Resources.model_fields.items()}


@dataclass(frozen=True)
class DeployedInstance:
    """A deployed instance, as its stacks described it when they were deployed."""

    id: str
    account: str
    region: str
    resources: Resources
    aws: Aws = field(repr=False, compare=False)

    @property
    def desired(self) -> DesiredState:
        """The current desired state. It is "running" if the instance has no stack `pause`."""
        name = resources.state_parameter(self.id)
        value = self.aws.parameter(name)
        if value is None:
            if self.resources.pause is None:
                return "running"
            raise InstanceError(f"the parameter {name} is missing: deploy {self.id} again")
        if value not in ("running", "paused"):
            raise InstanceError(f"the parameter {name} must be running or paused, not {value!r}")
        return cast(DesiredState, value)

    @property
    def desired_seconds(self) -> float:
        """The age of the desired state in seconds; infinite if the state was never written."""
        found = self.aws.look("ssm", "get_parameter", Name=resources.state_parameter(self.id))
        since = found and found["Parameter"].get("LastModifiedDate")
        return (datetime.now(UTC) - since).total_seconds() if since else math.inf

    @property
    def cluster(self) -> str:
        """The identifier of the database cluster."""
        if self.resources.database is None:
            raise InstanceError(f"{self.id} has no database stack: deploy it")
        return self.resources.database.cluster


def owns(instance_id: str, described: Mapping[str, Any]) -> bool:
    """Returns whether a resource, as AWS describes it, has the tag of the instance."""
    tags = described.get("Tags") or described.get("TagList") or ()
    return {"Key": resources.INSTANCE_TAG, "Value": instance_id} in tags


def stacks_of(aws: Aws, instance_id: str) -> Iterator[dict[str, Any]]:
    """Yields CloudFormation's descriptions of the instance's stacks.

    A stack needs the name and the tag of the instance, because another instance's name can begin with the
    same text.
    """
    for stack in aws.all("cloudformation", "describe_stacks", "Stacks"):
        tags = {tag["Key"]: tag["Value"] for tag in stack.get("Tags", ())}
        named = stack["StackName"].startswith(f"dormouse-{instance_id}-")
        if (
            named
            and tags.get(resources.INSTANCE_TAG) == instance_id
            and stack["StackStatus"] != "DELETE_COMPLETE"
        ):
            yield stack


def left_stacks(aws: Aws, instance_id: str) -> tuple[str, ...]:
    """Returns the names of the instance's stacks that no deploy has, as `cdk deploy` deletes no stack."""
    wanted = {resources.stack_name(instance_id, name) for name in resources.STACKS}
    return tuple(sorted({stack["StackName"] for stack in stacks_of(aws, instance_id)} - wanted))


def how_to_delete(stack: str, region: str) -> str:
    """Returns the advice for one of the `left_stacks`."""
    command = f"aws cloudformation delete-stack --stack-name {stack} --region {region}"
    return f"delete it: {command}"


def is_changing(status: str) -> bool:
    """Returns whether a stack with this status is being changed; REVIEW_IN_PROGRESS does not count."""
    return status.endswith("_IN_PROGRESS") and status != "REVIEW_IN_PROGRESS"


def find(instance_id: str, session: Any) -> DeployedInstance:
    """Returns the instance with this id in the account and region of a boto3 session.

    Raises `NotAnInstance`, which lists the existing ids, and `InstanceError` if AWS cannot be called.
    """
    if not ID.fullmatch(instance_id):
        raise InvalidInput(
            f"{instance_id!r} is not the id of an instance: 2 to 20 of a-z, 0-9 and -, first a letter"
        )
    aws = Aws(session)
    path = f"{resources.PREFIX}/{instance_id}"
    found = {
        one["Name"]: one["Value"]
        for one in aws.all("ssm", "get_parameters_by_path", "Parameters", Path=path, Recursive=True)
    }
    account = aws.account
    if not found:
        others = _others(aws)
        raise NotAnInstance(
            f"there is no instance {instance_id!r} in account {account}, {aws.region}"
            + (
                f"; there {'is' if len(others) == 1 else 'are'} {', '.join(others)}"
                if others
                else ", nor any other"
            )
        )
    prefix = f"{resources.resources_path(instance_id)}/"
    described = {name.removeprefix(prefix): text for name, text in found.items() if name.startswith(prefix)}
    return DeployedInstance(instance_id, account, aws.region, _parsed(instance_id, described), aws)


def read_instance(instance_id: str, aws: Aws) -> DeployedInstance:
    """Returns the instance, and reads only its own parameters: a lambda has no right to others.

    It leaves out parts that the last deploy did not have, since the lambda has no right to them either.
    """
    asked = {stack: aws.parameter(resources.resources_parameter(instance_id, stack)) for stack in _MODELS}
    texts = {stack: text for stack, text in asked.items() if text is not None}
    described = _parsed(instance_id, texts)
    if application := described.application:
        known = (*resources.STACKS, *application.parts)
        removed = [part for part in Resources.model_fields if part not in known]
        described = described.model_copy(update=dict.fromkeys(removed))
    return DeployedInstance(instance_id, "", aws.region, described, aws)


def _parsed(instance_id: str, parameters: dict[str, str]) -> Resources:
    found = {}
    for stack, text in parameters.items():
        if stack in Resources.model_fields:
            try:
                found[stack] = _MODELS[stack].validate_json(text)
            except ValidationError:
                where = resources.resources_parameter(instance_id, stack)
                raise InstanceError(
                    f"{where} cannot be read: deploy {instance_id} with this Dormouse"
                ) from None
    return Resources.model_validate(found)


def _others(aws: Aws) -> list[str]:
    """Returns the ids of all instances in the account and region.

    Returns an empty list without the right to list them, and shortens a long list.
    """
    filters = [{"Key": "Name", "Option": "BeginsWith", "Values": [f"{resources.PREFIX}/"]}]
    try:
        found = aws.all("ssm", "describe_parameters", "Parameters", ParameterFilters=filters)
    except AwsRefused:
        return []
    ids = sorted({one["Name"].split("/")[2] for one in found})
    return [*ids[:NAMES_MAX], "…"] if len(ids) > NAMES_MAX else ids


# Access to the database: through the host for access, or by environment variables.


@dataclass(frozen=True)
class Access:
    """A command that forwards the database to the same port of this machine.

    The port must be the same, because IAM tokens contain the port.
    """

    instance: str
    host: str
    """The id of the EC2 instance."""

    database: str
    """The address of the database within the VPC."""

    port: int
    command: str
    """A shell command, which forwards connections until it is ended."""


def access(instance: DeployedInstance, profile: str | None = None) -> Access:
    """Returns the command that forwards the database to this machine.

    Raises `InstanceError` if the instance has no host for access, or if the host is stopped.
    """
    described, database = instance.resources.access, instance.resources.database
    if described is None or database is None:
        raise InstanceError(
            f"{instance.id} has no host for access: give it the table [access], and deploy it"
        )
    if not described.host:
        raise InstanceError(f"the host for access is stopped: run dormouse resume --instance {instance.id}")
    where, port = database.proxy or database.endpoint, database.port
    given = {"host": [where], "portNumber": [str(port)], "localPortNumber": [str(port)]}
    command = ["aws", "ssm", "start-session", "--region", instance.region]
    command += [] if profile is None else ["--profile", profile]
    command += ["--target", described.host, "--document-name", FORWARDING, "--parameters", json.dumps(given)]
    return Access(instance.id, described.host, where, port, shlex.join(command))


Role = Literal["dormouse_read", "dormouse_run", "dormouse_owner"]


def environment(
    instance: DeployedInstance, role: Role = "dormouse_owner", *, forwarded: bool = False
) -> dict[str, str]:
    """Returns the environment variables of a process that logs in to the instance's database as `role`.

    With `forwarded`, the process connects to this machine, where a command forwards the database.
    Certificates and tokens still need the database's own name.
    """
    found = instance.resources
    if found.database is None or found.storage is None:
        raise InstanceError(f"{instance.id} has no database or no storage stack: deploy it")
    database = found.database
    host, more = (database.proxy, "&proxy=true") if database.proxy else (database.endpoint, "")
    variables = {
        "AWS_REGION": instance.region,
        "AWS_DEFAULT_REGION": instance.region,
        "DORMOUSE_DSN": f"rds-iam://{role}@{host}:{database.port}/{database.name}"
        f"?region={instance.region}{more}{'&hostaddr=127.0.0.1' if forwarded else ''}",
        "DORMOUSE_OBJECTS": found.storage.objects,
    }
    if database.row_indexes is not None:
        # indexes belong to the role that creates them, and each role may create some
        own = "dormouse_read" if role == "dormouse_read" else "dormouse_run"
        variables["DORMOUSE_ROW_INDEXES"] = " ".join(
            f"rds-iam://{own}@{where}?region={instance.region}{more if where.startswith(host) else ''}"
            for where in database.row_indexes
        )
    if found.commit is not None:
        variables["DORMOUSE_COMMIT_QUEUE"] = ",".join(found.commit.queues)
        variables["DORMOUSE_QUEUES"] = str(len(found.commit.queues))
    return variables
