"""What an hour of a deployed instance costs, as it is now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dormouse.errors import InvalidInput
from dormouse.settings.resources import QueryResources, Resources
from dormouse.system.month import HOURS_MONTH, PROXY_ACU_LEAST
from dormouse.system.prices import Prices, prices_of, vcpus


def hourly(resources: Resources, live: Mapping[str, Any], region: str) -> list[tuple[str, float | None]]:
    """What costs how much an hour, as the instance is: USD, or None where no price or measure is known.

    `live` may have `database` (its status, like "available" or "stopped"), `instances` (the classes of its
    instances, like "db.r8g.large" or "db.serverless"), `acu` (the sum of their capacities), `database_gb`,
    `data_gb`, `vcpus` (of EMR Serverless workers now), `architecture` ("arm64" unless given), `hosts` (the
    types of EMR's EC2 instances now), `query_tasks` (how many tasks of the query service run) and
    `query_sleeps`. A region without prices gives None throughout, and no error.
    """
    try:
        prices = prices_of(region)
    except InvalidInput:
        prices = None
    lines: list[tuple[str, float | None]] = []
    if resources.database is not None:
        lines.append(("database", _database_hour(prices, live)))
        lines.append(("database storage", _storage_hour(prices, "aurora_gb_month", live.get("database_gb"))))
        if resources.database.proxy is not None:
            lines.append(("proxy", _proxy_hour(prices, live)))
    if resources.storage is not None:
        lines.append(("objects", _storage_hour(prices, "s3_gb_month", live.get("data_gb"))))
    if resources.compaction is not None:
        lines.append(("runs", _runs_hour(prices, live)))
    if resources.query is not None:
        lines += _query_lines(resources.query, prices, live)
    return lines


def _query_lines(
    told: QueryResources, prices: Prices | None, live: Mapping[str, Any]
) -> list[tuple[str, float | None]]:
    tasks, ways = live.get("query_tasks"), None
    if live.get("query_sleeps"):
        ways = 0.0
    elif prices is not None:
        ways = prices["balancer_hour"] + told.endpoints * prices["endpoint_hour"]
    cost = 0.0 if tasks == 0 else None
    if tasks and prices is not None:
        architecture = live.get("architecture", "arm64")
        cost = tasks * prices.fargate_hour(architecture, told.cpu, told.memory_mb)
    return [("query tasks", cost), ("load balancer and endpoints", ways)]


def _database_hour(prices: Prices | None, live: Mapping[str, Any]) -> float | None:
    if live.get("database") in ("stopped", "stopping"):
        return 0.0
    instances = live.get("instances")
    if prices is None or instances is None:
        return None
    parts = [prices.aurora_hour(one) for one in instances if one != "db.serverless"]
    if len(parts) < len(instances):
        acu = live.get("acu")
        parts.append(None if acu is None else acu * prices["acu_hour"])
    return _sum(parts)


def _proxy_hour(prices: Prices | None, live: Mapping[str, Any]) -> float | None:
    instances = live.get("instances")
    if prices is None or instances is None:
        return None
    if "db.serverless" in instances:
        return max(PROXY_ACU_LEAST, live.get("acu") or 0.0) * prices["proxy_acu_hour"]
    return float(sum(vcpus(one) for one in instances) * prices["proxy_vcpu_hour"])


def _runs_hour(prices: Prices | None, live: Mapping[str, Any]) -> float | None:
    workers, hosts = live.get("vcpus"), live.get("hosts")
    if not workers and not hosts:
        return None if workers is None and hosts is None else 0.0
    if prices is None:
        return None
    vcpu = prices.emr_vcpu_hour(live.get("architecture", "arm64"))
    return _sum([(workers or 0.0) * vcpu, *(prices.ec2_hour(host) for host in hosts or ())])


def _storage_hour(prices: Prices | None, price: str, gb: float | None) -> float | None:
    return None if prices is None or gb is None else gb * prices[price] / HOURS_MONTH


def _sum(parts: list[float | None]) -> float | None:
    return None if None in parts else sum(part for part in parts if part is not None)
