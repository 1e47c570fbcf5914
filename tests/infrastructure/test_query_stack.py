"""Tests of the query service: pause and resume, its clients, and the rights and settings of its tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dormouse.rows.cluster import addresses
from dormouse.settings.database import QuerySettings
from dormouse.settings.process import load_settings
from dormouse.settings.resources import RUNNING_PARAMETER, QueryResources
from dormouse.settings.section import CONNECT_SECONDS_MAX
from dormouse.settings.service import SERVICE_PREFIX, ServiceSettings
from tests.assembly import CONFIGURATIONS, Assembly, Resource
from tests.support.settings import load_service_settings
from tests.template import allowed, flat

QUERIED = ["prod", "steps", "transient"]
PAID = {
    "AWS::ApplicationAutoScaling::ScalableTarget",
    "AWS::ApplicationAutoScaling::ScalingPolicy",
    "AWS::EC2::VPCEndpoint",
    "AWS::ECS::Service",
    "AWS::ElasticLoadBalancingV2::Listener",
    "AWS::ElasticLoadBalancingV2::LoadBalancer",
    "AWS::Route53::RecordSet",
}
"""Types of resources that cost money by the hour, or cannot exist without such a resource."""

ENDPOINTS = {".ecr.api", ".ecr.dkr", ".logs", ".secretsmanager"}
All = Callable[[str], Assembly]


@pytest.fixture(params=QUERIED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def query_of(name: str) -> QuerySettings:
    found = CONFIGURATIONS[name]().query
    assert found is not None
    return found


def several(assembly: Assembly, *kinds: str) -> list[Resource]:
    return [one for one in assembly.resources(*kinds) if one.stack == "query"]


def only(assembly: Assembly, kind: str, begins: str = "") -> Resource:
    [found] = [one for one in several(assembly, kind) if one.name.startswith(begins)]
    return found


def container(assembly: Assembly) -> Any:
    [found] = only(assembly, "AWS::ECS::TaskDefinition").properties["ContainerDefinitions"]
    return found


def environment(assembly: Assembly) -> dict[str, str]:
    return {one["Name"]: flat(one["Value"]) for one in container(assembly)["Environment"]}


def attributes(resource: Resource, key: str) -> dict[str, str]:
    return {one["Key"]: flat(one["Value"]) for one in resource.properties[key]}


def references(value: Any) -> Iterator[str]:
    """Yields the logical ids of the resources to which a value of a template refers."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "Ref" or key == "Fn::GetAtt":
                yield inner if isinstance(inner, str) else inner[0]
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


# --- pause and resume


def test_a_pause_deletes_exactly_the_parts_charged_by_the_hour(name: str, synthesized: All) -> None:
    found = several(synthesized(name))
    asleep = {one.type for one in found if one.body.get("Condition") == "IsRunning"}
    assert asleep == (PAID if query_of(name).endpoints != "existing" else PAID - {"AWS::EC2::VPCEndpoint"})
    assert not {one.type for one in found if "Condition" not in one.body} & PAID


def test_permanent_parts_do_not_refer_to_parts_that_a_pause_deletes(name: str, synthesized: All) -> None:
    """CloudFormation refuses to delete a resource that another refers to, so a pause would fail."""
    found = several(synthesized(name))
    goes = {one.name for one in found if "Condition" in one.body}
    for one in found:
        if one.name not in goes:
            assert not goes & set(references(one.properties)), str(one)
    application = synthesized(name).stacks["application"]
    assert not goes & set(references(application.get("Outputs", {})))


def test_the_service_runs_unless_a_pause_has_changed_the_parameter(name: str, synthesized: All) -> None:
    """The parameter `Running` is true by default. A deploy by the CDK's CLI keeps its current value."""
    parameter = synthesized(name).stacks["application"]["Parameters"][RUNNING_PARAMETER]
    assert parameter["Default"] == "true"
    assert parameter["AllowedValues"] == ["true", "false"]


