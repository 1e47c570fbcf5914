"""Building blocks for the settings of a deployment: tables, fields, patterns of texts, certificates."""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

CA_BUNDLE = Path(__file__).parents[1] / "postgres" / "rds-ca-bundle.pem"
"""The certificates by which a database on AWS is verified."""

_AUTHORITY = re.compile(r"Amazon RDS ([a-z]{2}(?:-[a-z]+)+-\d) Root CA .*")

CONNECT_SECONDS_MAX = 40
"""The time in seconds that a lambda waits for a database to wake. The lambda's timeout is longer."""

CLIENTS_MAX = 40
"""The largest number of clients in the settings. Each needs a rule in a security group, and AWS allows 60
rules in all."""

LOSS_NEAR_SHARE = 0.75
"""The share of their retention after which an alarm reports old messages. With 14 days, it is 3.5 days before
SQS deletes them."""

DRAIN_SECONDS = 900
"""The default time in seconds that a pause waits for running work."""

SCHEDULED_SECONDS_MAX = 60
"""The time in seconds for which EventBridge, and then Lambda, each try to start a scheduled call. The next
call does the work of a call that was not started."""

ACTIVE_SECONDS_MAX = 300
"""The time in seconds for which refused calls of an inactive lambda are repeated. AWS takes the network from
a lambda in a VPC that was idle for 14 days. AWS refuses the next call, and then restores the network, which
takes some minutes."""

INACTIVE_CODES = frozenset(
    {
        "CodeArtifactUserPendingException", "ENINotReadyException", "ResourceConflictException",
        "ResourceNotReadyException",
    }
)  # fmt: skip
"""AWS's error codes for a call of a lambda that is not active. AWS did not run the lambda."""

WAKE = {"wake": True}
"""The event of a call that only makes a lambda active. The lambda ignores it."""

LAMBDA_SECONDS_MAX = 900
VISIBILITY_FACTOR = 6
"""The time for which SQS hides received messages, divided by the timeout of the lambda. AWS advises 6."""

VISIBILITY_SECONDS_MAX = 12 * 3600
TAGS_MAX = 49
"""The largest number of tags in the settings. AWS allows 50, and `dormouse:instance` is one of them."""

PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
STORING = frozenset(
    {
        "d", "dl", "f", "h", "i", "im", "is", "trn",
        "c3", "g2", "g5", "g6", "g6e", "gr6", "m3", "p5", "p5e", "p5en", "r3", "x1", "x1e",
    }
)  # fmt: skip
"""The families of EC2 instances that have their own disks but no d in their names. The first ones are
families of any generation, and the others are of one generation."""

Change = Literal["deploy", "replacement"]


def setting(default: Any = ..., *, change: Change = "deploy", **limits: Any) -> Any:
    """Returns a field of a table. It records `change`, the effect of a change of the setting.

    `deploy` means that a deploy applies the change, and `replacement` that it also replaces a resource.
    `limits` are limits of pydantic for the value.
    """
    return Field(default, json_schema_extra={"change": change}, **limits)


