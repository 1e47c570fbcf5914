"""The emulator's network, made as strict as EC2 and Session Manager where a host for access needs it.

- Security groups have the rules that templates give them.
- Interface endpoints are refused where EC2 refuses them.
- A host can be launched only from an image of AWS.
- A session through the host reaches the database only if rights, endpoints and rules allow it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ministack.core import iam_evaluator
from ministack.core.iam_evaluator import EvalContext
from ministack.core.responses import new_uuid, request_scope
from ministack.services import ec2, iam, rds, ssm
from ministack.services.cloudformation import provisioners
from ministack.services.cloudformation.provisioners import _RESOURCE_HANDLERS as HANDLERS

from tests.deploy_local.emulated_cluster import ACCOUNT, REGION

IMAGE_PARAMETER = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-{architecture}"
IMAGE_GB = 8
ROOT_DEVICE = "/dev/xvda"
HTTPS = 443
FORWARDING = "AWS-StartPortForwardingSessionToRemoteHost"
AGENT = {
    "ssm": ("ssm:UpdateInstanceInformation",),
    "ssmmessages": tuple(
        f"ssmmessages:{verb}{what}Channel" for verb in ("Create", "Open") for what in ("Control", "Data")
    ),
}
"""The services that the agent of Session Manager calls, each with the actions that it calls there."""

_images: dict[str, str] = {}
"""The architecture of each image, by image id."""

_rules: dict[str, tuple[str, str, dict[str, Any]]] = {}
"""The rules that are resources of their own, by resource id.

A value has the group, the name of the group's list that has the rule, and the rule.
"""


def make_strict() -> None:
    """Makes the emulator apply the rules of this module to everything that is deployed from now on."""
    publish_images()
    for name, permissions in (("Ingress", "IpPermissions"), ("Egress", "IpPermissionsEgress")):
        HANDLERS[f"AWS::EC2::SecurityGroup{name}"] = _rule_handler(permissions)
    group, endpoint = HANDLERS["AWS::EC2::SecurityGroup"], HANDLERS["AWS::EC2::VPCEndpoint"]
    HANDLERS["AWS::EC2::SecurityGroup"] = group | {"delete": _unless_used(group["delete"])}
    HANDLERS["AWS::EC2::VPCEndpoint"] = endpoint | {"create": _unless_refused(endpoint["create"])}
    HANDLERS["AWS::EC2::Instance"] = {"create": _launch, "update": _change, "delete": _terminate}
    provisioners._STACK_TAG_PROPERTY["AWS::EC2::Instance"] = ("Tags", "list")


def publish_images() -> dict[str, str]:
    """Publishes a new image for each architecture; returns the image ids. Old images remain."""
    newest = {f"ami-{new_uuid().replace('-', '')[:17]}": name for name in ("arm64", "x86_64")}
    _images.update(newest)
    for image, architecture in newest.items():
        ssm._PUBLIC_AMI_PARAMETERS[IMAGE_PARAMETER.format(architecture=architecture)] = image
    return {architecture: image for image, architecture in newest.items()}


# ------------------------------------------------------------------ rules of security groups


def _rule_handler(permissions: str) -> dict[str, Any]:
    def create(_logical_id: str, props: dict[str, Any], _stack: str) -> tuple[str, dict[str, str]]:
        group, (rule,) = _group(props["GroupId"]), provisioners._ec2_sg_permissions([props])
        for pair in rule["UserIdGroupPairs"]:
            if _group(pair["GroupId"])["VpcId"] != group["VpcId"]:
                raise ValueError(f"InvalidGroup.NotFound: {pair['GroupId']} is of another network")
        if any(_plain(rule) == _plain(one) for one in group[permissions]):
            raise ValueError(f"InvalidPermission.Duplicate: {group['GroupId']} has the rule {_plain(rule)}")
        group[permissions].append(rule)
        rule_id = f"sgr-{new_uuid().replace('-', '')[:17]}"
        _rules[rule_id] = (group["GroupId"], permissions, rule)
        return rule_id, {"Id": rule_id}

    def delete(rule_id: str, _props: dict[str, Any]) -> None:
        group_id, where, rule = _rules.pop(rule_id, ("", "", {}))
        if group := ec2._security_groups.get(group_id):
            group[where] = [one for one in group[where] if one is not rule]

    def update(
        rule_id: str, _old: dict[str, Any], new: dict[str, Any], stack: str
    ) -> tuple[str, dict[str, str]]:
        (rule,) = provisioners._ec2_sg_permissions([new])
        group_id, where, known = _rules[rule_id]
        if group_id != new["GroupId"] or _plain(rule) != _plain(known):
            return create(rule_id, new, stack)  # the old one is deleted by the engine
        group = ec2._security_groups[group_id]
        group[where] = [rule if one is known else one for one in group[where]]
        _rules[rule_id] = (group_id, where, rule)
        return rule_id, {"Id": rule_id}

    return {"create": create, "update": update, "delete": delete}


def _plain(value: Any) -> Any:
    """Returns the value without descriptions, because rules with different descriptions count as equal."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if key != "Description"}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _group(group_id: str) -> dict[str, Any]:
    if (known := ec2._security_groups.get(group_id)) is None:
        raise ValueError(f"InvalidGroup.NotFound: there is no security group {group_id}")
    group: dict[str, Any] = known
    return group