def test_tasks_start_after_their_endpoints_and_end_before_them(name: str, synthesized: All) -> None:
    """The service depends on its endpoints, rights and rules, which tasks need until they have ended.

    CloudFormation deletes resources in the reverse order of their dependencies.
    """
    assembly = synthesized(name)
    needed = {one.name for one in several(assembly, "AWS::EC2::VPCEndpoint")}
    needed |= {one.name for one in several(assembly, "AWS::IAM::Policy") if one.name.startswith("QueryTask")}
    needed |= {one.name for one in several(assembly, "AWS::ElasticLoadBalancingV2::Listener")}
    needed |= {
        one.name
        for one in several(assembly, "AWS::EC2::SecurityGroupEgress")
        if one.name.startswith("QueryTask")
    }
    assert needed <= set(only(assembly, "AWS::ECS::Service").body["DependsOn"])


def test_a_parameter_records_the_deployed_resources(name: str, synthesized: All) -> None:
    parameter = only(synthesized(name), "AWS::SSM::Parameter", "QueryResources")
    recorded = QueryResources.model_validate_json(flat(parameter.properties["Value"]))
    query = query_of(name)
    assert recorded.url == (
        "https://query.example.org" if name == "steps" else f"http://query.{name}.dormouse.internal"
    )
    assert recorded.service == only(synthesized(name), "AWS::ECS::Service").properties["ServiceName"]
    assert (recorded.tasks_min, recorded.cpu, recorded.memory_mb) == (
        query.tasks_min,
        query.cpu,
        query.memory_mb,
    )
    assert recorded.endpoints == len(several(synthesized(name), "AWS::EC2::VPCEndpoint"))


# --- allowed connections


def test_only_clients_of_the_settings_reach_the_load_balancer(name: str, synthesized: All) -> None:
    query, port = query_of(name), 443 if name == "steps" else 80
    group = only(synthesized(name), "AWS::EC2::SecurityGroup", "QueryBalancerGroup")
    inline = group.properties.get("SecurityGroupIngress", [])
    apart = [
        one.properties
        for one in several(synthesized(name), "AWS::EC2::SecurityGroupIngress")
        if group.name in references(one.properties["GroupId"])
    ]
    let_in = [rule.get("CidrIp") or rule["SourceSecurityGroupId"] for rule in [*inline, *apart]]
    assert sorted(let_in) == sorted([*query.client_cidrs, *query.client_security_groups])
    assert {(rule["FromPort"], rule["ToPort"]) for rule in [*inline, *apart]} <= {(port, port)}
    assert (name == "steps") == bool(let_in)


def test_only_the_load_balancer_reaches_tasks_and_only_tasks_reach_the_endpoints(synthesized: All) -> None:
    groups = {
        one.properties["GroupDescription"].rpartition(": ")[2]: one.name
        for one in several(synthesized("prod"), "AWS::EC2::SecurityGroup")
    }
    ways = {
        (source, target, one.properties["FromPort"])
        for one in several(synthesized("prod"), "AWS::EC2::SecurityGroupIngress")
        for source in references(one.properties["SourceSecurityGroupId"])
        for target in references(one.properties["GroupId"])
    }
    balancer, tasks, endpoints = (groups[one] for one in ("load balancer", "tasks", "interface endpoints"))
    assert ways == {(balancer, tasks, 8088), (tasks, endpoints, 443)}
    leads_to_database = [
        one.properties
        for one in several(synthesized("prod"), "AWS::EC2::SecurityGroupIngress")
        if "Fn::ImportValue" in one.properties["GroupId"]
    ]
    assert [(one["FromPort"], one["ToPort"]) for one in leads_to_database] == [(5433, 5433)]