_TIME, _DAY = "([01][0-9]|2[0-3]):[0-5][0-9]", "(mon|tue|wed|thu|fri|sat|sun)"
PATTERNS = {
    "id": (
        r"^[a-z](-?[a-z0-9]){1,19}$",
        "2 to 20 of a-z, 0-9 and -, first a letter, no - at the end or doubled",
    ),
    "account": (r"^[0-9]{12}$", "the 12 digits of an AWS account"),
    "region": (r"^[a-z]{2}(-[a-z]+)+-[0-9]$", "an AWS region, like eu-west-1"),
    "cidr": (
        r"^[0-9]{1,3}(\.[0-9]{1,3}){3}/(1[6-9]|2[0-2])$",
        "an IPv4 network of /16 to /22 whose address ends where its hosts begin, like 10.40.0.0/16",
    ),
    "vpc": (r"^vpc-([0-9a-f]{8}|[0-9a-f]{17})$", "the id of a VPC, like vpc-0a1b2c3d"),
    "subnet": (
        r"^subnet-([0-9a-f]{8}|[0-9a-f]{17})$",
        "the id of a subnet, like subnet-0a1b2c3d",
    ),
    "route_table": (
        r"^rtb-([0-9a-f]{8}|[0-9a-f]{17})$",
        "the id of a route table, like rtb-0a1b2c3d",
    ),
    "zone": (r"^[a-z]{2}(-[a-z]+)+-[0-9][a-z]$", "an availability zone, like eu-west-1a"),
    "instance": (
        r"^[a-z][a-z0-9-]*[0-9][a-z0-9-]*\.([a-z]+|[0-9]+xlarge)$",
        "an instance class, like r8g.large",
    ),
    "engine_version": (
        r"^17\.([4-9]|[1-9][0-9])$",
        "a version of Aurora PostgreSQL 17 that AWS offers, 17.4 or later",
    ),
    "backup_window": (
        rf"^{_TIME}-{_TIME}$",
        "a time of each day in UTC, like 03:00-03:30",
    ),
    "maintenance_window": (
        rf"^{_DAY}:{_TIME}-{_DAY}:{_TIME}$",
        "a time of the week in UTC, like sun:04:00-sun:05:00",
    ),
    "snapshot": (
        r"^arn:aws[a-z-]*:rds:[a-z0-9-]+:[0-9]{12}:cluster-snapshot:[A-Za-z][A-Za-z0-9:-]*$",
        "the ARN of a snapshot of a cluster, like arn:aws:rds:eu-west-1:123456789012:cluster-snapshot:prod",
    ),
    "security_group": (r"^sg-([0-9a-f]{8}|[0-9a-f]{17})$", "the id of a security group, like sg-0a1b2c3d"),
    "client_cidr": (
        r"^[0-9]{1,3}(\.[0-9]{1,3}){3}/([89]|[12][0-9]|3[0-2])$",
        "a private IPv4 network of /8 to /32, like 10.0.0.0/16",
    ),
    "certificate": (
        r"^arn:aws[a-z-]*:acm:[a-z0-9-]+:[0-9]{12}:certificate/[0-9a-f-]{36}$",
        "the ARN of a certificate in ACM, like "
        "arn:aws:acm:eu-west-1:123456789012:certificate/12345678-1234-1234-1234-123456789012",
    ),
    "host": (
        r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.){1,8}[a-z][a-z0-9-]{0,30}[a-z0-9]$",
        "a name in the DNS, like query.example.org",
    ),
    "image": (
        r"^[0-9]{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/[a-z0-9][a-z0-9._/-]{0,254}"
        r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|@sha256:[0-9a-f]{64})$",
        "an image in ECR with its tag or digest, like "
        "123456789012.dkr.ecr.eu-west-1.amazonaws.com/dormouse:1.0",
    ),
    "key": (
        r"^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[0-9a-f-]{36}$",
        "the ARN of a KMS key, like "
        "arn:aws:kms:eu-west-1:123456789012:key/12345678-1234-1234-1234-123456789012",
    ),
    "topic": (
        r"^arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:[A-Za-z0-9_-]{1,256}$",
        "the ARN of an SNS topic, like arn:aws:sns:eu-west-1:123456789012:alarms",
    ),
    "policy": (
        r"^arn:aws[a-z-]*:iam::([0-9]{12}|aws):policy/[A-Za-z0-9+=,.@_/-]{1,640}$",
        "the ARN of a policy, like arn:aws:iam::123456789012:policy/boundary",
    ),
    "role_path": (
        r"^/([A-Za-z0-9+=,.@_-]{1,30}/){0,2}$",
        "a path with / at both ends, of two parts of 30 characters at most, like /service/dormouse/",
    ),
    "role_prefix": (r"^[A-Za-z0-9+=,.@_-]{1,20}$", "1 to 20 of a-z, A-Z, 0-9 and + = , . @ _ -"),
    "qualifier": (r"^[a-z0-9]{1,10}$", "1 to 10 of a-z and 0-9"),
    "slack": (r"^[A-Z0-9]{5,20}$", "the id that Slack gives it, like C0123ABCDEF"),
    "teams": (
        r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
        "the id that AWS Chatbot shows, like 12345678-1234-1234-1234-123456789012",
    ),
    "teams_channel": (
        r"^[a-zA-Z0-9_=+/.,-]+%3[aA][a-zA-Z0-9_=+/.,-]+%40[a-zA-Z0-9_=+/.,-]+$",
        "the id in the link to the channel, like 19%3ab6ef35dc342d56ba5654e6fc6d25a071%40thread.tacv2",
    ),
    "email": (r"^[^@\s]+@[^@\s]+\.[^@\s]+$", "an e-mail address"),
}
"""The patterns that texts must match, each with a description in words."""


def pattern(name: str) -> str:
    return PATTERNS[name][0]


SubnetId = Annotated[str, Field(pattern=pattern("subnet"))]
RouteTableId = Annotated[str, Field(pattern=pattern("route_table"))]
ZoneName = Annotated[str, Field(pattern=pattern("zone"))]
InstanceClass = Annotated[str, Field(pattern=pattern("instance"))]
SecurityGroupId = Annotated[str, Field(pattern=pattern("security_group"))]
ClientCidr = Annotated[str, Field(pattern=pattern("client_cidr"))]
MemoryMb = Annotated[int, Field(ge=128, le=10_240)]
TimeoutSeconds = Annotated[int, Field(gt=CONNECT_SECONDS_MAX, le=LAMBDA_SECONDS_MAX)]
EveryMinutes = Annotated[int, Field(ge=1, le=1_440)]
Acu = Annotated[float, Field(multiple_of=0.5, le=256)]