def _unless_used(delete: Any) -> Any:
    def deleted(group_id: str, props: dict[str, Any]) -> None:
        users = [one["InstanceId"] for one in _running() if group_id in _groups_of(one)]
        users += [
            name for name, one in ec2._vpc_endpoints.items() if group_id in one.get("SecurityGroupIds", ())
        ]
        users += [
            name
            for name, one in ec2._security_groups.items()
            for rule in one["IpPermissions"] + one["IpPermissionsEgress"]
            if name != group_id and group_id in _peers(rule)
        ]
        if users:
            raise ValueError(f"DependencyViolation: {group_id} has a dependent object, {users[0]}")
        delete(group_id, props)

    return deleted


def _lets(sources: Iterable[str], targets: Iterable[str], port: int) -> bool:
    """Returns whether the security groups of both sides allow connections from the sources to the targets."""
    ways = ((sources, "IpPermissionsEgress", targets), (targets, "IpPermissions", sources))
    return all(
        any(
            _is_for(rule, port, set(others)) for one in own for rule in ec2._security_groups[one][permissions]
        )
        for own, permissions, others in ways
    )


def _is_for(rule: dict[str, Any], port: int, groups: set[str]) -> bool:
    is_for_all = any(one["CidrIp"] == "0.0.0.0/0" for one in rule["IpRanges"])
    is_port = rule["IpProtocol"] == "-1" or (
        rule["IpProtocol"] == "tcp" and rule["FromPort"] <= port <= rule["ToPort"]
    )
    return is_port and (is_for_all or bool(groups & _peers(rule)))


def _peers(rule: dict[str, Any]) -> set[str]:
    return {pair["GroupId"] for pair in rule.get("UserIdGroupPairs", ())}


# ------------------------------------------------------------------ interface endpoints


def _unless_refused(create: Any) -> Any:
    def created(logical_id: str, props: dict[str, Any], stack: str) -> Any:
        if props.get("VpcEndpointType") == "Interface":
            for why in _refusals_of_endpoint(props):
                raise ValueError(f"AWS::EC2::VPCEndpoint create failed: {why}")
        return create(logical_id, props, stack)

    return created


