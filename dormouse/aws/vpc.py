"""Checks of an instance's network: the zones of its own VPC, or the parts of an existing one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dormouse.aws.aws import Aws
from dormouse.aws.check import Check, Look
from dormouse.aws.instance import owns
from dormouse.settings.database import ADDRESSES_OF_OTHERS, EmrServerlessCompaction, addresses_of
from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.resources import INSTANCE_TAG

POOR_ZONES = frozenset({"use1-az3"})
"""Ids of zones that lack services an instance needs. Names of zones differ between accounts."""

ENDPOINTS = {
    "commit": frozenset({"ecr.api", "ecr.dkr", "logs", "sqs"}),
    "query": frozenset({"ecr.api", "ecr.dkr", "logs", "secretsmanager"}),
    "access": frozenset({"ssm", "ssmmessages"}),
    "compaction": frozenset({"emr-service-cell01"}),
}
"""The endpoints that tasks on Fargate, the agent of Session Manager and clusters of EMR on EC2 call."""


def created_endpoints(settings: DeploymentSettings) -> dict[str, bool]:
    """Returns the parts that call AWS by interface endpoints, and whether the deploy creates these."""
    parts = {name: getattr(settings, name) for name in ENDPOINTS}
    return {
        name: part.endpoints == "create"
        for name, part in parts.items()
        if part is not None
        and not isinstance(part, EmrServerlessCompaction)
        and (name != "commit" or settings.has_commit_service)
    }


class Network:
    """Checks of the network that the settings describe."""

    def __init__(self, settings: DeploymentSettings, aws: Aws) -> None:
        self.settings, self.aws = settings, aws

    def looks(self) -> Iterator[Look]:
        if self.settings.network.vpc_id is None:
            yield "zones", self.zones
        else:
            yield "vpc", self.vpc

    def zones(self) -> Iterator[Check]:
        """Checks the zones of the instance's own VPC.

        They are those in the settings, else CloudFormation's choice. That choice, `Fn::GetAZs`, changes with
        the account's default subnets and the region's zones. CloudFormation refuses to replace a subnet by
        one in another zone with the same address range.
        """
        network = self.settings.network
        ordinary = [{"Name": "zone-type", "Values": ["availability-zone"]}]
        zones = self.aws.call("ec2", "describe_availability_zones", Filters=ordinary)["AvailabilityZones"]
        ids = {one["ZoneName"]: one["ZoneId"] for one in zones}
        names = list(network.availability_zones)
        if not names:
            default = [{"Name": "default-for-az", "Values": ["true"]}]
            subnets = self.aws.all("ec2", "describe_subnets", "Subnets", Filters=default)
            names = sorted({one["AvailabilityZone"] for one in subnets} or ids)[: network.zones]
            if len(names) < network.zones:  # Fn::Select would fail
                here = f"this account has only {len(names)} in {self.aws.region}"
                what = f"network.zones = {network.zones}, but {here}"
                mend = "lower network.zones, or list the available zones in network.availability_zones"
                yield Check("zones", "wrong", what, mend)
        there = self._deployed_zones()
        if names[: len(there)] != there[: len(names)]:
            what = f"{self.settings.id} is in {', '.join(there)}; a deploy would now take {', '.join(names)}"
            listed = ", ".join(f'"{name}"' for name in there)
            yield Check("zones", "wrong", what, f"set network.availability_zones = [{listed}]")
        for name in names:
            if (zone := ids.get(name)) is None:
                what = f"{name} is not a zone of {self.aws.region} in this account"
                yield Check("zone", "wrong", what, "correct network.availability_zones")
            else:
                lacks = f"{name} is {zone} in this account, which lacks services that are needed"
                trouble, mend = (
                    lacks if zone in POOR_ZONES else None,
                    "name others in network.availability_zones",
                )
                yield Check.of("zone", f"{name}, {zone}", trouble, mend, "warning")

    def _deployed_zones(self) -> list[str]:
        """Returns the zones of the instance's subnets, in the order of their names; empty before a deploy."""
        ours = [{"Name": f"tag:{INSTANCE_TAG}", "Values": [self.settings.id]}]
        found = {
            tag["Value"]: subnet["AvailabilityZone"]
            for subnet in self.aws.all("ec2", "describe_subnets", "Subnets", Filters=ours)
            for tag in subnet.get("Tags", ())
            if tag["Key"] == "Name"
        }
        return [found[name] for name in sorted(found)]

    def vpc(self) -> Iterator[Check]:
        network = self.settings.network
        vpcs = self._in_vpc("describe_vpcs", "Vpcs")
        if not vpcs:
            yield Check("vpc", "wrong", f"there is no VPC {network.vpc_id} here", "correct network.vpc_id")
            return
        subnets = {one["SubnetId"]: one for one in self._in_vpc("describe_subnets", "Subnets")}
        yield from self._subnets(subnets)
        yield from self._addresses([subnets[name] for name in network.subnet_ids if name in subnets])
        tables = self._tables()
        yield from self._routes(tables)
        endpoints = self._in_vpc("describe_vpc_endpoints", "VpcEndpoints")
        yield self._endpoint([one for one in endpoints if one["ServiceName"].endswith(".s3")], tables)
        for name, is_made in created_endpoints(self.settings).items():
            yield self._ways(name, is_made, endpoints)

    def _subnets(self, subnets: dict[str, Any]) -> Iterator[Check]:
        network = self.settings.network
        for subnet, zone in zip(network.subnet_ids, network.availability_zones, strict=True):
            if (found := subnets.get(subnet)) is None:
                what = f"{subnet} is not a subnet of {network.vpc_id}"
                yield Check("subnet", "wrong", what, "correct network.subnet_ids")
            else:
                real, mend = found["AvailabilityZone"], "correct network.availability_zones"
                trouble = f"{subnet} is in {real}, not {zone}" if real != zone else None
                yield Check.of("subnet", f"{subnet} in {zone}", trouble, mend)

    def _addresses(self, subnets: list[Any]) -> Iterator[Check]:
        """Checks that the existing subnets, and their free addresses, suffice for Spark.

        Workers of EMR Serverless can be in all subnets, with the addresses of lambdas and others. EMR on EC2
        creates all instances of a cluster in one of the subnets.
        """
        if (compaction := self.settings.compaction) is None or not subnets:
            return
        free = [int(one["AvailableIpAddressCount"]) for one in subnets]
        every = [addresses_of(int(one["CidrBlock"].rpartition("/")[2])) for one in subnets]
        needed, key = compaction.machines_max, "compaction.instances_max"
        if isinstance(compaction, EmrServerlessCompaction):
            needed, key = needed + ADDRESSES_OF_OTHERS, "compaction.vcpu_max"
            there, now, where = sum(every), sum(free), "in the subnets"
        else:
            there, now, where = max(every), max(free), "in the largest subnet"
        counted = f"{needed:,} addresses needed, {now:,} free"
        mend = f"name larger subnets in network.subnet_ids, or lower {key}"
        if needed > there:
            yield Check("addresses", "wrong", f"{needed:,} addresses needed, {there:,} {where}", mend)
        else:
            yield Check.of("addresses", counted, counted if needed > now else None, mend, "warning")

    def _tables(self) -> dict[str, str]:
        """Returns the route table of each subnet.

        A subnet without one of its own has the main table of the VPC.
        """
        tables = self._in_vpc("describe_route_tables", "RouteTables")
        links = [(table["RouteTableId"], link) for table in tables for link in table.get("Associations", ())]
        used = {link["SubnetId"]: table for table, link in links if "SubnetId" in link}
        main = next((table for table, link in links if link.get("Main")), "none")
        return {subnet: used.get(subnet, main) for subnet in self.settings.network.subnet_ids}

    def _routes(self, tables: dict[str, str]) -> Iterator[Check]:
        network = self.settings.network
        for subnet, table in zip(network.subnet_ids, network.route_table_ids, strict=False):
            real = tables[subnet]
            other = f"{subnet} has the route table {real}, not {table}" if real != table else None
            yield Check.of("route table", f"{table} of {subnet}", other, "correct network.route_table_ids")

    def _endpoint(self, endpoints: list[Any], tables: dict[str, str]) -> Check:
        """Checks the gateway endpoint to S3, of which a route table can have only one.

        A deploy has created an endpoint with the instance's tag, and deletes it with
        `s3_endpoint = "existing"`.
        """
        gateways = [one for one in endpoints if one.get("VpcEndpointType") == "Gateway"]
        own = {one["VpcEndpointId"] for one in gateways if owns(self.settings.id, one)}
        ways = {table: one["VpcEndpointId"] for one in gateways for table in one.get("RouteTableIds", ())}
        has = {table: ways[table] for table in tables.values() if table in ways and ways[table] not in own}
        if self.settings.network.s3_endpoint == "create":
            trouble = f"{', '.join(has)} has an S3 gateway endpoint already" if has else None
            mend = 'set network.s3_endpoint = "existing"'
            fine = f"{', '.join(sorted(own))} is the instance's own" if own else "it will be made"
            return Check.of("s3 endpoint", fine, trouble, mend)
        lacking = sorted({*tables.values()} - has.keys())
        but = " but the instance's own, which a deploy would delete" if own else ""
        trouble = f"{', '.join(lacking)} has no S3 gateway endpoint{but}" if lacking else None
        mend = 'make one, or add it to one, or set network.s3_endpoint = "create" with route_table_ids'
        return Check.of("s3 endpoint", ", ".join({*has.values()}), trouble, mend)

    def _ways(self, part: str, is_made: bool, endpoints: list[Any]) -> Check:
        """Checks that the interface endpoints of a part, such as `query`, exist, or can be created.

        `is_made` is True if the deploy creates them.
        """
        name, needed, found = f"{part} endpoints", ENDPOINTS[part], set()
        for one in endpoints:
            is_ours = owns(self.settings.id, one)
            service = one["ServiceName"].split(".", 3)[-1]
            if service in needed and one.get("PrivateDnsEnabled") and not is_ours:
                found.add(service)
        named = ", ".join(sorted(found))
        if is_made:
            if found:
                mend = f'set {part}.endpoints = "existing", and make those that are missing'
                return Check(name, "wrong", f"the VPC has some already: {named}", mend)
            return Check(name, "ok", "they will be made")
        if missing := sorted(needed - found):
            mend = f'let the subnets have a NAT gateway, make them, or set {part}.endpoints = "create"'
            return Check(name, "warning", f"the VPC has none for {', '.join(missing)}", mend)
        return Check(name, "ok", named)

    def _in_vpc(self, operation: str, key: str) -> list[Any]:
        filters = [{"Name": "vpc-id", "Values": [self.settings.network.vpc_id]}]
        return self.aws.all("ec2", operation, key, Filters=filters)
