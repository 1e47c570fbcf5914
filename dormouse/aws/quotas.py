"""Checks of the account's quotas that an instance may reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from dormouse.aws.aws import Aws, AwsRefused
from dormouse.aws.check import Check, Look
from dormouse.settings.database import EmrServerlessCompaction
from dormouse.settings.deployment import DeploymentSettings


@dataclass(frozen=True)
class Quota:
    service: str
    code: str
    what: str
    """The things that the quota limits."""


LAMBDA_CONCURRENCY = Quota("lambda", "L-B99A9384", "lambdas at once")
VPCS = Quota("vpc", "L-F678F1CE", "VPCs")
CLUSTERS = Quota("rds", "L-952B80B8", "database clusters")
EMR_VCPU = Quota("emr-serverless", "L-D05C8A75", "vCPUs of EMR Serverless at once")
FARGATE_VCPU = Quota("fargate", "L-3032A538", "vCPUs of Fargate at once")


class Quotas:
    """Checks of the quotas that the settings may reach."""

    def __init__(self, settings: DeploymentSettings, aws: Aws) -> None:
        self.settings, self.aws = settings, aws

    def looks(self) -> Iterator[Look]:
        settings = self.settings
        yield "quotas of the database", self._clusters
        if settings.network.vpc_id is None:
            yield "quotas of the network", self._network
        if commit := settings.commit:
            lambdas = commit.queues * commit.concurrency
            yield "quota of lambdas", partial(self.check, LAMBDA_CONCURRENCY, lambdas)
        if isinstance(compaction := settings.compaction, EmrServerlessCompaction):
            yield "quota of EMR Serverless", partial(self.check, EMR_VCPU, compaction.vcpu_max)
        if query := settings.query:
            vcpus = -(-query.tasks_max * query.cpu // 1_024)
            yield "quota of Fargate", partial(self.check, FARGATE_VCPU, vcpus)

    def _clusters(self) -> Iterator[Check]:
        rows = self.settings.rows
        needed = 1 + (rows.databases if rows is not None and rows.own_clusters else 0)
        yield from self.check(
            CLUSTERS, needed, len(self.aws.all("rds", "describe_db_clusters", "DBClusters"))
        )

    def _network(self) -> Iterator[Check]:
        yield from self.check(VPCS, 1, len(self.aws.all("ec2", "describe_vpcs", "Vpcs")))

    def check(self, quota: Quota, needed: int, used: int = 0) -> Iterator[Check]:
        try:
            found = self.aws.call(
                "service-quotas", "get_service_quota", ServiceCode=quota.service, QuotaCode=quota.code
            )
        except AwsRefused as refused:
            if refused.code != "NoSuchResourceException":
                raise
            mend = f"look it up in Service Quotas ({quota.code})"
            yield Check("quota", "warning", f"{quota.what}: not known", mend)
            return
        limit = int(found["Quota"]["Value"])
        counted = f"{quota.what}: {needed:,} needed{f', {used:,} in use' if used else ''}, {limit:,} allowed"
        mend = f"ask for more in Service Quotas ({quota.service}, {quota.code}), or lower the settings"
        yield Check.of("quota", counted, None if used + needed <= limit else counted, mend)
