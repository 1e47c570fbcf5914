"""What an hour of a deployed instance costs, as it is now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dormouse.aws.month import PROXY_ACU_LEAST
from dormouse.aws.prices import HOURS_MONTH, Prices, known_regions, prices_of, vcpus
from dormouse.settings.resources import Resources

ARCHITECTURE = "arm64"
"""An instance does not tell its own; on x86_64 the same costs about a quarter more."""


def hourly(resources: Resources, live: Mapping[str, Any], region: str) -> list[tuple[str, float | None]]:
    """What costs how much an hour, as the instance is: USD, or None where no price or measure is known.

    `live` may have `database` (its status, like "available" or "stopped"), `instances` (the classes of its
    instances, like "db.r8g.large" or "db.serverless"), `acu` (the sum of their capacities), `database_gb`,
    `data_gb`, `rows_acu` and `rows_gb` (of the clusters that row tables have of their own, in all), `vcpus`
    (of EMR Serverless workers now), `hosts` (the types of EMR's EC2 instances now), `query_tasks` (how many
    tasks of the query service run), `query_sleeps` and `access_sleeps`.
    A region without prices gives None throughout, and no error.
    """
    is_known = region in known_regions()
    prices = prices_of(region if is_known else known_regions()[0])
    return [(name, usd if is_known else None) for name, usd in _lines(resources, live, prices)]


def _lines(
    resources: Resources, live: Mapping[str, Any], prices: Prices
) -> Iterator[tuple[str, float | None]]:
    if resources.database is not None:
        yield "database", _database_hour(prices, live)
        yield "database storage", _storage_hour(live.get("database_gb"), prices["aurora_gb_month"])
        if resources.database.proxy is not None:
            yield "proxy", _proxy_hour(prices, live)
        if resources.database.row_clusters:
            acu = live.get("rows_acu")
            yield "clusters of rows", None if acu is None else acu * prices["acu_hour"]
            yield "their storage", _storage_hour(live.get("rows_gb"), prices["aurora_gb_month"])
    if resources.storage is not None:
        yield "objects", _storage_hour(live.get("data_gb"), prices["s3_gb_month"])
    if resources.compaction is not None:
        yield "runs", _runs_hour(prices, live.get("vcpus"), live.get("hosts"))
    if (query := resources.query) is not None:
        tasks, task = live.get("query_tasks"), prices.fargate_hour(ARCHITECTURE, query.cpu, query.memory_mb)
        yield "query tasks", None if tasks is None else tasks * task
        ways = prices["balancer_hour"] + query.endpoints * prices["endpoint_hour"]
        yield "load balancer and endpoints", 0.0 if live.get("query_sleeps") else ways
    if (access := resources.access) is not None:
        runs = prices.access_hour + access.endpoints * prices["endpoint_hour"]
        yield "host for access and endpoints", 0.0 if live.get("access_sleeps") else runs


def _database_hour(prices: Prices, live: Mapping[str, Any]) -> float | None:
    if live.get("database") in ("stopped", "stopping"):
        return 0.0
    instances, acu = live.get("instances"), live.get("acu")
    if instances is None:
        return None
    parts = [prices.aurora_hour(one) for one in instances if one != "db.serverless"]
    if len(parts) < len(instances):
        parts.append(None if acu is None else acu * prices["acu_hour"])
    return _sum(parts)


def _proxy_hour(prices: Prices, live: Mapping[str, Any]) -> float | None:
    instances = live.get("instances")
    if instances is None:
        return None
    if "db.serverless" in instances:
        return max(PROXY_ACU_LEAST, live.get("acu") or 0.0) * prices["proxy_acu_hour"]
    return float(sum(vcpus(one) for one in instances) * prices["proxy_vcpu_hour"])


def _runs_hour(prices: Prices, workers: float | None, hosts: list[str] | None) -> float | None:
    if workers is None and hosts is None:
        return None
    usd = (workers or 0.0) * prices.emr_vcpu_hour(ARCHITECTURE)
    return _sum([usd, *(prices.ec2_hour(host) for host in hosts or ())])


def _storage_hour(gb: float | None, price: float) -> float | None:
    return None if gb is None else gb * price / HOURS_MONTH


def _sum(parts: list[float | None]) -> float | None:
    return None if None in parts else sum(part for part in parts if part is not None)