def _refusals_of_endpoint(props: dict[str, Any]) -> Iterator[str]:
    vpc, service = ec2._vpcs[props["VpcId"]], props["ServiceName"]
    where, known = vpc["VpcId"], {f"com.amazonaws.{REGION}.{one}" for one in ec2._VPCE_INTERFACE_SERVICES}
    if service not in known:
        yield f"InvalidServiceName: the VPC endpoint service {service} does not exist"
    if props.get("PrivateDnsEnabled"):
        if not (vpc.get("EnableDnsSupport", True) and vpc.get("EnableDnsHostnames", False)):
            yield f"InvalidParameter: private DNS needs enableDnsSupport and enableDnsHostnames of {where}"
        if any((one["VpcId"], one["ServiceName"]) == (where, service) for one in _private_endpoints()):
            yield f"InvalidParameter: there is a conflicting DNS domain for {service} in {where}"
    yield from _strangers(where, props["SubnetIds"], props["SecurityGroupIds"])
    zones = [ec2._subnets[one]["AvailabilityZone"] for one in props["SubnetIds"]]
    if len(set(zones)) < len(zones):
        yield f"DuplicateSubnetsInSameZone: two of {', '.join(props['SubnetIds'])} are in one zone"


def _strangers(vpc_id: str, subnets: Iterable[str], groups: Iterable[str]) -> Iterator[str]:
    for one in subnets:
        if ec2._subnets.get(one, {}).get("VpcId") != vpc_id:
            yield f"InvalidSubnetID.NotFound: {one} is no subnet of {vpc_id}"
    for one in groups:
        if ec2._security_groups.get(one, {}).get("VpcId") != vpc_id:
            yield f"InvalidParameter: the security group {one} and {vpc_id} belong to different networks"


def _private_endpoints() -> Iterator[dict[str, Any]]:
    for one in ec2._vpc_endpoints.values():
        if one["VpcEndpointType"] == "Interface" and one.get("PrivateDnsEnabled"):
            yield one


# ------------------------------------------------------------------ instances


def _launch(_logical_id: str, props: dict[str, Any], _stack: str) -> tuple[str, dict[str, str]]:
    for why in _refusals_of_instance(props):
        raise ValueError(f"AWS::EC2::Instance create failed: {why}")
    (interface,) = props["NetworkInterfaces"]
    subnet = ec2._subnets[interface["SubnetId"]]
    profile = _profile(props["IamInstanceProfile"])
    (made,) = ec2._launch_instances_internal(
        props["ImageId"],
        props["InstanceType"],
        interface["SubnetId"],
        1,
        sg_ids=interface["GroupSet"],
        iam_profile={"Arn": profile["Arn"], "Id": profile["InstanceProfileId"]},
    )
    made |= {
        "Architecture": _images[props["ImageId"]],
        "Placement": {"AvailabilityZone": subnet["AvailabilityZone"], "Tenancy": "default"},
        "VpcId": subnet["VpcId"],
    }
    if not interface["AssociatePublicIpAddress"]:
        made |= {"PublicIpAddress": "", "PublicDnsName": ""}
    ec2._tags[made["InstanceId"]] = list(props.get("Tags", ()))
    return made["InstanceId"], _attributes(made)


def _attributes(instance: dict[str, Any]) -> dict[str, str]:
    return {
        "AvailabilityZone": instance["Placement"]["AvailabilityZone"],
        "InstanceId": instance["InstanceId"],
        "PrivateDnsName": instance["PrivateDnsName"],
        "PrivateIp": instance["PrivateIpAddress"],
        "PublicIp": instance["PublicIpAddress"],
        "VpcId": instance["VpcId"],
    }


def _change(
    instance_id: str, old: dict[str, Any], new: dict[str, Any], stack: str
) -> tuple[str, dict[str, str]]:
    """Changes tags in place. Any other change replaces the host, as EC2 does for most properties."""
    if {**old, "Tags": None} != {**new, "Tags": None}:
        return _launch(instance_id, new, stack)  # the old one is deleted by the engine
    ec2._tags[instance_id] = list(new.get("Tags", ()))
    return instance_id, _attributes(ec2._instances[instance_id])


