"""Settings with an ARN that must be in the instance's own region or account."""

from __future__ import annotations

import tomllib

import pytest

from dormouse.errors import InvalidInput
from tests.support.settings import parse

UUID = "12345678-1234-1234-1234-123456789012"
HERE = 'account = "123456789012"\nregion = "eu-west-1"\n'


def refusal(text: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        parse(tomllib.loads(f'id = "dev"\n{text}'), "f")
    return str(caught.value)


@pytest.mark.parametrize(
    ("table", "key", "arn"),
    [
        ("storage", "key_arn", "arn:aws:kms:{}:123456789012:key/" + UUID),
        ("database", "key_arn", "arn:aws:kms:{}:123456789012:key/" + UUID),
        ("database", "snapshot", "arn:aws:rds:{}:123456789012:cluster-snapshot:prod"),
        ("monitoring", "topic_arn", "arn:aws:sns:{}:123456789012:alarms"),
        ("monitoring", "warning_topic_arn", "arn:aws:sns:{}:123456789012:later"),
        ("query", "certificate_arn", "arn:aws:acm:{}:123456789012:certificate/" + UUID),
    ],
)
def test_resources_of_another_region_are_refused_before_a_deploy(table: str, key: str, arn: str) -> None:
    """The settings file of an instance that is restored in another region has such ARNs."""
    beside = {"database": 'kind = "serverless"\n', "query": 'host = "q.example.org"\n'}.get(table, "")

    def text(region: str) -> str:
        return f'{HERE}[{table}]\n{beside}{key} = "{arn.format(region)}"\n'

    parse(tomllib.loads(f'id = "dev"\n{text("eu-west-1")}'))
    line = refusal(text("us-east-1"))
    assert line.startswith(f"f: {table}.{key} = ")
    assert line.endswith(": it is in us-east-1, and must be in eu-west-1, the instance's own region")


def test_a_boundary_of_another_account_is_refused() -> None:
    def text(account: str) -> str:
        return f'{HERE}[iam]\npermissions_boundary = "arn:aws:iam::{account}:policy/bound"\n'

    for ours in ("123456789012", "aws"):
        parse(tomllib.loads(f'id = "dev"\n{text(ours)}'))
    line = refusal(text("999999999999"))
    assert line.endswith(": it must be of the account 123456789012, not 999999999999")


@pytest.mark.parametrize("table", ["commit", "query"])
def test_an_image_of_another_region_is_refused_if_the_instance_has_endpoints_of_its_own(table: str) -> None:
    """Endpoints of ECR reach only their own region, and the subnets have no other way out."""
    network = '[network]\nvpc_id = "vpc-0a1b2c3d"\nsubnet_ids = ["subnet-0a1b2c3d", "subnet-0a1b2c3e"]\n'
    network += 'availability_zones = ["eu-west-1a", "eu-west-1b"]\ns3_endpoint = "existing"\n'
    more = {"commit": "service = true\n"}.get(table, "")

    def text(region: str, before: str = "", endpoints: str = "create") -> str:
        image = f"123456789012.dkr.ecr.{region}.amazonaws.com/dormouse:1.0"
        database = '[database]\nkind = "fixed"\n'
        return f'{HERE}{before}{database}[{table}]\n{more}image = "{image}"\nendpoints = "{endpoints}"\n'

    parse(tomllib.loads(f'id = "dev"\n{text("eu-west-1")}'))
    parse(tomllib.loads(f'id = "dev"\n{text("us-east-1", network, "existing")}'))
    line = refusal(text("us-east-1"))
    assert line.startswith(f"f: {table}.image = ")
    assert line.endswith(": it is in us-east-1, and the endpoints of ECR reach only eu-west-1")
