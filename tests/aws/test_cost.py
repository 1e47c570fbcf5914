"""The cost of an instance: by resource and state, from a dated file of prices with their sources."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dormouse.aws.cost import (
    QUERY_ENDPOINTS,
    Assumptions,
    Estimate,
    alarm_count,
    estimate,
    hourly,
    key_count,
    known_regions,
    prices_of,
)
from dormouse.errors import InvalidInput
from dormouse.settings import lambdas
from dormouse.settings.config_file import load
from dormouse.settings.resources import (
    DatabaseResources,
    QueryResources,
    Resources,
    RunResources,
    StorageResources,
)
from tests.infrastructure.reviewed import reviewed
from tests.support.settings import parse

CONFIG = Path(__file__).parents[2] / "config"
PRICES = Path(__file__).parents[2] / "dormouse/aws/prices.toml"


def month(name: str, region: str = "us-east-1", **assumed: float) -> Estimate:
    return estimate(load(CONFIG / f"{name}.toml"), region, replace(Assumptions(), **assumed))


def usd(total: Estimate, resource: str) -> tuple[float, float | None, float]:
    """Returns the monthly cost of one resource in US dollars, in three states of the instance.

    They are: running; running with an auto-paused database, None if it cannot auto-pause; and paused.
    """
    (line,) = (line for line in total.lines if line.resource.startswith(resource))
    return line.running, line.auto_paused, line.paused


def test_every_region_has_every_price_and_every_price_its_source() -> None:
    assert set(known_regions()) == {
        "us-east-1", "us-east-2", "us-west-2", "eu-west-1", "eu-west-2", "eu-central-1",
    }  # fmt: skip
    for region in known_regions():
        found = prices_of(region)
        assert found.date and found.source and found.aurora_large_hour and found.ec2_xlarge_hour
        assert found.usd.keys() == prices_of("us-east-1").usd.keys()
        assert all(found.usd.values())
    code = (PRICES.parent / "cost.py").read_text("utf-8")
    used = set(re.findall(r'(?:prices|self)\["(\w+)"\]', code))
    assert len(used) > 20 and used <= prices_of("us-east-1").usd.keys()
    numbers = re.findall(r"^\w+ = [\d.]+\b(?!-).*$", PRICES.read_text("utf-8"), re.MULTILINE)
    assert len(numbers) > 100
    assert [line for line in numbers if not re.search(r"  # [LPD]\b", line)] == []


def test_an_unknown_region_is_refused_with_a_list_of_known_regions() -> None:
    with pytest.raises(
        InvalidInput, match=r"the prices of the region mars-1 are not known\. They are known for us-east-1, "
    ):
        month("dev", "mars-1")
    with pytest.raises(InvalidInput, match="use --region with one of us-east-1, "):
        estimate(load(CONFIG / "dev.toml"), None, Assumptions())


def test_the_database_is_charged_by_capacity_while_it_runs() -> None:
    running, asleep, paused = usd(month("dev", load=0.5, awake=0.1), "Aurora, 2 ACU")
    assert running == pytest.approx(2 * 0.12 * 730)
    assert asleep == pytest.approx(running / 10)
    assert 0 < paused < 1  # AWS starts a stopped database every week


def test_a_database_of_fixed_size_does_not_pause_itself() -> None:
    found = month("prod")
    assert usd(found, "Aurora, 2 × db.r8g.xlarge")[:2] == (pytest.approx(2 * 0.552 * 730), None)
    assert found.auto_paused is None


def test_stored_data_costs_the_same_in_every_state() -> None:
    assert usd(month("dev", data_gb=2_000), "S3, 2000 GB of data") == (46.0, 46.0, 46.0)


def test_replaced_files_are_charged_until_the_lifecycle_deletes_them() -> None:
    """S3 keeps replaced files for the days in the template's lifecycle. A paused instance replaces none."""
    for name in ("dev", "prod"):
        template = json.dumps(reviewed(name))
        [days] = {int(number) for number in re.findall(r'"NoncurrentDays": (\d+)', template)}
        assert days <= {"dev": 4, "prod": 8}[name]
        found = month(name, data_gb=600, rewritten=2)
        line = f"S3, {600 * 2 * days / 30:,.0f} GB that was replaced, kept for {days} days"
        running, _, paused = usd(found, line)
        assert (running, paused) == (pytest.approx(600 * 2 * days / 30 * 0.023), 0)


def test_a_paused_instance_pays_for_nothing_that_runs() -> None:
    found = month("prod", data_gb=0, database_gb=0, log_gb=0)
    assert found.paused < 15 < found.running
    for resource in ("EMR Serverless", "Fargate", "Lambda", "SQS", "Step Functions", "load balancer"):
        assert all(line.paused == 0 for line in found.lines if line.resource.startswith(resource))


def test_only_the_keeper_writes_a_metric_during_a_pause() -> None:
    names = [value for key, value in vars(lambdas).items() if key.isupper() and isinstance(value, str)]
    names = [name for name in names if name not in (lambdas.NAMESPACE, lambdas.DIMENSION)]
    found = month("prod")
    assert usd(found, f"{len(names) - 1} CloudWatch metrics")[2] == 0
    assert usd(found, "1 CloudWatch metric") == (0.3, None, 0.3)


