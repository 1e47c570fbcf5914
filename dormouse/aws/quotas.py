"""Checks of the account's quotas that an instance may reach, and of the instance types that it needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from dormouse.aws.aws import Aws, AwsRefused
from dormouse.aws.check import Check, Look
from dormouse.aws.instance import owns
from dormouse.aws.vpc import ENDPOINTS, created_endpoints
from dormouse.settings.database import EmrServerlessCompaction
from dormouse.settings.deployment import ACCESS_HOST, DeploymentSettings


@dataclass(frozen=True)
class Quota:
    service: str
    code: str
    what: str
    """The things that the quota limits."""


LAMBDA_CONCURRENCY = Quota("lambda", "L-B99A9384", "lambdas at once")
VPCS = Quota("vpc", "L-F678F1CE", "VPCs")
GATEWAYS = Quota("vpc", "L-1B52E74A", "gateway endpoints")
INTERFACES = Quota("vpc", "L-29B6F2EB", "interface endpoints of a VPC")
CLUSTERS = Quota("rds", "L-952B80B8", "database clusters")
EMR_VCPU = Quota("emr-serverless", "L-D05C8A75", "vCPUs of EMR Serverless at once")
FARGATE_VCPU = Quota("fargate", "L-3032A538", "vCPUs of Fargate at once")

EC2_VCPU = {
    **dict.fromkeys(
        ("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"),
        Quota("ec2", "L-1216C47A", "vCPUs of standard EC2 instances at once"),
    ),
    "x": Quota("ec2", "L-7295265B", "vCPUs of X instances at once"),
}
"""The quotas of on-demand EC2 instances, by the letters that their types begin with."""

OTHER_MARKETS = frozenset({"spot", "scheduled", "capacity-block"})
"""Lifecycles of EC2 instances that other quotas limit."""

UNCHANGED = "NoSuchResourceException"
"""AWS's error code for a quota that was never applied to the account, or that does not exist."""

RIGHTS = "servicequotas:GetServiceQuota and servicequotas:GetAWSDefaultServiceQuota"


