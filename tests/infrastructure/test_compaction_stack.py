"""Tests of Spark on EMR: its rights, the lambdas that submit to it, and the requests that EMR must accept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator

from dormouse.settings.database import EmrStepsCompaction
from dormouse.settings.resources import RunResources
from tests.assembly import CONFIGURATIONS, Assembly, settings, synthesize
from tests.support.settings import RunsEnvironment, load_environment, parse
from tests.template import allowed, flat

ENGINES = {"dev": "emr-serverless", "steps": "emr-ec2-steps", "transient": "emr-ec2-transient"}
ON_EC2 = ["steps", "transient"]
CLUSTERS = "arn:Partition:elasticmapreduce:Region:AccountId:cluster/*"
TAGGED = "elasticmapreduce:ResourceTag/dormouse:instance"
LAUNCHING = ("CreateFleet", "CreateLaunchTemplate", "CreateLaunchTemplateVersion", "RunInstances")
All = Callable[[str], Assembly]


@pytest.fixture(params=list(ENGINES))
def name(request: pytest.FixtureRequest) -> str:
    """Returns the names of configurations in turn, one for each engine."""
    return str(request.param)


@pytest.fixture
def environment(name: str, synthesized: All, monkeypatch: pytest.MonkeyPatch) -> RunsEnvironment:
    return runs_environment(synthesized(name), monkeypatch)


@pytest.mark.few(1)
def test_the_environment_names_the_engine_database_and_objects(
    name: str, environment: RunsEnvironment
) -> None:
    assert environment.engine == ENGINES[name]
    assert environment.instance_id == name
    assert environment.dsn.startswith("rds-iam://dormouse_run@")
    assert environment.objects.endswith("/data")
    assert environment.run_minutes_max == 360


@pytest.mark.few(1)
def test_the_archive_has_an_ending_that_spark_unpacks(environment: RunsEnvironment) -> None:
    """The CDK would shorten the ending .tar.gz of an asset to .gz, which Spark does not unpack."""
    assert environment.archive.startswith("s3://cdk-")
    assert environment.archive.endswith(".tgz")
    assert environment.entry.endswith(".py")


@pytest.mark.parametrize("name", ON_EC2)
def test_the_request_for_a_cluster_is_valid_for_emr(name: str, environment: RunsEnvironment) -> None:
    template = environment.cluster_template or {}
    request = {**template, "Name": environment.cluster_name, "Steps": []}
    service = botocore.session.get_session().get_service_model("emr")
    shape = service.operation_model("RunJobFlow").input_shape
    assert ParamValidator().validate(request, shape).generate_report() == ""
    assert {"Key": "dormouse:instance", "Value": name} in template["Tags"]
    assert template["ReleaseLabel"] == "emr-spark-8.0.0"
    settings = CONFIGURATIONS[name]().compaction
    assert settings is not None and settings.engine != "emr-serverless"
    limits = template["ManagedScalingPolicy"]["ComputeLimits"]
    assert limits["MaximumCapacityUnits"] == settings.instances_max
    for fleet in template["Instances"]["InstanceFleets"]:
        types = [kind["InstanceType"] for kind in fleet["InstanceTypeConfigs"]]
        assert types == list(settings.instance_types)


@pytest.mark.parametrize("name", ON_EC2)
def test_only_a_cluster_for_steps_stays_alive_without_steps(name: str, environment: RunsEnvironment) -> None:
    template = environment.cluster_template or {}
    settings = CONFIGURATIONS[name]().compaction
    assert template["Instances"]["KeepJobFlowAliveWhenNoSteps"] is (name == "steps")
    if isinstance(settings, EmrStepsCompaction):
        assert template["AutoTerminationPolicy"] == {"IdleTimeout": settings.idle_minutes * 60}
    else:
        assert "AutoTerminationPolicy" not in template


@pytest.mark.parametrize("name", ON_EC2)
def test_clusters_are_encrypted(name: str, environment: RunsEnvironment, synthesized: All) -> None:
    [security] = synthesized(name).resources("AWS::EMR::SecurityConfiguration")
    encryption = security.properties["SecurityConfiguration"]["EncryptionConfiguration"]
    at_rest = encryption["AtRestEncryptionConfiguration"]
    assert encryption["EnableAtRestEncryption"] is True
    assert at_rest["LocalDiskEncryptionConfiguration"]["EnableEbsEncryption"] is True
    assert at_rest["S3EncryptionConfiguration"]["EncryptionMode"] == "SSE-KMS"
    template = environment.cluster_template or {}
    assert template["SecurityConfiguration"] == security.name
    [spark] = template["Configurations"]
    for key in ("spark.authenticate", "spark.network.crypto.enabled", "spark.io.encryption.enabled"):
        assert spark["Properties"][key] == "true"
    # The shuffle service of the nodes would refuse executors that must authenticate.
    assert spark["Properties"]["spark.shuffle.service.enabled"] == "false"


def test_clusters_reach_the_buckets_that_their_start_needs(synthesized: All) -> None:
    for name, engine in ENGINES.items():
        endpoints = synthesized(name).resources("AWS::EC2::VPCEndpoint")
        reached = "".join(map(flat, (one.properties.get("PolicyDocument") for one in endpoints)))
        assert ("aws157-instance-data-0-prod-" in reached) is (engine != "emr-serverless"), name


@pytest.mark.few(1)  # each is an application of its own
@pytest.mark.parametrize("engine", ["emr-ec2-steps", "emr-ec2-transient"])
def test_clusters_reach_emr_by_an_endpoint_that_exists_while_the_instance_runs(
    engine: str, tmp_path: Path
) -> None:
    """Clusters of emr-spark-8.0.0 and later in private subnets cannot start without it."""
    assembly = synthesize(settings("dev", compaction={"engine": engine}), tmp_path, checked=False)
    [endpoint] = [one for one in assembly.resources("AWS::EC2::VPCEndpoint") if one.stack == "compaction"]
    assert flat(endpoint.properties["ServiceName"]) == "aws.api.Region.emr-service-cell01"
    assert (endpoint.body["Condition"], endpoint.properties["PrivateDnsEnabled"]) == ("IsRunning", True)
    assert len(endpoint.properties["SubnetIds"]) == 1
    [group] = endpoint.properties["SecurityGroupIds"]
    rules = [
        (one.type, flat(one.properties["GroupId"]), one.properties["FromPort"], one.properties["ToPort"])
        for one in assembly.resources("AWS::EC2::SecurityGroupIngress", "AWS::EC2::SecurityGroupEgress")
        if group["Fn::GetAtt"][0] in json.dumps(one.properties)
    ]
    assert {(kind, *ports) for kind, _, *ports in rules} == {
        ("AWS::EC2::SecurityGroupIngress", 443, 443),
        ("AWS::EC2::SecurityGroupEgress", 443, 443),
    }
    waits = {
        one.stack
        for one in assembly.resources("AWS::Events::Rule")
        if endpoint.name in json.dumps(one.properties["Description"])
    }
    assert waits == {"compaction", "maintenance"}, "no run starts before the endpoint"
    callers = {where for kind, where, *_ in rules if kind.endswith("Egress")}
    assert len(callers) == 2, "both the primary node and core nodes call EMR"
    [described] = [
        RunResources.model_validate_json(flat(one.properties["Value"]))
        for one in assembly.resources("AWS::SSM::Parameter")
        if one.properties["Name"].endswith("/resources/compaction")
    ]
    assert described.has_endpoint
    switched = [where for action, where, _ in allowed(assembly, "pause", "PauseRole") if "Invoke" in action]
    assert any(where.startswith("SwitchFunction") for where in switched), "the keeper may restore it"


def test_a_vpc_with_an_endpoint_of_emr_gets_no_other(synthesized: All) -> None:
    assert not [
        one for one in synthesized("steps").resources("AWS::EC2::VPCEndpoint") if one.stack == "compaction"
    ]


def test_the_deploy_creates_no_cluster(synthesized: All) -> None:
    """A run creates the cluster. CloudFormation could not start one again that has ended when idle."""
    assert not [one for name in ENGINES for one in synthesized(name).resources("AWS::EMR::Cluster")]


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ["emr-serverless", "emr-ec2-steps", "emr-ec2-transient"])
def test_the_release_of_emr_is_that_of_the_settings(engine: str, tmp_path: Path) -> None:
    compaction = {"engine": engine, "release": "emr-spark-8.1.0"}
    made = synthesize(parse({"id": "dev", "compaction": compaction}), tmp_path / "assembly", checked=False)
    templates = json.dumps([*made.templates.values()])
    assert "emr-spark-8.1.0" in templates and "emr-spark-8.0.0" not in templates


@pytest.mark.parametrize("name", ["dev", "prod"])
def test_the_application_starts_and_stops_automatically_within_limits(name: str, synthesized: All) -> None:
    [application] = synthesized(name).resources("AWS::EMRServerless::Application")
    settings = CONFIGURATIONS[name]()
    compaction = settings.compaction
    assert compaction is not None and compaction.engine == "emr-serverless"
    has = application.properties
    assert (has["ReleaseLabel"], has["Type"], has["Architecture"]) == ("emr-spark-8.0.0", "SPARK", "ARM64")
    assert has["AutoStartConfiguration"] == {"Enabled": True}
    stop = {"Enabled": True, "IdleTimeoutMinutes": compaction.idle_minutes}
    assert has["AutoStopConfiguration"] == stop
    assert has["MaximumCapacity"] == {
        "Cpu": f"{compaction.vcpu_max} vCPU",
        "Memory": f"{4 * compaction.vcpu_max} GB",
        "Disk": f"{20 * compaction.vcpu_max} GB",
    }
    assert len(has["NetworkConfiguration"]["SubnetIds"]) == settings.network.zones
    logs = has["MonitoringConfiguration"]
    assert logs["ManagedPersistenceMonitoringConfiguration"] == {"Enabled": False}
    assert flat(logs["S3MonitoringConfiguration"]["LogUri"]).endswith("/logs/emr/")


def test_only_the_emr_application_may_assume_the_role_of_spark(synthesized: All) -> None:
    role = roles(synthesized("dev"))["CompactionEmrRole"]
    [trust] = role["AssumeRolePolicyDocument"]["Statement"]
    assert flat(trust["Condition"]["StringEquals"]["aws:SourceAccount"]) == "AccountId"
    source = flat(trust["Condition"]["ArnLike"]["aws:SourceArn"])
    assert source.startswith(
        "arn:Partition:emr-serverless:Region:AccountId:/applications/CompactionEmrApplication"
    )
    assert "*" not in source


def test_spark_may_use_the_data_its_archive_and_the_database(name: str, synthesized: All) -> None:
    rights = {
        action: resources for action, resources, _ in allowed(synthesized(name), "compaction", "EmrRole")
    }
    objects = ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:ListMultipartUploadParts"]
    assert {rights[action].rpartition("Arn")[2][8:] for action in objects} == {"/data/*"}
    assert {
        "s3:GetObject",
        "s3:PutObject",
        "s3:ListBucket",
        "kms:Decrypt",
        "kms:GenerateDataKey",
    } <= rights.keys()
    assert rights["rds-db:connect"].endswith("/dormouse_run")
    assert {action.partition(":")[0] for action in rights} == {"kms", "rds-db", "s3"}
    read = [
        where
        for action, where, _ in allowed(synthesized(name), "compaction", "EmrRole")
        if action == "s3:GetObject"
    ]
    assets = sorted(where.rpartition(".")[2] for where in read if "cdk-hnb659fds-assets" in where)
    assert assets == ["py", "tgz"]
    assert all("*" not in where or where.endswith("/data/*") for where in read)


def test_lambdas_that_call_emr_serverless_have_no_other_rights(synthesized: All) -> None:
    wanted = {
        "Submit": {"emr-serverless:StartJobRun", "iam:PassRole"},
        "Follow": {"emr-serverless:GetJobRun"},
        "Cancel": {"emr-serverless:CancelJobRun"},
    }
    for function, actions in wanted.items():
        assert beyond_logs(synthesized("dev"), function) == actions


@pytest.mark.parametrize("name", ON_EC2)
def test_lambdas_that_call_emr_on_ec2_may_change_only_clusters_of_the_instance(
    name: str, synthesized: All
) -> None:
    of_clusters = {
        "Submit": {"AddJobFlowSteps", "CancelSteps", "ListSteps", "TerminateJobFlows", "AddTags",
                   "PutAutoTerminationPolicy", "PutManagedScalingPolicy"},
        "Follow": {"DescribeCluster", "DescribeStep"},
        "Cancel": {"CancelSteps", "DescribeStep", "TerminateJobFlows"},
    }  # fmt: skip
    making = {"elasticmapreduce:ListClusters", "elasticmapreduce:RunJobFlow"}
    making |= {"iam:CreateServiceLinkedRole", "iam:PassRole"}
    for function, actions in of_clusters.items():
        names = {f"elasticmapreduce:{action}" for action in actions}
        assert beyond_logs(synthesized(name), function) == names | (making if function == "Submit" else set())
        for action, where, condition in allowed(synthesized(name), "compaction", f"{function}Role"):
            if action in names:
                assert flat_partition(where) == CLUSTERS
                [(key, value)] = condition["StringEquals"].items()
                assert key.endswith("Tag/dormouse:instance") and value == name
                assert key == TAGGED or action == "elasticmapreduce:AddTags"
            if action == "iam:CreateServiceLinkedRole":
                assert where.endswith("/elasticmapreduce.amazonaws.com/AWSServiceRoleForEMRCleanup")
            if action == "elasticmapreduce:RunJobFlow":
                assert condition == {"StringEquals": {"elasticmapreduce:RequestTag/dormouse:instance": name}}


def test_roles_are_passed_by_name_and_only_to_emr(name: str, synthesized: All) -> None:
    passed = {
        (where, condition["StringEquals"]["iam:PassedToService"])
        for action, where, condition in allowed(synthesized(name), "compaction", "SubmitRole")
        if action == "iam:PassRole"
    }
    services = {service for _, service in passed}
    if name == "dev":
        assert services == {"emr-serverless.amazonaws.com"}
    else:
        assert services == {"elasticmapreduce.amazonaws.com", "ec2.amazonaws.com"}
    assert all(where.endswith("Arn") and "*" not in where for where, _ in passed)
    assert len(passed) == len(services)


@pytest.mark.parametrize("name", ON_EC2)
def test_emr_changes_only_resources_that_are_tagged_or_named(name: str, synthesized: All) -> None:
    """Images, fleets and interfaces are exceptions: a machine is launched with these, and has no tag yet."""
    free = set()
    for action, where, condition in allowed(synthesized(name), "compaction", "EmrServiceRole"):
        tags = {key for one in condition.values() for key in one}
        if not where.endswith("*") or any(key.endswith("Tag/dormouse:instance") for key in tags):
            continue
        if not action.startswith("ec2:Describe") and "ec2:CreateAction" not in tags:
            assert action in {f"ec2:{one}" for one in LAUNCHING}, action
            free.add(flat_partition(where).partition(":ec2:")[2].rpartition(":")[2])
    assert free == {"image/ami-*", "fleet/*", "network-interface/*"}
    passed = {
        where
        for action, where, _ in allowed(synthesized(name), "compaction", "EmrServiceRole")
        if action == "iam:PassRole"
    }
    assert len(passed) == 1 and passed.pop().startswith("CompactionEmrRole")


@pytest.mark.parametrize("stack", ["compaction", "maintenance"])
def test_the_state_machine_calls_only_its_lambdas(stack: str, synthesized: All) -> None:
    called = {
        where
        for action, where, _ in allowed(synthesized("dev"), stack, "RunsRole")
        if action.startswith("lambda:")
    }
    assert len(called) == 5
    assert not any("*" in where for where in called)


def test_a_parameter_records_the_deployed_resources(name: str, synthesized: All) -> None:
    [recorded] = [
        RunResources.model_validate_json(flat(one.properties["Value"]))
        for one in synthesized(name).resources("AWS::SSM::Parameter")
        if one.stack == "compaction" and one.properties["Name"].endswith("/resources/compaction")
    ]
    assert recorded.engine == ENGINES[name]
    assert recorded.state_machine and recorded.state_machine.startswith("CompactionRunsStateMachine")
    assert (recorded.application is None, recorded.cluster_name) == (
        (False, None) if name == "dev" else (True, f"dormouse-{name}")
    )
    assert len(recorded.rules) == 1


def test_logs_of_runs_expire(name: str, synthesized: All) -> None:
    [data] = [one for one in synthesized(name).resources("AWS::S3::Bucket") if one.name.startswith("Data")]
    rules = data.properties["LifecycleConfiguration"]["Rules"]
    [logs] = [rule for rule in rules if rule.get("Prefix") == "logs/emr/"]
    assert logs["ExpirationInDays"] == 30


def runs_environment(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> RunsEnvironment:
    """Sets the environment variables of the lambdas for runs, and returns the settings read from them."""
    functions = [
        one
        for one in assembly.resources("AWS::Lambda::Function")
        if one.stack == "compaction" and one.properties["Handler"].startswith("lambdas.runs.")
    ]
    handlers = {one.properties["Handler"].rpartition(".")[2] for one in functions}
    assert handlers == {"submit", "follow", "cancel"}
    for key, value in functions[0].properties["Environment"]["Variables"].items():
        monkeypatch.setenv(key, flat(value))
    return load_environment(RunsEnvironment)


def roles(assembly: Assembly) -> dict[str, Any]:
    """Returns the properties of the stack's roles by logical id, without the hash at its end."""
    found = assembly.resources("AWS::IAM::Role")
    return {one.name[:-8]: one.properties for one in found if one.stack == "compaction"}


def beyond_logs(assembly: Assembly, function: str) -> set[str]:
    actions = {action for action, _, _ in allowed(assembly, "compaction", f"{function}Role")}
    assert actions
    return {action for action in actions if action.partition(":")[0] not in {"logs", "xray"}}


def flat_partition(arn: str) -> str:
    """Replaces the partition, region and account of an ARN by fixed words."""
    return (
        arn.replace("arn:aws:", "arn:Partition:")
        .replace("eu-central-1", "Region")
        .replace("123456789012", "AccountId")
    )