def test_the_load_balancer_is_internal_writes_logs_and_can_be_deleted(name: str, synthesized: All) -> None:
    query, balancer = query_of(name), only(synthesized(name), "AWS::ElasticLoadBalancingV2::LoadBalancer")
    assert balancer.properties["Scheme"] == "internal"
    has = attributes(balancer, "LoadBalancerAttributes")
    assert has["deletion_protection.enabled"] == "false"
    assert has["routing.http.drop_invalid_header_fields.enabled"] == has["access_logs.s3.enabled"] == "true"
    # the first row may come only at the end of a query
    assert query.seconds_max < int(has["idle_timeout.timeout_seconds"]) <= 4_000
    [policy] = [
        one
        for one in synthesized(name).resources("AWS::S3::BucketPolicy")
        if "AccessLogs" in json.dumps(one.properties["Bucket"])
    ]
    [writes] = [
        one for one in policy.properties["PolicyDocument"]["Statement"] if one.get("Sid") == "LoadBalancers"
    ]
    assert writes["Principal"]["Service"] == "logdelivery.elasticloadbalancing.amazonaws.com"
    where = flat(writes["Resource"])
    account = CONFIGURATIONS[name]().account or "AccountId"
    assert where.endswith(f"/{has['access_logs.s3.prefix']}/AWSLogs/{account}/*")


def test_a_service_with_a_certificate_accepts_only_modern_tls(synthesized: All) -> None:
    [listener] = several(synthesized("steps"), "AWS::ElasticLoadBalancingV2::Listener")
    assert (listener.properties["Port"], listener.properties["Protocol"]) == (443, "HTTPS")
    assert listener.properties["SslPolicy"] == "ELBSecurityPolicy-TLS13-1-2-Res-2021-06"
    assert listener.properties["Certificates"] == [{"CertificateArn": query_of("steps").certificate_arn}]


def test_the_name_of_the_service_is_permanent(name: str, synthesized: All) -> None:
    zone = only(synthesized(name), "AWS::Route53::HostedZone")
    record = only(synthesized(name), "AWS::Route53::RecordSet").properties
    assert zone.properties["Name"] == record["Name"] == f"{query_of(name).host_of(name)}."
    assert zone.properties["VPCs"], "the zone is private"
    assert "Condition" not in zone.body


# --- endpoints


def test_there_are_only_the_endpoints_that_tasks_need_each_in_one_zone(synthesized: All) -> None:
    found = several(synthesized("prod"), "AWS::EC2::VPCEndpoint")
    assert {flat(one.properties["ServiceName"]).partition("Region")[2] for one in found} == ENDPOINTS
    for one in found:
        assert one.properties["PrivateDnsEnabled"] is True
        assert len(one.properties["SubnetIds"]) == 1
        [statement] = one.properties["PolicyDocument"]["Statement"]
        assert statement["Condition"] == {"StringEquals": {"aws:PrincipalAccount": {"Ref": "AWS::AccountId"}}}


def test_a_vpc_with_existing_endpoints_gets_no_others(synthesized: All) -> None:
    assert several(synthesized("steps"), "AWS::EC2::VPCEndpoint") == []


def test_the_endpoint_of_s3_allows_layers_of_images(name: str, synthesized: All) -> None:
    [endpoint] = [
        one for one in synthesized(name).resources("AWS::EC2::VPCEndpoint") if one.stack == "network"
    ]
    [layers] = [
        one
        for one in endpoint.properties["PolicyDocument"]["Statement"]
        if one.get("Sid") == "LayersOfImages"
    ]
    assert (layers["Action"], layers["Effect"]) == ("s3:GetObject", "Allow")
    assert flat(layers["Resource"]).endswith("-starport-layer-bucket/*")


# --- tasks


def role_of(name: str) -> str:
    return "dormouse_run" if CONFIGURATIONS[name]().rows else "dormouse_read"


def test_a_task_may_only_read_unless_it_changes_row_tables(name: str, synthesized: All) -> None:
    found = list(allowed(synthesized(name), "query", "TaskRole"))
    rights = {action: where for action, where, _ in found}
    reads = {"kms:Decrypt", "rds-db:connect", "s3:GetObject", "s3:ListBucket"}
    writes = {"kms:GenerateDataKey", "s3:DeleteObject", "s3:PutObject"}
    assert rights.keys() == reads | (writes if CONFIGURATIONS[name]().rows else set())
    users = [where for action, where, _ in found if action == "rds-db:connect"]
    assert all(one.endswith(f"/{role_of(name)}") for one in users)
    assert len(users) == (2 if name == "transient" else 1)  # it has a separate cluster for row tables
    assert rights["s3:GetObject"].endswith("/data/*")