class Quotas:
    """Checks of the quotas that the settings may reach.

    Without the right to read quotas, the first check is one warning, and the others find nothing.
    """

    def __init__(self, settings: DeploymentSettings, aws: Aws) -> None:
        self.settings, self.aws = settings, aws
        self._is_denied = False

    def looks(self) -> Iterator[Look]:
        settings = self.settings
        yield "quotas of the database", self._clusters
        yield "quotas of the network", self._network
        if commit := settings.commit:
            lambdas = commit.queues * commit.concurrency
            yield "quota of lambdas", partial(self.check, LAMBDA_CONCURRENCY, lambdas)
        if isinstance(compaction := settings.compaction, EmrServerlessCompaction):
            yield "quota of EMR Serverless", partial(self.check, EMR_VCPU, compaction.vcpu_max)
        if self._instance_types():
            yield "quota of EC2", self._instances
        if settings.has_tasks:
            units = settings.query.tasks_max * settings.query.cpu if settings.query else 0
            units += settings.commit.service_cpu if settings.commit and settings.commit.service else 0
            vcpus = -(-units // 1_024)
            yield "quota of Fargate", partial(self.check, FARGATE_VCPU, vcpus)

    def check(self, quota: Quota, needed: int, used: int = 0, ours: int = 0) -> Iterator[Check]:
        """Checks one quota. `ours` is the part of `used` that the instance has already."""
        if self._is_denied:
            return
        try:
            limit, allowed = self._limit(quota)
        except AwsRefused as refused:
            if refused.code == UNCHANGED:
                mend = f"look it up in Service Quotas ({quota.service}, {quota.code})"
                yield Check("quota", "warning", f"{quota.what}: not known", mend)
            elif refused.is_denied:
                self._is_denied = True
                mend = f"{RIGHTS} are needed, or check the quotas by hand"
                yield Check("quotas", "warning", f"not checked: {refused}", mend)
            else:
                raise
            return
        others = used - min(ours, needed)
        counted = (
            f"{quota.what}: {needed:,} needed{f', {others:,} in use' if others else ''}, {limit:,} {allowed}"
        )
        mend = f"ask for more in Service Quotas ({quota.service}, {quota.code}), or lower the settings"
        yield Check.of("quota", counted, None if others + needed <= limit else counted, mend)

    def _limit(self, quota: Quota) -> tuple[int, str]:
        """Returns the quota of the account, else AWS's default, each with a word for it."""
        given = {"ServiceCode": quota.service, "QuotaCode": quota.code}
        try:
            found, allowed = self.aws.call("service-quotas", "get_service_quota", **given), "allowed"
        except AwsRefused as refused:
            if refused.code != UNCHANGED:
                raise
            found = self.aws.call("service-quotas", "get_aws_default_service_quota", **given)
            allowed = "allowed by default"
        return int(found["Quota"]["Value"]), allowed

    def _count(self, quota: Quota, needed: int, there: list[Any]) -> Iterator[Check]:
        ours = sum(owns(self.settings.id, one) for one in there)
        yield from self.check(quota, needed, len(there), ours)

    def _clusters(self) -> Iterator[Check]:
        rows = self.settings.rows
        needed = 1 + (rows.databases if rows is not None and rows.own_clusters else 0)
        yield from self._count(CLUSTERS, needed, self.aws.all("rds", "describe_db_clusters", "DBClusters"))

    def _network(self) -> Iterator[Check]:
        """Checks the quotas of VPCs and endpoints.

        The endpoints of the own VPC are far fewer than AWS allows in a VPC.
        """
        network = self.settings.network
        if network.vpc_id is None:
            yield from self._count(VPCS, 1, self.aws.all("ec2", "describe_vpcs", "Vpcs"))
        endpoints = self.aws.all("ec2", "describe_vpc_endpoints", "VpcEndpoints")
        if network.s3_endpoint == "create":
            gateways = [one for one in endpoints if one.get("VpcEndpointType") == "Gateway"]
            yield from self._count(GATEWAYS, 1, gateways)
        created = [name for name, is_made in created_endpoints(self.settings).items() if is_made]
        if network.vpc_id is not None and created:
            there = [
                one
                for one in endpoints
                if one.get("VpcEndpointType") == "Interface" and one["VpcId"] == network.vpc_id
            ]
            needed = frozenset().union(*(ENDPOINTS[name] for name in created))  # services share endpoints
            yield from self._count(INTERFACES, len(needed), there)

    def _instance_types(self) -> dict[str, int]:
        """Returns the EC2 instance types of a cluster and of the host for access, and their numbers."""
        compaction, types = self.settings.compaction, {}
        if compaction is not None and not isinstance(compaction, EmrServerlessCompaction):
            types = dict.fromkeys(compaction.instance_types, compaction.machines_max)
        return types | ({ACCESS_HOST: 1} if self.settings.access else {})

    def _instances(self) -> Iterator[Check]:
        """Checks that the region offers the instance types, and that the quotas suffice for one cluster.

        A cluster can have all its instances of its largest type.
        """
        types = self._instance_types()
        filters = [{"Name": "instance-type", "Values": list(types)}]
        offers = self.aws.all("ec2", "describe_instance_types", "InstanceTypes", Filters=filters)
        vcpus = {one["InstanceType"]: int(one["VCpuInfo"]["DefaultVCpus"]) for one in offers}
        if lacking := [name for name in types if name not in vcpus]:
            what = f"{', '.join(lacking)} is not offered in {self.aws.region}"
            mend = (
                "leave out the table access"
                if lacking == [ACCESS_HOST]
                else "name others in compaction.instance_types"
            )
            yield Check("instance types", "wrong", what, mend)
        needed: dict[Quota, int] = {}
        for name, number in vcpus.items():
            if (quota := _quota_of(name)) is None:
                mend = "look it up in Service Quotas (ec2)"
                yield Check("quota", "warning", f"the quota of {name} is not known", mend)
            elif name != ACCESS_HOST:
                needed[quota] = max(needed.get(quota, 0), number * types[name])
        if (host := _quota_of(ACCESS_HOST)) and ACCESS_HOST in vcpus:
            needed[host] = needed.get(host, 0) + vcpus[ACCESS_HOST]
        running = self._running()
        for quota, number in needed.items():
            same = [one for one in running if _quota_of(one["InstanceType"]) == quota]
            ours = sum(_vcpus(one) for one in same if owns(self.settings.id, one))
            yield from self.check(quota, number, sum(map(_vcpus, same)), ours)

    def _running(self) -> list[Any]:
        """Returns the account's on-demand instances that run."""
        states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        found = self.aws.all("ec2", "describe_instances", "Reservations", Filters=states)
        instances = [instance for one in found for instance in one["Instances"]]
        return [one for one in instances if one.get("InstanceLifecycle") not in OTHER_MARKETS]


def _quota_of(instance_type: str) -> Quota | None:
    letters = re.match("[a-z]+", instance_type)
    return EC2_VCPU.get(letters[0]) if letters else None


def _vcpus(instance: Any) -> int:
    options = instance["CpuOptions"]
    return int(options["CoreCount"] * options["ThreadsPerCore"])