def _terminate(instance_id: str, _props: dict[str, Any]) -> None:
    if instance_id in ec2._instances:
        ec2._terminate_instances({"InstanceId.1": [instance_id]})


def _refusals_of_instance(props: dict[str, Any]) -> Iterator[str]:
    image, kind = props["ImageId"], props["InstanceType"]
    wanted = "arm64" if re.match(r"[a-z]+\d+g", kind) else "x86_64"
    if image not in _images:
        yield f"InvalidAMIID.NotFound: the image id '[{image}]' does not exist"
    elif _images[image] != wanted:
        yield f"InvalidParameterValue: {kind} is {wanted}, and {image} {_images[image]}"
    if "SubnetId" in props or "SecurityGroupIds" in props:
        yield "InvalidParameterCombination: network interfaces and a subnet or groups of the instance"
    for interface in props["NetworkInterfaces"]:
        subnet = ec2._subnets.get(interface["SubnetId"], {})
        if props.get("AvailabilityZone", subnet.get("AvailabilityZone")) != subnet.get("AvailabilityZone"):
            yield f"InvalidParameterValue: {interface['SubnetId']} is not in {props['AvailabilityZone']}"
        yield from _strangers(subnet.get("VpcId", ""), [interface["SubnetId"]], interface["GroupSet"])
    for device in props.get("BlockDeviceMappings", ()):
        if device["DeviceName"] == ROOT_DEVICE and device["Ebs"]["VolumeSize"] < IMAGE_GB:
            yield f"InvalidBlockDeviceMapping: the volume is smaller than its snapshot, of {IMAGE_GB} GB"
    if "CreditSpecification" in props and not kind.startswith("t"):
        yield f"InvalidParameterCombination: CreditSpecification is not supported for {kind}"
    if props.get("MetadataOptions", {}).get("HttpTokens", "optional") not in ("optional", "required"):
        yield f"InvalidParameterValue: HttpTokens {props['MetadataOptions']['HttpTokens']}"
    base64.b64decode(props.get("UserData", ""), validate=True)
    keys = [tag["Key"] for tag in props.get("Tags", ()) if not tag["Key"].startswith("aws:")]
    if len(set(keys)) < len(keys) or len(keys) > 50:
        yield f"InvalidParameterValue: the tags {', '.join(keys)}"
    if _profile(props["IamInstanceProfile"]) is None:
        yield f"InvalidParameterValue: invalid IAM instance profile name {props['IamInstanceProfile']}"


def _profile(name: str) -> Any:
    """Returns the instance profile with this name or ARN, or None if it does not exist."""
    return iam._instance_profiles.get(name.rpartition("/")[2])


def _running() -> list[dict[str, Any]]:
    return [one for one in ec2._instances.values() if one["State"]["Name"] == "running"]


def _groups_of(instance: dict[str, Any]) -> list[str]:
    return [one["GroupId"] for one in instance["SecurityGroups"]]


# ------------------------------------------------------------------ sessions of Session Manager


def session_refusal(access_key: str, target: str, document: str, parameters: dict[str, Any]) -> str | None:
    """Returns why a session of the key's owner that forwards to the database is refused; None if it is
    allowed.
    """
    with request_scope(ACCOUNT, REGION):
        return next(_refusals_of_session(access_key, target, document, parameters), None)


