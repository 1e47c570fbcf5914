"""Tests of the commit service: its one task, pause and resume, endpoints, rights, and the alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dormouse.settings.resources import RUNNING_PARAMETER, CommitResources
from tests.assembly import Assembly, Resource, settings, synthesize
from tests.template import allowed, flat

ALONE, SERVED, STEPS = "alone", "served", "steps"
PAID = {"AWS::EC2::VPCEndpoint", "AWS::ECS::Service"}
PULLS = {".ecr.api", ".ecr.dkr", ".logs"}
All = Callable[[str], Assembly]


@pytest.fixture(scope="module")
def synthesized_alone(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    """Returns an instance without a query service and without compaction on EMR."""
    changes: dict[str, Any] = {"id": "alone", "commit": {"service": True}, "query": None, "compaction": None}
    return synthesize(settings("prod", **changes), tmp_path_factory.mktemp("alone") / "out", checked=False)


@pytest.fixture(params=[ALONE, SERVED, STEPS])
def assembly(
    request: pytest.FixtureRequest, synthesized: All, synthesized_alone: Assembly
) -> Iterator[Assembly]:
    yield synthesized_alone if request.param == ALONE else synthesized(request.param)


def several(assembly: Assembly, kind: str) -> list[Resource]:
    return [one for one in assembly.resources(kind) if one.stack == "commit"]


def only(assembly: Assembly, kind: str) -> Resource:
    [found] = several(assembly, kind)
    return found


def container(assembly: Assembly) -> Any:
    [found] = only(assembly, "AWS::ECS::TaskDefinition").properties["ContainerDefinitions"]
    return found


def environment(assembly: Assembly) -> dict[str, str]:
    return {one["Name"]: flat(one["Value"]) for one in container(assembly)["Environment"]}


def endpoints(assembly: Assembly) -> set[str]:
    return {flat(one.properties["ServiceName"]) for one in several(assembly, "AWS::EC2::VPCEndpoint")}


def test_there_are_never_two_tasks(assembly: Assembly) -> None:
    properties = only(assembly, "AWS::ECS::Service").properties
    assert properties["DesiredCount"] == 1
    deployment = properties["DeploymentConfiguration"]
    assert (deployment["MinimumHealthyPercent"], deployment["MaximumPercent"]) == (0, 100)
    assert properties["AvailabilityZoneRebalancing"] == "DISABLED"  # it would start a second task first
    assert not several(assembly, "AWS::ApplicationAutoScaling::ScalableTarget")


def test_a_pause_deletes_exactly_the_parts_charged_by_the_hour(assembly: Assembly) -> None:
    ours = [one for one in assembly.resources() if one.stack == "commit"]
    asleep = {one.type for one in ours if one.body.get("Condition") == "IsRunning"}
    assert asleep == (PAID if assembly.id != STEPS else {"AWS::ECS::Service"})
    assert not {one.type for one in ours if "Condition" not in one.body} & PAID
    assert assembly.stacks["application"]["Parameters"][RUNNING_PARAMETER]["Default"] == "true"


def test_the_queues_do_not_call_the_lambda(assembly: Assembly) -> None:
    mappings = several(assembly, "AWS::Lambda::EventSourceMapping")
    assert mappings and all(one.properties["Enabled"] is False for one in mappings)


def test_the_command_and_environment_name_all_queues(assembly: Assembly) -> None:
    found = environment(assembly)
    queues = [one.name for one in several(assembly, "AWS::SQS::Queue") if "RedrivePolicy" in one.properties]
    assert found["DORMOUSE_COMMIT_QUEUE"].split(",") == queues
    assert found["DORMOUSE_QUEUES"] == str(len(queues))
    assert found["DORMOUSE_DSN"].startswith("rds-iam://dormouse_run@")
    words = container(assembly)["Command"]
    assert words[0] == "committer" and "--maintain" in words
    assert ("--no-compact" in words) == (assembly.id != ALONE), "EMR compacts, or the service"


def test_the_health_check_reads_the_file_that_the_command_touches(assembly: Assembly) -> None:
    found = container(assembly)
    file = found["Command"][found["Command"].index("--alive") + 1]
    assert found["HealthCheck"]["Command"][-1] == file
    [volume] = found["MountPoints"]
    assert file.startswith(f"{volume['ContainerPath']}/") and volume["ReadOnly"] is False
    assert found["ReadonlyRootFilesystem"] is True and found["User"] == "10001:10001"
    assert found["LinuxParameters"]["Capabilities"] == {"Drop": ["ALL"]}


def test_the_task_reaches_its_queues_and_nothing_else(assembly: Assembly) -> None:
    found = list(allowed(assembly, "commit", "ServiceTaskRole"))
    queues = {one.name: "RedrivePolicy" in one.properties for one in several(assembly, "AWS::SQS::Queue")}
    for action, where, _ in found:
        service, _, name = action.partition(":")
        if service == "sqs":
            is_main = queues[where.removesuffix("Arn")]
            assert name in {"SendMessage", "GetQueueUrl"} or is_main, (action, where)
    assert {action.partition(":")[0] for action, _, _ in found} == {"kms", "rds-db", "s3", "sqs"}
    logins = [where for action, where, _ in found if action == "rds-db:connect"]
    assert logins and all(where.endswith("dormouse_run") for where in logins)
    removed = {where.partition("/data")[2] for action, where, _ in found if action == "s3:DeleteObject"}
    assert removed == {"/*"}


def test_it_has_the_endpoints_that_no_other_part_has(synthesized: All, synthesized_alone: Assembly) -> None:
    own = {f"com.amazonaws.Region{name}" for name in (*PULLS, ".sqs")}
    assert endpoints(synthesized_alone) == own
    assert endpoints(synthesized(SERVED)) == {"com.amazonaws.Region.sqs"}
    assert endpoints(synthesized(STEPS)) == set()


def test_a_part_takes_endpoints_over_from_the_other_part(
    synthesized: All, synthesized_alone: Assembly
) -> None:
    """A deploy creates resources before it deletes others, and AWS refuses a second endpoint with a name."""
    served, alone = (
        {flat(one.properties["ServiceName"]): one.name for one in found.resources("AWS::EC2::VPCEndpoint")}
        for found in (synthesized(SERVED), synthesized_alone)
    )
    assert len(alone) > len(PULLS)
    assert {name: served[name] for name in alone} == alone


def test_the_endpoints_of_the_query_service_admit_the_task(synthesized: All) -> None:
    """Two endpoints of one service cannot both have its private name in a VPC."""
    served = synthesized(SERVED)
    [rule] = [
        one.properties
        for one in served.resources("AWS::EC2::SecurityGroupIngress")
        if "commits" in one.properties["Description"]
        and flat(one.properties["GroupId"]).startswith("QueryEndpointsGroup")
    ]
    assert (rule["FromPort"], rule["ToPort"]) == (443, 443)
    [task] = only(served, "AWS::ECS::Service").properties["NetworkConfiguration"]["AwsvpcConfiguration"][
        "SecurityGroups"
    ]
    assert rule["SourceSecurityGroupId"] == task
    images = [one.name for one in served.resources("AWS::EC2::VPCEndpoint") if one.stack == "query"]
    assert set(images) <= set(only(served, "AWS::ECS::Service").body["DependsOn"])


def test_the_task_starts_after_its_endpoints_and_ends_before_them(assembly: Assembly) -> None:
    needed = {one.name for one in several(assembly, "AWS::EC2::VPCEndpoint")}
    needed |= {one.name for one in several(assembly, "AWS::IAM::Policy") if "ServiceTask" in one.name}
    needed |= {
        one.name
        for kind in ("Ingress", "Egress")
        for one in several(assembly, f"AWS::EC2::SecurityGroup{kind}")
        if one.name.startswith("CommitServiceSecurityGroup")
    }
    depends = set(only(assembly, "AWS::ECS::Service").body["DependsOn"])
    assert needed <= depends, needed - depends


def test_layers_of_the_image_come_through_the_gateway_of_s3(assembly: Assembly) -> None:
    [gateway] = [one for one in assembly.resources("AWS::EC2::VPCEndpoint") if one.stack == "network"]
    assert "starport-layer-bucket" in str(gateway.properties["PolicyDocument"])


def test_a_parameter_records_the_service(assembly: Assembly) -> None:
    [text] = [
        flat(one.properties["Value"])
        for one in several(assembly, "AWS::SSM::Parameter")
        if one.properties["Name"].endswith("/resources/commit")
    ]
    found = CommitResources.model_validate_json(text).service
    assert found is not None
    assert found.service == "commit"
    assert found.endpoints == len(endpoints(assembly))


@pytest.mark.parametrize("name", [SERVED, STEPS])
def test_an_alarm_rings_while_the_instance_runs_and_no_task_does(name: str, synthesized: All) -> None:
    [alarm] = [
        one
        for one in synthesized(name).resources("AWS::CloudWatch::Alarm")
        if "commit service" in one.properties["AlarmDescription"]
    ]
    properties = alarm.properties
    assert properties["AlarmDescription"].startswith("Critical: ")
    assert (properties["ComparisonOperator"], properties["Threshold"]) == ("LessThanThreshold", 1)
    metrics = {one["Id"]: one for one in properties["Metrics"]}
    assert metrics["cpu"]["MetricStat"]["Metric"]["Namespace"] == "AWS/ECS"
    [expression] = [one["Expression"] for one in metrics.values() if "Expression" in one]
    # without metrics of the database, the instance sleeps; without those of the task, none runs
    assert expression == "IF(FILL(connections, -1) >= 0, IF(FILL(cpu, -1) >= 0, 1, 0), 1)"


def test_without_the_setting_there_is_no_task(synthesized: All) -> None:
    found = synthesized("prod")
    assert not [one for one in found.resources("AWS::ECS::Service") if one.stack == "commit"]