class Section(BaseModel):
    """A table of the settings file. Unknown settings are errors, and texts are never converted to numbers."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yields each setting that contradicts another one of the same table, and the reason."""
        return iter(())

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if problems := list(self.contradictions()):
            text = "; ".join(f"{key}: {why}" for key, why in problems)
            raise PydanticCustomError("contradiction", "{text}", {"text": text, "problems": problems})
        return self


def cidr_problem(cidr: str) -> str | None:
    try:
        network = ipaddress.IPv4Network(cidr, strict=False)
    except ValueError:
        return "an IPv4 network has four numbers of 0 to 255, like 10.40.0.0/16"
    if str(network) != cidr:
        return f"the address is inside a network that begins at {network}"
    if not any(network.subnet_of(ipaddress.IPv4Network(each)) for each in PRIVATE):
        return f"it must be private: within {', '.join(PRIVATE[:-1])} or {PRIVATE[-1]}"
    return None


def client_problems(cidrs: tuple[str, ...], groups: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yields each mistake in the networks and security groups of clients: the setting, and the reason."""
    networks: list[ipaddress.IPv4Network] = []
    for cidr in cidrs:
        if why := cidr_problem(cidr):
            yield "client_cidrs", f"{cidr}: {why}"
            continue
        network = ipaddress.IPv4Network(cidr)
        if others := [other for other in networks if other != network and other.overlaps(network)]:
            yield "client_cidrs", f"{cidr} overlaps {others[0]}: leave one out"
        networks.append(network)
    for name, given in (("client_cidrs", cidrs), ("client_security_groups", groups)):
        if len(set(given)) < len(given):
            yield name, "each may be listed only once"
    if (count := len(cidrs) + len(groups)) > CLIENTS_MAX:
        name = "client_cidrs" if cidrs else "client_security_groups"
        yield (
            name,
            f"there are {count} clients with client_security_groups, at most {CLIENTS_MAX} are allowed",
        )


def tag_problems(tags: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields each tag that some AWS service refuses, and the reason.

    EMR Serverless accepts only ASCII. IAM accepts no two names that differ only in case.
    """
    names: dict[str, str] = {}
    for key, value in tags.items():
        if key.partition(":")[0].lower() in {"aws", "dormouse"}:
            yield key, "a tag must not begin with aws: or dormouse:"
        elif not re.fullmatch(r"[\w +\-=.:/@]{1,128}", key, re.ASCII):
            yield key, "the name of a tag must be 1 to 128 of a-z, A-Z, 0-9, spaces and + - = . _ : / @"
        elif not re.fullmatch(r"[\w +\-=.:/@]{0,256}", value, re.ASCII):
            yield key, "a tag must be 0 to 256 of a-z, A-Z, 0-9, spaces and + - = . _ : / @"
        elif (other := names.setdefault(key.lower(), key)) != key:
            yield key, f"to IAM this is the same tag as {other}"
    if len(tags) > TAGS_MAX:
        yield list(tags)[TAGS_MAX], f"there must be {TAGS_MAX} tags at most, not {len(tags)}"


def architecture_of(instance_type: str) -> str:
    """Returns the processor architecture of an instance type.

    Types for arm64 (Graviton) have a g after the generation, as in m7g or c7gn.
    """
    return "arm64" if re.match(r"[a-z]+\d+g", instance_type) else "x86_64"


def has_instance_store(instance_type: str) -> bool:
    """Returns whether an instance type has its own disks.

    A d in the name shows it, as in m7gd, or else the family.
    """
    family = instance_type.partition(".")[0]
    found = re.match(r"([a-z]+)\d+([a-z]*)", family)
    return found is not None and ("d" in found[2] or not STORING.isdisjoint((found[1], family)))


def no_certificates(region: str) -> str | None:
    """Returns an error message if the RDS certificates of a region are missing here, else None."""
    if region in _regions(CA_BUNDLE):
        return None
    return (
        f"the certificates of Amazon RDS in {region} are not in {CA_BUNDLE.name}: "
        "append AWS's bundle of this region (docs/how-to/deploy.md, Regions), or choose another region"
    )


@cache
def _regions(bundle: Path) -> frozenset[str]:
    """Returns the regions of the certificate authorities in a bundle."""
    certificates = ssl.create_default_context(cafile=bundle).get_ca_certs()
    subjects = [dict(pair for part in one["subject"] for pair in part) for one in certificates]  # type: ignore[misc]
    found = (_AUTHORITY.fullmatch(str(one.get("commonName", ""))) for one in subjects)
    return frozenset(one[1] for one in found if one)