def _refusals_of_session(
    access_key: str, target: str, document: str, parameters: dict[str, Any]
) -> Iterator[str]:
    yield from _not_allowed(access_key, target, document)
    host = next((one for one in _running() if one["InstanceId"] == target), None)
    if host is None:
        yield f"TargetNotConnected: {target} is not running"
        return
    for service, actions in AGENT.items():
        yield from (f"TargetNotConnected: {why}" for why in _silent(host, service, actions))
    if document != FORWARDING:
        yield f"the document {document} forwards no port to another host"
    if set(parameters) - {"host", "portNumber", "localPortNumber"} or not all(
        isinstance(one, list) and len(one) == 1 for one in parameters.values()
    ):
        yield f"InvalidParameters: {parameters}"
    where, port = parameters["host"][0], int(parameters["portNumber"][0])
    for cluster in rds._clusters.values():
        if (cluster["Endpoint"], cluster["Port"], cluster["Status"]) == (where, port, "available"):
            groups = [one["VpcSecurityGroupId"] for one in cluster["VpcSecurityGroups"]]
            if not _lets(_groups_of(host), groups, port):
                yield f"no rule lets {target} connect to {where}, port {port}"
            return
    yield f"nothing listens at {where}, port {port}"


def _not_allowed(access_key: str, target: str, document: str) -> Iterator[str]:
    """Yields the rights that the caller lacks. A session needs one right on the host and one on the
    document.
    """
    principal = iam_evaluator.resolve_principal(access_key, ACCOUNT)
    if isinstance(principal, iam_evaluator.AuthError):
        yield principal.message
        return
    tags = {one["Key"]: one["Value"] for one in ec2._tags.get(target, ())}
    context = {f"ssm:resourcetag/{key}".lower(): value for key, value in tags.items()}
    context["ssm:sessiondocumentaccesscheck"] = "true"
    owner = "" if document.startswith("AWS-") else ACCOUNT
    for resource in (
        f"arn:aws:ec2:{REGION}:{ACCOUNT}:instance/{target}",
        f"arn:aws:ssm:{REGION}:{owner}:document/{document}",
    ):
        request = EvalContext(
            principal_arn=principal.arn,
            principal_type=principal.type,
            principal_account=ACCOUNT,
            action="ssm:StartSession",
            resource_arn=resource,
            region=REGION,
            service_context=context,
            principal_keys=principal.keys,
        )
        if principal.policies is not None and not _allows(request, principal.policies, *principal.limits):
            yield f"AccessDenied: {principal.arn} may not ssm:StartSession on {resource}"


def _silent(host: dict[str, Any], service: str, actions: Iterable[str]) -> Iterator[str]:
    """Yields the reasons why the agent of a host cannot call a service.

    A call needs rights of the host's role, an endpoint, rules of security groups, and the endpoint's policy.
    """
    profile = _profile(host["IamInstanceProfile"]["Arn"])
    (role,) = profile["Roles"]
    requests = [
        EvalContext(
            principal_arn=f"arn:aws:sts::{ACCOUNT}:assumed-role/{role}/{host['InstanceId']}",
            principal_type="AssumedRole",
            principal_account=ACCOUNT,
            action=action,
            resource_arn=f"arn:aws:ec2:{REGION}:{ACCOUNT}:instance/{host['InstanceId']}",
            region=REGION,
        )
        for action in actions
    ]
    policies = iam_evaluator._gather_role_policies(role, ACCOUNT)
    yield from (f"the role {role} may not {one.action}" for one in requests if not _allows(one, policies))
    name = f"com.amazonaws.{REGION}.{service}"
    endpoints = [
        one for one in _private_endpoints() if (one["VpcId"], one["ServiceName"]) == (host["VpcId"], name)
    ]
    if not endpoints:
        yield f"{host['VpcId']} has no way to {service}"
        return
    (endpoint,) = endpoints
    if not _lets(_groups_of(host), endpoint["SecurityGroupIds"], HTTPS):
        yield f"no rule lets {host['InstanceId']} connect to the endpoint of {service}"
    for one in requests:
        if iam_evaluator.evaluate_resource_policy(endpoint["PolicyDocument"], one).decision != "Allow":
            yield f"the endpoint of {service} does not let {one.action} through"


def _allows(request: EvalContext, policies: Any, *limits: Any) -> bool:
    return bool(iam_evaluator.evaluate(request, policies, *limits).decision == "Allow")