def test_the_role_that_starts_tasks_may_only_get_image_log_and_token(name: str, synthesized: All) -> None:
    rights = {action: where for action, where, _ in allowed(synthesized(name), "query", "TaskExecutionRole")}
    assert {action.partition(":")[0] for action in rights} == {"ecr", "logs", "secretsmanager"}
    assert ":repository/" in rights["ecr:BatchGetImage"] and "*" not in rights["ecr:BatchGetImage"]
    assert rights["secretsmanager:GetSecretValue"].startswith("QueryTaskToken")


def test_only_tasks_of_this_account_may_assume_the_roles(name: str, synthesized: All) -> None:
    roles = [one for one in several(synthesized(name), "AWS::IAM::Role") if one.name.startswith("QueryTask")]
    assert len(roles) == 2
    for role in roles:
        [trust] = role.properties["AssumeRolePolicyDocument"]["Statement"]
        assert trust["Principal"] == {"Service": "ecs-tasks.amazonaws.com"}
        assert trust["Condition"].keys() == {"StringEquals", "ArnLike"}


def test_a_task_has_no_privileges_and_a_read_only_disk(name: str, synthesized: All) -> None:
    assembly = synthesized(name)
    task, service = container(assembly), only(assembly, "AWS::ECS::Service").properties
    assert task["ReadonlyRootFilesystem"] is True
    assert task["User"] == "10001:10001"
    assert task["LinuxParameters"]["Capabilities"] == {"Drop": ["ALL"]}
    assert [(one["ContainerPath"], one["ReadOnly"]) for one in task["MountPoints"]] == [("/tmp", False)]  # noqa: S108
    assert "Privileged" not in task
    assert service["EnableExecuteCommand"] is False
    assert service["NetworkConfiguration"]["AwsvpcConfiguration"]["AssignPublicIp"] == "DISABLED"


def test_the_token_is_a_secret_and_not_in_the_environment(name: str, synthesized: All) -> None:
    assembly = synthesized(name)
    token = only(assembly, "AWS::SecretsManager::Secret")
    assert token.properties["GenerateSecretString"] == {"ExcludePunctuation": True, "PasswordLength": 43}
    assert "Condition" not in token.body  # clients keep it through a pause
    [secret] = container(assembly)["Secrets"]
    assert secret == {"Name": f"{SERVICE_PREFIX}TOKEN", "ValueFrom": {"Ref": token.name}}
    assert token.name not in references(container(assembly)["Environment"])


