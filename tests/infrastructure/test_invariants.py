"""Rules that hold in every configuration: reachability, rights, encryption, protection and queues."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from dormouse.durability.incarnations import NOW
from dormouse.settings.section import VISIBILITY_FACTOR, VISIBILITY_SECONDS_MAX
from dormouse.state.commits.pointers import OBJECT_PREFIX
from packages import LAMBDA
from tests.assembly import CONFIGURATIONS, Assembly, Resource
from tests.template import DELETED, KEPT, allowed, flat, policies

ANYWHERE = {"0.0.0.0/0", "::/0"}
DATABASE_PACKAGES = {"commit", "compaction", "garbage", "maintenance", "migrate", "tables"}
GETS_THE_LOGIN = "lambdas.migrate.begin"
KEEPING = {"AWS::KMS::Key", "AWS::RDS::DBCluster", "AWS::RDS::DBInstance", "AWS::S3::Bucket"}
TRIES_MIN = 5
LOGS = ("AccessLogs", "AuditAccessLogs")


def test_inbound_rules_allow_security_groups_and_no_addresses(assembly: Assembly) -> None:
    """Inbound rules name security groups as sources, except for clients of the settings."""
    found = 0
    for resource in assembly.resources("AWS::EC2::SecurityGroupIngress", "AWS::EC2::SecurityGroup"):
        for rule in resource.properties.get("SecurityGroupIngress", [resource.properties]):
            if resource.type == "AWS::EC2::SecurityGroup" and rule is resource.properties:
                continue
            found += 1
            if resource.stack == "query" and resource.name.startswith("QueryBalancerGroup"):
                continue  # the clients that the settings name: see test_query_stack.py
            if resource.stack == "database" and rule.get("Description") == "clients":
                continue  # the clients that the settings name: see test_database_clients.py
            assert not {"CidrIp", "CidrIpv6", "SourcePrefixListId"} & rule.keys(), str(resource)
            assert rule.get("SourceSecurityGroupId"), str(resource)
            if resource.stack != "compaction":  # within a cluster of EMR, any port may be used
                assert rule["FromPort"] == rule["ToPort"], str(resource)
    assert found > 0


def test_nothing_is_public(assembly: Assembly) -> None:
    types = {resource.type for resource in assembly.resources()}
    assert not types & {"AWS::EC2::InternetGateway", "AWS::EC2::NatGateway", "AWS::EC2::EIP"}
    for subnet in assembly.resources("AWS::EC2::Subnet"):
        assert subnet.properties["MapPublicIpOnLaunch"] is False
    for instance in assembly.resources("AWS::RDS::DBInstance"):
        assert instance.properties["PubliclyAccessible"] is False


def test_outbound_rules_allow_only_https_and_named_groups(assembly: Assembly) -> None:
    for group in assembly.resources("AWS::EC2::SecurityGroup"):
        rules = group.properties.get("SecurityGroupEgress", [])
        assert rules, f"{group} has the default rule, which lets all out"
        for rule in rules:
            if rule.get("CidrIp") in ANYWHERE:
                assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 443, 443), str(group)
                assert group.stack != "database"


def test_no_allowed_action_is_a_wildcard(assembly: Assembly) -> None:
    for where, statement in statements(assembly):
        if statement["Effect"] == "Allow" and not where.endswith("KeyPolicy"):
            assert "NotAction" not in statement, where
            assert [action for action in listed(statement["Action"]) if "*" in action] == [], where


def test_key_policies_delegate_only_to_iam(assembly: Assembly) -> None:
    """Only the account has `kms:*`. Without this statement, no principal could ever change the key."""
    for key in assembly.resources("AWS::KMS::Key"):
        for statement in key.properties["KeyPolicy"]["Statement"]:
            if any("*" in action for action in listed(statement["Action"])):
                assert ":root" in json.dumps(statement["Principal"]), str(key)


def test_keys_are_used_only_through_the_services_that_store_the_data(assembly: Assembly) -> None:
    """Roles use keys only through S3 and Secrets Manager. Keys for the volumes of EMR are an exception."""
    services = {
        json.dumps(statement.get("Condition", {}).get("StringEquals", {}).get("kms:ViaService"))
        for where, statement in statements(assembly)
        if {"kms:Decrypt", "kms:GenerateDataKey"} & set(listed(statement["Action"]))
        and not where.endswith("KeyPolicy")
        and "kms:ReEncryptFrom" not in listed(statement["Action"])
    }
    assert {one.partition(".")[0].rpartition('"')[2] for one in services} == {"s3", "secretsmanager"}


# These actions know no resources, or their resources do not exist before the call.
ANY_RESOURCE = {
    "ecr:GetAuthorizationToken",
    "ec2:AssignPrivateIpAddresses",
    "ec2:CreateNetworkInterface",
    "ec2:DeleteNetworkInterface",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSubnets",
    "ec2:UnassignPrivateIpAddresses",
    "xray:PutTelemetryRecords",
    "xray:PutTraceSegments",
}


@pytest.mark.parametrize("stack", ["network", "storage", "database", "migrate", "commit", "garbage", "query"])
def test_statements_name_their_resources(stack: str, assembly: Assembly) -> None:
    if stack not in assembly.templates:
        return
    for policy in assembly.resources("AWS::IAM::Policy"):
        if policy.stack != stack:
            continue
        for statement in policy.properties["PolicyDocument"]["Statement"]:
            if statement["Effect"] == "Allow" and "*" in listed(statement["Resource"]):
                assert set(listed(statement["Action"])) <= ANY_RESOURCE, str(policy)


def test_each_lambda_has_a_role_and_a_log_group_of_its_own(assembly: Assembly) -> None:
    lambdas = list(assembly.resources("AWS::Lambda::Function"))
    for keys in (("Role",), ("LoggingConfig", "LogGroup"), ("VpcConfig", "SecurityGroupIds")):
        used = Counter(
            f"{one.stack}{json.dumps(value)}"
            for one in lambdas
            if (value := dig(one.properties, keys)) is not None
        )
        assert max(used.values()) == 1, keys
        assert sum(used.values()) == len(lambdas) or keys[0] == "VpcConfig", keys
    managed = [one for one in assembly.resources("AWS::IAM::Role") if "ManagedPolicyArns" in one.properties]
    assert [
        role for role in managed if role.stack != "backup"
    ] == []  # the role of AWS Backup has the managed policies of AWS Backup


def test_lambdas_are_in_the_vpc_if_they_know_the_database(assembly: Assembly) -> None:
    """All other lambdas are outside the VPC. Inside, they could not reach the AWS services that they call."""
    for one in assembly.resources("AWS::Lambda::Function"):
        handler = one.properties["Handler"]
        knows = handler.split(".")[1] in DATABASE_PACKAGES and handler != GETS_THE_LOGIN
        assert ("VpcConfig" in one.properties) == knows, str(one)


def test_code_in_the_vpc_may_not_change_network_interfaces(assembly: Assembly) -> None:
    """The statement names `function:*`, because CloudFormation shortens the names of some functions."""
    refused = [
        flat(statement["Condition"]["ArnLike"]["lambda:SourceFunctionArn"])
        for policy in assembly.resources("AWS::IAM::Policy")
        for statement in policy.properties["PolicyDocument"]["Statement"]
        if statement["Effect"] == "Deny"
    ]
    in_vpc = [one for one in assembly.resources("AWS::Lambda::Function") if "VpcConfig" in one.properties]
    assert len(refused) == len(in_vpc)
    assert all(one.endswith(":function:*") for one in refused)


def test_commits_delete_their_requests_and_no_data(assembly: Assembly) -> None:
    deleted = {
        where[where.index("/") :]
        for action, where, _ in allowed(assembly, "commit", "CommitRole")
        if action == "s3:DeleteObject"
    }
    assert deleted == {f"/data/{OBJECT_PREFIX}*", f"/data/{NOW}/*"}


def test_database_lambdas_may_log_in_as_one_role(assembly: Assembly) -> None:
    for policy in assembly.resources("AWS::IAM::Policy"):
        arns = [
            json.dumps(arn)
            for statement in policy.properties["PolicyDocument"]["Statement"]
            if "rds-db:connect" in listed(statement["Action"])
            for arn in listed(statement["Resource"])
        ]
        assert not any("*" in arn for arn in arns), str(policy)
        roles = {arn.rpartition("/")[2] for arn in arns}
        assert len(roles) <= (3 if policy.stack == "database" else 1), str(policy)
        if policy.stack not in (
            "database",
            "query",
            "migrate",
        ):  # these stacks index row tables, or deploy lambdas for them
            assert len(arns) <= 1, str(policy)


def test_lambdas_are_traced_and_connect_in_time(assembly: Assembly) -> None:
    for one in assembly.resources("AWS::Lambda::Function"):
        assert one.properties["TracingConfig"] == {"Mode": "Active"}
        assert one.properties["Runtime"] == f"python{LAMBDA.python}"
        if "VpcConfig" in one.properties:
            assert one.properties["Timeout"] > 30, str(one)


def test_all_data_is_encrypted(assembly: Assembly) -> None:
    for bucket in assembly.resources("AWS::S3::Bucket"):
        rule = bucket.properties["BucketEncryption"]["ServerSideEncryptionConfiguration"][0]
        algorithm = rule["ServerSideEncryptionByDefault"]["SSEAlgorithm"]
        assert algorithm == ("AES256" if bucket.name.startswith(LOGS) else "aws:kms"), str(bucket)
    for cluster in assembly.resources("AWS::RDS::DBCluster"):
        assert cluster.properties["StorageEncrypted"] is True
        assert {"KmsKeyId", "MasterUserSecret"} <= cluster.properties.keys()
    for queue in assembly.resources("AWS::SQS::Queue"):
        encrypted = queue.properties.get("SqsManagedSseEnabled") is True
        assert encrypted or "KmsMasterKeyId" in queue.properties, str(queue)
    for topic in assembly.resources("AWS::SNS::Topic"):
        assert "KmsMasterKeyId" in topic.properties
    for key in assembly.resources("AWS::KMS::Key"):
        assert key.properties["EnableKeyRotation"] is True


def test_only_tls_connections_are_allowed(assembly: Assembly) -> None:
    for type_, policy_type, key in (
        ("AWS::S3::Bucket", "AWS::S3::BucketPolicy", "Bucket"),
        ("AWS::SQS::Queue", "AWS::SQS::QueuePolicy", "Queues"),
        ("AWS::SNS::Topic", "AWS::SNS::TopicPolicy", "Topics"),
    ):
        refusing = [
            json.dumps([policy.stack, target["Ref"]])
            for policy in assembly.resources(policy_type)
            if '"aws:SecureTransport": "false"' in json.dumps(policy.properties["PolicyDocument"])
            for target in listed(policy.properties[key])
        ]
        wanted = [json.dumps([one.stack, one.name]) for one in assembly.resources(type_)]
        assert sorted(refusing) == sorted(wanted), type_
    groups = assembly.resources("AWS::RDS::DBClusterParameterGroup")
    assert groups and {one.properties["Parameters"]["rds.force_ssl"] for one in groups} == {"1"}


def test_buckets_block_public_access_and_log_accesses(assembly: Assembly) -> None:
    for bucket in assembly.resources("AWS::S3::Bucket"):
        assert set(bucket.properties["PublicAccessBlockConfiguration"].values()) == {True}
        is_log = bucket.name.startswith(LOGS)
        assert ("LoggingConfiguration" in bucket.properties) != is_log, str(bucket)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_deleted_objects_are_kept_as_long_as_a_database_can_be_restored(name: str, synthesized: Any) -> None:
    """A database that is restored to a point in time refers to objects that were deleted after that time.

    The bucket keeps deleted objects one day longer than such restores need. More days would cost money.
    """
    settings, assembly = CONFIGURATIONS[name](), synthesized(name)
    buckets = {one.name[:4]: one.properties for one in assembly.resources("AWS::S3::Bucket")}
    rules = [rule for rule in buckets["Data"]["LifecycleConfiguration"]["Rules"] if "Prefix" not in rule]
    kept = [rule["NoncurrentVersionExpiration"] for rule in rules if "NoncurrentVersionExpiration" in rule]
    assert buckets["Data"]["VersioningConfiguration"] == {"Status": "Enabled"}
    assert [rule["NoncurrentDays"] for rule in kept] == [settings.storage.restore_days + 1]
    assert not any("ExpirationInDays" in rule for rule in rules)
    (payloads,) = (
        rule["ExpirationInDays"]
        for rule in buckets["Payl"]["LifecycleConfiguration"]["Rules"]
        if "ExpirationInDays" in rule
    )
    assert payloads >= settings.storage.payload_days + settings.storage.restore_days
    for rules in (buckets[name]["LifecycleConfiguration"]["Rules"] for name in ("Data", "Payl")):
        assert any("AbortIncompleteMultipartUpload" in rule for rule in rules)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_only_a_protected_instance_keeps_its_data(name: str, synthesized: Any) -> None:
    """A protected instance keeps its data when its stacks are deleted.

    Parts that can be created again, such as readers, and parts of a failed first deploy are deleted. If kept,
    they would cost money without belonging to a stack.
    """
    settings, assembly = CONFIGURATIONS[name](), synthesized(name)
    wanted = KEPT if settings.protected else DELETED
    for one in assembly.resources(*KEEPING):
        is_made_again = one.name.startswith(("ClusterReader", "RowsCluster"))
        assert policies(one) == (DELETED if is_made_again else wanted), str(one)
    clusters = assembly.resources("AWS::RDS::DBCluster")
    [cluster] = [one for one in clusters if not one.name.startswith("RowsCluster")]
    assert cluster.properties["DeletionProtection"] is settings.protected
    for one in clusters:
        assert one.properties["EnableIAMDatabaseAuthentication"] is True
        assert one.properties["ManageMasterUserPassword"] is True
    for stack in ("network", "storage", "database", "commit"):
        assert bool(assembly.stack(stack)["properties"].get("terminationProtection")) is settings.protected


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_all_stacks_are_tagged(name: str, synthesized: Any) -> None:
    settings, assembly = CONFIGURATIONS[name](), synthesized(name)
    for stack in assembly.templates:
        assert assembly.stack(stack)["properties"]["tags"] == {
            "dormouse:instance": settings.id,
            **settings.tags,
        }


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_mappings_limit_their_concurrency(name: str, synthesized: Any) -> None:
    settings, assembly = CONFIGURATIONS[name](), synthesized(name)
    assert settings.commit is not None
    mappings = [one for one in assembly.resources("AWS::Lambda::EventSourceMapping") if one.stack == "commit"]
    assert len(mappings) == settings.commit.queues
    for mapping in mappings:
        properties = mapping.properties
        assert properties["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
        assert properties["ScalingConfig"] == {"MaximumConcurrency": settings.commit.concurrency}
        assert properties["MaximumBatchingWindowInSeconds"] == settings.commit.batching_window_seconds
        is_on = False if settings.commit.service else {"Fn::If": ["IsAwake", True, False]}
        assert properties["Enabled"] == is_on


def test_queues_have_dead_letters_and_wait_long_enough(assembly: Assembly) -> None:
    queues = {(one.stack, one.name): one.properties for one in assembly.resources("AWS::SQS::Queue")}
    timeouts = {
        (one.stack, one.name): one.properties["Timeout"]
        for one in assembly.resources("AWS::Lambda::Function")
    }
    read = 0
    for mapping in assembly.resources("AWS::Lambda::EventSourceMapping"):
        source = queues[mapping.stack, mapping.properties["EventSourceArn"]["Fn::GetAtt"][0]]
        timeout = timeouts[mapping.stack, mapping.properties["FunctionName"]["Ref"]]
        window = mapping.properties.get("MaximumBatchingWindowInSeconds", 0)
        wanted = min(VISIBILITY_FACTOR * timeout + window, VISIBILITY_SECONDS_MAX)
        assert source["VisibilityTimeout"] >= wanted
        assert source["RedrivePolicy"]["maxReceiveCount"] >= TRIES_MIN
        dead = queues[mapping.stack, source["RedrivePolicy"]["deadLetterTargetArn"]["Fn::GetAtt"][0]]
        assert dead["MessageRetentionPeriod"] >= source["MessageRetentionPeriod"]
        read += 1
    assert read >= 1


def test_logs_expire(assembly: Assembly) -> None:
    for group in assembly.resources("AWS::Logs::LogGroup"):
        assert group.properties["RetentionInDays"] <= 365, str(group)


def test_no_resource_has_a_physical_name(assembly: Assembly) -> None:
    """CloudFormation chooses the names. The bucket of a copy has a fixed name, for the other region to know.

    Parameters, which commands look up, and the log group that RDS names are not checked.
    """
    named = {
        str(one)
        for one in assembly.resources()
        for key in ("BucketName", "DBClusterIdentifier", "FunctionName", "QueueName", "RoleName", "TopicName")
        if key in one.properties
        and one.type
        in {
            "AWS::S3::Bucket",
            "AWS::RDS::DBCluster",
            "AWS::Lambda::Function",
            "AWS::SQS::Queue",
            "AWS::IAM::Role",
            "AWS::SNS::Topic",
        }
    }
    assert named == ({"copy/Copy1ED8A51E"} if "copy" in assembly.templates else set())


def statements(assembly: Assembly) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (place of the policy document, statement) for each statement of each policy document."""
    for resource in assembly.resources():
        yield from documents(str(resource), resource.properties)


def documents(where: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, list):
        for inside in value:
            yield from documents(where, inside)
    elif isinstance(value, dict):
        if isinstance(value.get("Statement"), list):
            for statement in value["Statement"]:
                yield where, statement
        for key, inside in value.items():
            yield from documents(f"{where}/{key}", inside)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def dig(properties: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    found: Any = properties
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def test_the_helpers_find_statements() -> None:
    document = {"PolicyDocument": {"Statement": [{"Effect": "Allow", "Action": "s3:*"}]}}
    resource = Resource("storage", "Policy", "AWS::IAM::Policy", document, {})
    assert [where for where, _ in documents(str(resource), document)] == ["storage/Policy/PolicyDocument"]