def test_an_option_that_is_off_costs_nothing() -> None:
    stacks = {line.stack for line in month("minimal").lines}
    assert stacks == {"database", "storage", "commit", "garbage", "all"}


@pytest.mark.parametrize("name", ["dev", "prod", "minimal"])
def test_keys_alarms_and_dashboards_are_counted_as_in_the_templates(name: str) -> None:
    template = json.dumps(reviewed(name))
    kinds = Counter(re.findall(r'"Type": "(AWS::[\w:]+)"', template))
    settings = load(CONFIG / f"{name}.toml")
    assert key_count(settings) == kinds["AWS::KMS::Key"]
    assert (settings.monitoring is not None) == kinds["AWS::CloudWatch::Dashboard"]
    if settings.monitoring:
        assert alarm_count(settings) == kinds["AWS::CloudWatch::Alarm"]
    assert not {"AWS::EC2::NatGateway", "AWS::EC2::EIP"} & kinds.keys()
    kept = re.findall(r'"VpcEndpointType": "Interface"', template)
    assert len(kept) == (QUERY_ENDPOINTS if settings.query else 0)
    assert kinds["AWS::ElasticLoadBalancingV2::LoadBalancer"] == (settings.query is not None)


def test_runs_are_charged_by_the_hour_on_every_engine() -> None:
    vcpu = 0.042094 + 4 * 0.004628
    assert usd(month("dev", run_hours=10, run_share=0.5), "EMR Serverless")[0] == pytest.approx(80 * vcpu)
    document = {"id": "x1", "compaction": {"engine": "emr-ec2-transient", "instances_max": 10}}
    found = estimate(parse(document), "us-east-1", replace(Assumptions(), run_hours=10, run_share=0.5))
    disk = 64 * 0.08 / 730
    assert usd(found, "EMR on EC2")[0] == pytest.approx(10 * 6 * (0.1632 * 1.25 + disk))


def test_an_instance_without_a_price_is_named() -> None:
    document = {"id": "x1", "database": {"kind": "fixed", "instance_class": "x9z.large"}}
    assert estimate(parse(document), "us-east-1", Assumptions()).unpriced == ("db.x9z.large",)


def test_a_proxy_is_charged_while_paused_too() -> None:
    document = {"id": "x1", "database": {"kind": "fixed", "instance_class": "r8g.large", "proxy": True}}
    running, _, paused = usd(estimate(parse(document), "us-east-1", Assumptions()), "RDS Proxy")
    assert running == paused == pytest.approx(2 * 0.015 * 730)


@pytest.mark.parametrize("kind", ["fixed", "serverless"])
def test_io_optimized_storage_has_dearer_instances_and_storage_and_free_io(kind: str) -> None:
    document = {"id": "x1", "database": {"kind": kind}, "rows": {"own_clusters": True, "databases": 1}}
    standard = estimate(parse(document), "us-east-1", Assumptions())
    document["database"] = {"kind": kind, "storage": "io-optimized"}
    optimized = estimate(parse(document), "us-east-1", Assumptions())
    database = "Aurora, db." if kind == "fixed" else "Aurora, 1 ACU"
    for name, factor in ((database, 1.3), ("Aurora storage, 20 GB", 2.25), ("Aurora storage for rows", 1)):
        assert usd(optimized, name)[0] == pytest.approx(factor * usd(standard, name)[0])
    assert usd(standard, "Aurora I/O")[0] > 0
    assert not [line for line in optimized.lines if line.resource.startswith("Aurora I/O")]


def test_clusters_of_row_tables_are_charged_while_they_run() -> None:
    document = {"id": "x1", "rows": {"databases": 3, "own_clusters": True, "max_acu": 8}}
    found = estimate(parse(document), "us-east-1", replace(Assumptions(), awake=0.5))
    running, asleep, paused = usd(found, "Aurora for rows")
    assert running == asleep == pytest.approx(3 * 2 * 0.12 * 730 * 0.5)
    assert paused == 0
    assert usd(found, "Aurora storage for rows")[2] == pytest.approx(10 * 0.1)
    assert usd(found, "Secrets Manager, master passwords of 3 clusters")[2] == pytest.approx(3 * 0.4)
    others = estimate(parse({"id": "x1", "rows": {"databases": 3}}), "us-east-1", Assumptions())
    assert not [line for line in others.lines if "for rows" in line.resource]


@pytest.mark.parametrize("given", [{"load": 1.5}, {"awake": -0.1}, {"data_gb": float("nan")}, {"log_gb": -1}])
def test_an_impossible_assumption_is_refused_by_name(given: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match=f"^{next(iter(given))} = "):
        replace(Assumptions(), **given)


