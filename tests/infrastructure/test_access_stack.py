"""Tests of the host for access: nothing can connect to it, it reaches only the database, a pause ends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.assembly import Assembly, settings, synthesize
from tests.infrastructure.reviewed import Yaml, shortened
from tests.infrastructure.test_policies import rights
from tests.template import allowed, flat

All = Callable[[str], Assembly]
IMAGE = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-arm64"


@pytest.fixture
def own(synthesized: All) -> Assembly:
    """Returns the assembly of an instance with its own VPC, deployed paused."""
    return synthesized("transient")


def of(assembly: Assembly, kind: str) -> list[Any]:
    return [one for one in assembly.resources(kind) if one.stack == "access"]


@pytest.mark.slow
def test_its_template_is_as_reviewed(own: Assembly, snapshot: SnapshotAssertion) -> None:
    template = {"access": own.templates["access"]}
    assert shortened(template, own.id) == snapshot(extension_class=Yaml)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dev", "prod", "minimal"])
def test_there_is_no_host_unless_the_settings_have_one(name: str, synthesized: All) -> None:
    assert "access" not in synthesized(name).templates
    assert not list(synthesized(name).resources("AWS::EC2::Instance"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["steps", "transient"])
def test_nothing_can_connect_to_the_host(name: str, synthesized: All) -> None:
    """The host has no inbound rule, no public address and no SSH key."""
    found = synthesized(name)
    [host] = of(found, "AWS::EC2::Instance")
    assert "KeyName" not in host.properties
    [interface] = host.properties["NetworkInterfaces"]
    assert interface["AssociatePublicIpAddress"] is False
    [group] = [flat(one) for one in interface["GroupSet"]]
    rules = of(found, "AWS::EC2::SecurityGroupIngress")
    assert not [one for one in rules if flat(one.properties["GroupId"]) == group]
    [made] = [one for one in of(found, "AWS::EC2::SecurityGroup") if group.startswith(one.name)]
    assert "SecurityGroupIngress" not in made.properties


@pytest.mark.slow
def test_the_host_has_the_smallest_size_and_fewest_rights(own: Assembly) -> None:
    [host] = of(own, "AWS::EC2::Instance")
    assert host.properties["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
    [disk] = host.properties["BlockDeviceMappings"]
    assert disk["Ebs"]["Encrypted"] is True
    assert host.properties["InstanceType"] == "t4g.nano"
    image = own.stacks["application"]["Parameters"][host.properties["ImageId"]["Ref"]]
    assert (image["Default"], image["Type"]) == (IMAGE, "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>")
    may = {(action, where) for action, where, _ in allowed(own, "access", "Role")}
    assert may == {
        ("ssm:UpdateInstanceInformation", "*"),
        *(
            (f"ssmmessages:{verb}{what}Channel", "*")
            for verb in ("Create", "Open")
            for what in ("Control", "Data")
        ),
    }


def test_a_pause_deletes_exactly_the_parts_that_cost_money(own: Assembly) -> None:
    """Only the host and the endpoints cost money."""
    template = own.templates["access"]
    conditional = {
        one["Type"] for one in template["Resources"].values() if one.get("Condition") == "IsRunning"
    }
    assert conditional == {
        "AWS::EC2::Instance", "AWS::EC2::VPCEndpoint", "AWS::IAM::InstanceProfile"
    }  # fmt: skip
    costing = [
        one for one in of(own, "AWS::EC2::Instance") + of(own, "AWS::EC2::VPCEndpoint")
        if one.body.get("Condition") != "IsRunning"
    ]  # fmt: skip
    assert costing == []
    services = {
        flat(one.properties["ServiceName"]).rpartition(".")[2] for one in of(own, "AWS::EC2::VPCEndpoint")
    }
    assert services == {"ssm", "ssmmessages"}
    assert all(len(one.properties["SubnetIds"]) == 1 for one in of(own, "AWS::EC2::VPCEndpoint"))


@pytest.mark.slow
def test_a_vpc_with_existing_endpoints_gets_none(synthesized: All) -> None:
    assert not of(synthesized("steps"), "AWS::EC2::VPCEndpoint")


def test_the_switch_may_read_the_image_parameter_of_the_template(own: Assembly) -> None:
    """The parameter of the image belongs to AWS, so its ARN has no account."""
    may = [
        where
        for action, where, _ in allowed(own, "application", "SwitchRole")
        if action == "ssm:GetParameters"
    ]
    assert f"arn:Partition:ssm:Region::parameter{IMAGE}" in may
    parameters = own.stacks["application"]["Parameters"].values()
    read = {one["Default"] for one in parameters if one["Type"].startswith("AWS::SSM::Parameter::Value")}
    assert read <= {one.rpartition(":parameter")[2] for one in may} | {"/cdk-bootstrap/hnb659fds/version"}


@pytest.mark.slow
def test_a_reader_may_forward_a_port_but_not_open_a_shell(tmp_path: Path) -> None:
    configuration = settings("minimal", access={}, iam={"policies": ["reader", "operator"]})
    found = synthesize(configuration, tmp_path / "assembly")
    assert found.findings == []
    (hosts, on), (document, checked) = sorted(rights(found, "Reader")["ssm:StartSession"])
    hosts, on, document, checked = (
        (hosts, on, document, checked) if ":instance/" in hosts else (document, checked, hosts, on)
    )
    assert document.endswith("::document/AWS-StartPortForwardingSessionToRemoteHost")
    assert on["StringEquals"] == {"ssm:resourceTag/dormouse:access": "minimal"}
    for condition in (on, checked):
        assert condition["BoolIfExists"] == {"ssm:SessionDocumentAccessCheck": "true"}
    tags = {one["Key"]: one["Value"] for one in of(found, "AWS::EC2::Instance")[0].properties["Tags"]}
    assert tags["dormouse:access"] == "minimal"
    assert "ssm:StartSession" not in rights(found, "Operator")
    # the switch, the two lambdas of tables, and garbage collection
    assert len(rights(found, "Operator")["lambda:InvokeFunction"]) == 4
