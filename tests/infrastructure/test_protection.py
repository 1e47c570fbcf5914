"""Tests of resources that a protected instance keeps, trust of roles, and automatic upgrades."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.assembly import CONFIGURATIONS, Assembly, settings, synthesize
from tests.template import DELETED, KEPT, flat, policies

OF_RUNS = ("CompactionRunsLogs", "MaintenanceRunsLogs")
WITHOUT_ACCOUNT = {"ec2.amazonaws.com", "lambda.amazonaws.com", "rds.amazonaws.com"}
"""AWS services whose requests to assume a role do not name the account, according to AWS's documentation."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_only_a_protected_instance_keeps_its_logs(name: str, synthesized: Callable[[str], Assembly]) -> None:
    wanted = KEPT if CONFIGURATIONS[name]().protected else DELETED
    groups = list(synthesized(name).resources("AWS::Logs::LogGroup"))
    assert groups
    for one in groups:
        assert policies(one) == (DELETED if one.name.startswith(OF_RUNS) else wanted), str(one)


@pytest.mark.slow
def test_an_optional_part_of_a_permanent_stack_keeps_no_name(
    synthesized: Callable[[str], Assembly], tmp_path: Path
) -> None:
    """A resource with a fixed name that stays would make the deploy fail when the option is enabled again."""
    whole = synthesized("prod")
    less = synthesize(settings("prod", compaction=None), tmp_path / "assembly", checked=False)
    names = {"AliasName", "BackupVaultName", "BucketName", "LogGroupName", "Name", "QueueName"}
    found = [
        {
            str(one)
            for one in assembly.resources()
            if names & one.properties.keys() and "Retain" in one.body.get("DeletionPolicy", "")
            if one.stack in whole.templates.keys() & less.templates.keys()
        }
        for assembly in (whole, less)
    ]
    assert found[0] and found[0] == found[1]


def test_roles_trust_services_for_this_account_only(assembly: Assembly) -> None:
    for role in assembly.resources("AWS::IAM::Role"):
        for statement in role.properties["AssumeRolePolicyDocument"]["Statement"]:
            found = statement.get("Condition", {})
            condition = found.get("StringEquals", found.get("StringEqualsIfExists", {}))
            if statement["Principal"]["Service"] not in WITHOUT_ACCOUNT:
                assert flat(condition.get("aws:SourceAccount")) == "AccountId" or "1234" in str(condition), (
                    str(role)
                )


def test_no_other_queue_may_send_its_dead_letters_to_commit_queues(assembly: Assembly) -> None:
    queues = {f"{one.stack}/{one.name}": one.properties for one in assembly.resources("AWS::SQS::Queue")}
    sources = {name: one for name, one in queues.items() if "RedrivePolicy" in one}
    assert sources
    for name, one in sources.items():
        assert one.get("RedriveAllowPolicy") == {"redrivePermission": "denyAll"}, name


def test_logs_of_state_machines_need_no_policies_of_their_own(assembly: Assembly) -> None:
    """The names of these logs begin with /aws/vendedlogs, for which CloudWatch needs no list of the logs.

    Such a list has a size limit. The names contain the id of their stack.
    """
    names = {
        f"{one.stack}/{one.name}": flat(one.properties.get("LogGroupName"))
        for one in assembly.resources("AWS::Logs::LogGroup")
        if one.name.startswith(OF_RUNS)
    }
    assert len(names) == len(list(assembly.resources("AWS::StepFunctions::StateMachine")))
    for name in names.values():
        assert name.startswith("/aws/vendedlogs/states/dormouse-") and "StackId" in name


@pytest.mark.slow
def test_a_pause_can_delete_the_load_balancer_of_a_protected_instance(tmp_path: Path) -> None:
    """The load balancer of a protected instance is not protected, so that a pause can delete it."""
    configuration = settings("minimal", protected=True, query={})
    found = synthesize(configuration, tmp_path / "assembly", checked=False)
    [balancer] = found.resources("AWS::ElasticLoadBalancingV2::LoadBalancer")
    attributes = {one["Key"]: one["Value"] for one in balancer.properties["LoadBalancerAttributes"]}
    assert attributes["deletion_protection.enabled"] == "false"


@pytest.mark.slow
@pytest.mark.parametrize(("protected", "wanted"), [(True, KEPT), (False, DELETED)])
def test_a_protected_instance_keeps_queues_that_the_settings_remove(
    protected: bool, wanted: Any, tmp_path: Path
) -> None:
    """The removed queues keep their messages and dead letters."""
    configuration = settings("minimal", protected=protected, commit={"queues": 2}, pause={})
    found = synthesize(configuration, tmp_path / "assembly", checked=False)
    queues = {one.name: policies(one) for one in found.resources("AWS::SQS::Queue") if one.stack == "commit"}
    assert len(queues) == 4 and set(queues.values()) == {wanted}
    starts = [policies(one) for one in found.resources("AWS::SQS::Queue") if one.stack == "pause"]
    assert starts == [DELETED] * 2, "the next hourly event replaces their messages"


@pytest.mark.few(1)
@pytest.mark.parametrize(("given", "wanted"), [({}, True), ({"minor_upgrades": False}, False)])
def test_minor_versions_are_upgraded_unless_the_settings_refuse_it(
    given: dict[str, Any], wanted: bool, tmp_path: Path
) -> None:
    database = {"kind": "serverless", "readers": 1, **given}
    found = synthesize(settings("minimal", database=database), tmp_path / "assembly", checked=False)
    instances = list(found.resources("AWS::RDS::DBInstance"))
    assert [one.properties["AutoMinorVersionUpgrade"] for one in instances] == [wanted] * 2