DATABASE = DatabaseResources(cluster="c", kind="fixed", endpoint="e", port=5432, name="dormouse")
STORAGE = StorageResources(data_bucket="d", payload_bucket="p", objects="s3://d/data")
RUNS = RunResources(rules=(), function="f", engine="emr-serverless")


def test_an_hour_is_charged_for_what_runs_now() -> None:
    all_of_it = Resources(database=DATABASE, storage=STORAGE, compaction=RUNS)
    live = {
        "database": "available",
        "instances": ["db.r8g.large"],
        "database_gb": 73,
        "data_gb": 730,
        "vcpus": 10,
    }
    found = dict(hourly(all_of_it, live, "us-east-1"))
    assert found == {
        "database": pytest.approx(0.276),
        "database storage": pytest.approx(0.01),
        "objects": pytest.approx(0.023),
        "runs": pytest.approx(10 * (0.042094 + 4 * 0.004628)),
    }
    optimized = Resources(database=DATABASE.model_copy(update={"storage": "io-optimized"}))
    found = dict(hourly(optimized, live, "us-east-1"))
    assert (found["database"], found["database storage"]) == (pytest.approx(0.3588), pytest.approx(0.0225))
    serverless = {"instances": ["db.serverless"], "acu": 1.5, "hosts": ["m7g.xlarge"]}
    assert dict(hourly(optimized, serverless, "us-east-1"))["database"] == pytest.approx(1.3 * 0.18)
    found = dict(hourly(all_of_it, serverless, "us-east-1"))
    assert (found["database"], found["runs"]) == (pytest.approx(0.18), pytest.approx(0.204))


def test_stopped_parts_cost_nothing_and_unknown_parts_have_no_hourly_cost() -> None:
    only = Resources(database=DATABASE)
    assert dict(hourly(only, {"database": "stopped"}, "us-east-1"))["database"] == 0.0
    assert {cost for _, cost in hourly(only, {}, "us-east-1")} == {None}
    assert {cost for _, cost in hourly(only, {"instances": ["db.r8g.large"]}, "mars-1")} == {None}


def test_a_paused_query_service_is_charged_only_for_its_name_and_token() -> None:
    document = {"id": "x1", "query": {"cpu": 1024, "memory_gb": 4, "tasks_min": 2, "disk_gb": 120}}
    found = estimate(parse(document), "us-east-1", Assumptions())
    task = (0.042094 + 4 * 0.004628) / 1.3 + 100 * 0.000111
    assert usd(found, "Fargate, 2 × 1 vCPU, 4 GB")[0] == pytest.approx(2 * task * 730)
    assert usd(found, "load balancer")[0] == pytest.approx((0.0225 + 0.008) * 730)
    assert usd(found, "4 interface endpoints")[0] == pytest.approx(4 * 0.01 * 730)
    lines = [line for line in found.lines if line.stack == "query"]
    assert sum(line.paused for line in lines) == pytest.approx(0.9)
    document["query"]["endpoints"] = "existing"  # type: ignore[index]
    lines = list(estimate(parse(document), "us-east-1", Assumptions()).lines)
    assert not [line for line in lines if "endpoints" in line.resource]


QUERY = QueryResources(
    url="u", token="t", cluster="c", service="query",  # noqa: S106
    tasks_min=1, cpu=2_048, memory_mb=8_192,
    endpoints=4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("live", "tasks", "ways"),
    [
        ({"query_tasks": 0, "sleeps": True}, 0.0, 0.0),
        ({"query_tasks": 0}, 0.0, 0.0625),
        ({"query_tasks": 3}, 3 * 2 * (0.042094 + 4 * 0.004628) / 1.3, 0.0625),
        ({}, None, 0.0625),
    ],
)
def test_the_hourly_cost_of_the_query_service_counts_its_tasks(
    live: dict[str, Any], tasks: float | None, ways: float
) -> None:
    found = dict(hourly(Resources(query=QUERY), live, "us-east-1"))
    assert found["load balancer and endpoints"] == pytest.approx(ways)
    assert found["query tasks"] == (None if tasks is None else pytest.approx(tasks))


@pytest.mark.parametrize(("query", "count"), [(None, 4), ({}, 1)])
def test_a_commit_service_costs_a_task_and_the_endpoints_that_it_does_not_share(
    query: dict[str, Any] | None, count: int
) -> None:
    content: dict[str, Any] = {"id": "dev", "database": {"kind": "fixed"}, "commit": {"service": True}}
    settings = parse(content | ({"query": query} if query is not None else {}))
    lines = estimate(settings, "us-east-1", Assumptions()).lines
    found = {line.resource: line for line in lines if line.stack == "commit"}
    assert found["Fargate, 1 vCPU, 4 GB"].running == pytest.approx(34.03, abs=0.01)
    endpoints = found[f"{count} interface endpoint{'s' * (count > 1)}"]
    assert endpoints.running == pytest.approx(count * 7.30)
    assert found["SQS, 1 queue"].running == pytest.approx(4.20 + 0.12, abs=0.01)
    assert all(line.paused == 0 for line in found.values())
    assert not [name for name in found if name.startswith("Lambda")]