def test_the_service_understands_its_environment(
    name: str, synthesized: All, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, query = environment(synthesized(name)), query_of(name)
    for key, value in {**found, f"{SERVICE_PREFIX}TOKEN": "t" * 43}.items():
        monkeypatch.setenv(key, value)
    of_service = {key for key in found if key.startswith(SERVICE_PREFIX)}
    assert {
        key.removeprefix(SERVICE_PREFIX).lower() for key in of_service
    } <= ServiceSettings.model_fields.keys()
    settings = load_service_settings()
    assert (settings.host, settings.port) == ("0.0.0.0", 8088)  # noqa: S104
    limits = (settings.queries_max, settings.rows_max, settings.bytes_max, settings.seconds_max)
    assert limits == (query.queries_max, query.rows_max, query.bytes_max, query.seconds_max)
    assert settings.shutdown_seconds_max < container(synthesized(name))["StopTimeout"] == 120
    assert found["DORMOUSE_DSN"].startswith(f"rds-iam://{role_of(name)}@")
    rows = CONFIGURATIONS[name]().rows
    assert settings.job_threads == (rows and rows.job_threads)
    indexes = addresses(found["DORMOUSE_DSN"], found.get("DORMOUSE_ROW_INDEXES"))
    assert [one.rpartition("/")[2] for one in indexes] == {
        "steps": [f"dormouse_rows_{number}" for number in (1, 2, 3)],
        "transient": ["dormouse_rows"],
    }.get(name, ["1", "2"])
    assert found["DORMOUSE_OBJECTS"].endswith("/data")
    assert load_settings().connection_wait_seconds_max > CONNECT_SECONDS_MAX


def test_the_health_check_needs_no_database_and_answers_may_finish(name: str, synthesized: All) -> None:
    targets = only(synthesized(name), "AWS::ElasticLoadBalancingV2::TargetGroup")
    assert targets.properties["HealthCheckPath"] == "/health"
    has = attributes(targets, "TargetGroupAttributes")
    assert int(has["deregistration_delay.timeout_seconds"]) == query_of(name).seconds_max
    assert has["load_balancing.algorithm.type"] == "least_outstanding_requests"


def test_tasks_scale_and_a_bad_release_is_rolled_back(name: str, synthesized: All) -> None:
    query, assembly = query_of(name), synthesized(name)
    deployment = only(assembly, "AWS::ECS::Service").properties["DeploymentConfiguration"]
    assert deployment["DeploymentCircuitBreaker"] == {"Enable": True, "Rollback": True}
    assert deployment["MinimumHealthyPercent"] == 100
    scaled = only(assembly, "AWS::ApplicationAutoScaling::ScalableTarget").properties
    assert (scaled["MinCapacity"], scaled["MaxCapacity"]) == (query.tasks_min, query.tasks_max)
    policies = several(assembly, "AWS::ApplicationAutoScaling::ScalingPolicy")
    tracked = {
        one.properties["TargetTrackingScalingPolicyConfiguration"]["PredefinedMetricSpecification"][
            "PredefinedMetricType"
        ]: one.properties["TargetTrackingScalingPolicyConfiguration"]["TargetValue"]
        for one in policies
    }
    assert tracked == {
        "ECSServiceAverageCPUUtilization": query.cpu_percent,
        "ALBRequestCountPerTarget": query.requests_minute,
    }


def test_tasks_have_the_size_disk_and_processor_of_the_settings(name: str, synthesized: All) -> None:
    query, task = query_of(name), only(synthesized(name), "AWS::ECS::TaskDefinition").properties
    assert (task["Cpu"], task["Memory"]) == (str(query.cpu), str(query.memory_mb))
    wanted = {"SizeInGiB": query.disk_gb} if query.disk_gb > 20 else None
    assert task.get("EphemeralStorage") == wanted
    architecture = {"arm64": "ARM64", "x86_64": "X86_64"}[CONFIGURATIONS[name]().architecture]
    assert task["RuntimePlatform"]["CpuArchitecture"] == architecture


def test_an_image_of_the_settings_is_used_unchanged(synthesized: All) -> None:
    found = flat(container(synthesized("steps"))["Image"])
    assert found.startswith("123456789012.dkr.ecr.eu-central-1.") and found.endswith("/tools/dormouse:1.0")
    assert "cdk-" in flat(container(synthesized("prod"))["Image"])


def test_alarms_watch_the_permanent_target_group(synthesized: All) -> None:
    """Each resume creates another load balancer, so an alarm on the load balancer would watch the old one."""
    targets = only(synthesized("prod"), "AWS::ElasticLoadBalancingV2::TargetGroup").name
    alarms = {
        one.properties["AlarmName"]
        .removeprefix("dormouse-prod-Query-")
        .removesuffix("-Alarm"): one.properties
        for one in synthesized("prod").resources("AWS::CloudWatch::Alarm")
        if "Query-" in one.properties["AlarmName"]
    }
    watched = {
        "errors": "HTTPCode_Target_5XX_Count",
        "unhealthy-tasks": "UnHealthyHostCount",
        "no-healthy-task": "HealthyHostCount",
    }
    for name, metric in watched.items():
        [found] = alarms[name]["Metrics"]
        text = flat(found["Expression"])
        assert text.startswith("SELECT ") and f"({metric})" in text
        assert f"WHERE TargetGroup = '{targets}" in text
    # No task at all is neither unhealthy nor sends errors, so only this alarm detects it.
    found = alarms["no-healthy-task"]
    assert (found["ComparisonOperator"], found["Threshold"]) == ("LessThanThreshold", 1)
