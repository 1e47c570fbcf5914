"""Tests that the longest allowed settings stay within limits of AWS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dormouse.settings.database import INSTANCE_TYPES_MAX
from dormouse.settings.deployment import DATABASES_MAX, EMR_TAG_BYTES_MAX, SUBNETS_MAX
from tests.assembly import settings, synthesize

ENVIRONMENT_BYTES_MAX = 4_096
LONGEST = {
    "AWS::AccountId": "123456789012",
    "AWS::Partition": "aws",
    "AWS::Region": "ap-southeast-2",
    "Role": f"arn:aws:iam::123456789012:role/{'p' * 61}/{'r' * 64}",
    "SecurityGroup": "sg-0123456789abcdef0",
    "Primary": "sg-0123456789abcdef0",
    "Core": "sg-0123456789abcdef0",
    "ServiceAccess": "sg-0123456789abcdef0",
    "": "x" * 110,
}
"""The longest value that a reference can have, by a part of the reference.

The first match counts. The last key matches all others, such as names of buckets and hosts.
"""


def resolved(value: Any) -> str:
    """Returns a text of a template, in which each reference is replaced by its longest value."""
    if isinstance(value, str):
        return value
    if "Fn::Join" in value:
        separator, parts = value["Fn::Join"]
        return str(separator).join(resolved(part) for part in parts)
    text = json.dumps(value)
    return next(longest for part, longest in LONGEST.items() if part in text)


def test_the_environment_of_a_lambda_that_creates_clusters_fits(tmp_path: Path) -> None:
    subnets = [f"subnet-0123456789abcde{number:02x}" for number in range(SUBNETS_MAX)]
    network = {
        "vpc_id": "vpc-0123456789abcdef0",
        "subnet_ids": subnets,
        "availability_zones": [f"eu-west-1{'ab'[number % 2]}" for number in range(SUBNETS_MAX)],
        "s3_endpoint": "existing",
    }
    types = [f"m{number}gnn-flex.16xlarge" for number in range(INSTANCE_TYPES_MAX)]
    configuration = settings(
        "dev",
        id="a" * 20,
        network=network,
        tags={name: "v" * (EMR_TAG_BYTES_MAX // 3 - len('{"Key":"a","Value":""},')) for name in "abc"},
        compaction={"engine": "emr-ec2-steps", "instance_types": types, "endpoints": "existing"},
    )
    assembly = synthesize(configuration, tmp_path / "assembly", checked=False)
    sizes = {
        str(function): sum(
            len(name) + len(resolved(value))
            for name, value in function.properties["Environment"]["Variables"].items()
        )
        for function in assembly.resources("AWS::Lambda::Function")
    }
    assert {name: size for name, size in sizes.items() if size > ENVIRONMENT_BYTES_MAX} == {}
    assert max(sizes.values()) > ENVIRONMENT_BYTES_MAX / 2


@pytest.mark.slow
def test_the_largest_instance_fits_into_one_stack(tmp_path: Path) -> None:
    """CloudFormation takes at most 500 resources, 200 parameters and a template of 1 MB."""
    configuration = settings(
        "prod",
        id="a" * 20,
        commit={"queues": 16},
        compaction={"engine": "emr-ec2-steps"},
        query={},
        access={},
        rows={"databases": DATABASES_MAX, "own_clusters": True},
        iam={"policies": ["operator", "reader"]},
        backup={},
        audit={},
    )
    synthesize(configuration, tmp_path / "assembly", checked=False)
    [path] = (tmp_path / "assembly").glob("*-application.template.json")
    template = json.loads(path.read_text("utf-8"))
    assert 300 < len(template["Resources"]) <= 500
    assert len(template["Parameters"]) <= 200
    assert path.stat().st_size <= 1_000_000
