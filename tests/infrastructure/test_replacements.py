"""No setting that a deploy may change makes CloudFormation replace a resource that keeps its name.

CloudFormation creates the new resource first, and AWS refuses a second one of the same name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from dormouse.settings.deployment import DeploymentSettings
from tests.assembly import EXISTING_VPC, Assembly, synthesize
from tests.support.settings import parse

SCHEMAS = Path(str(distribution("cfn-lint").locate_file("cfnlint/data/schemas")))
ARN = "arn:aws:{}:eu-central-1:123456789012:{}"
UUID = "12345678-1234-1234-1234-12345678901"
IMAGE = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/tools/dormouse:1.0"
GROUPS = ("sg-0123456789abcdef0", "sg-0123456789abcdef1")
TEAMS = {"teams_tenant": f"{UUID}2", "teams_team": f"{UUID}2"}
OWN: tuple[dict[str, Any], dict[str, Any]] = (
    {
        "architecture": "arm64", "protected": False, "deploy_paused": False, "tags": {"team": "old"},
        "iam": {"role_path": "/", "role_prefix": "old-", "policies": ["reader"]},
        "network": {"zones": 2, "flow_log_days": 30},
        "database": {"kind": "serverless", "min_acu": 0.5, "max_acu": 4, "proxy": True},
        "commit": {"service": True}, "garbage": {}, "compaction": {"engine": "emr-serverless"},
        "maintenance": {},
        "query": {}, "rows": {"databases": 2, "own_clusters": True}, "access": {}, "pause": {},
        "monitoring": {
            "topic_arn": ARN.format("sns", "old"), "warning_topic_arn": ARN.format("sns", "older"),
            "slack_workspace": "T0123ABCD", "slack_channel": "C0123ABCD", "budget_usd_month": 100,
            **TEAMS, "teams_channel": "19%3aaaa%40thread.tacv2",
        },
        "backup": {}, "audit": {"events": "write"},
    },
    {
        "architecture": "x86_64", "protected": True, "deploy_paused": True, "tags": {"team": "new"},
        "iam": {
            "role_path": "/new/", "role_prefix": "new-", "policies": ["operator", "reader"],
            "permissions_boundary": "arn:aws:iam::123456789012:policy/bound",
        },
        "network": {"zones": 3, "flow_log_days": 60},
        "storage": {
            "payload_days": 91, "payloads_hot_seconds": 30_000, "jobs_days": 31, "restore_days": 4,
            "access_log_days": 91, "incomplete_upload_days": 4,
        },
        "database": {
            "kind": "serverless", "min_acu": 1, "max_acu": 8, "proxy": True, "engine_version": "17.9",
            "minor_upgrades": False, "backup_days": 8, "idle_session_seconds": 301, "log_days": 60,
            "readers": 1, "client_security_groups": GROUPS, "client_cidrs": ["10.50.0.0/16"],
            "storage": "io-optimized", "insights": True, "backup_window": "03:00-03:30",
            "maintenance_window": "sun:05:00-sun:05:30",
        },
        "commit": {
            "service": True, "service_cpu": 2048, "service_memory_gb": 8, "log_days": 60, "image": IMAGE,
            "queues": 2, "concurrency": 11, "batch_size": 501, "batching_window_seconds": 2,
            "memory_mb": 1025, "timeout_seconds": 61, "receives_max": 51, "retention_days": 13,
        },
        "garbage": {"every_minutes": 16, "memory_mb": 513, "timeout_seconds": 301},
        "compaction": {
            "engine": "emr-serverless", "every_minutes": 16, "jobs_max": 20_001, "run_minutes_max": 361,
            "memory_mb": 1025, "timeout_seconds": 301, "log_days": 60, "vcpu_max": 65, "idle_minutes": 6,
            "worker_vcpu": 8, "release": "emr-spark-8.1.0",
        },
        "maintenance": {"every_minutes": 61, "memory_mb": 513, "timeout_seconds": 301},
        "query": {
            "cpu": 2048, "memory_gb": 8, "disk_gb": 21, "tasks_min": 2, "tasks_max": 5, "cpu_percent": 61,
            "requests_minute": 601, "queries_max": 17, "rows_max": 10, "bytes_max": 1_000,
            "seconds_max": 301, "client_cidrs": ["10.50.0.0/16"], "client_security_groups": GROUPS,
            "image": IMAGE, "log_days": 60,
        },
        "rows": {"databases": 3, "own_clusters": True, "max_acu": 5, "job_threads": 5},
        "access": {}, "pause": {"drain_seconds": 901},
        "monitoring": {
            "topic_arn": ARN.format("sns", "new"), "warning_topic_arn": ARN.format("sns", "newer"),
            "slack_workspace": "T0123ABCE", "slack_channel": "C0123ABCE", "budget_usd_month": 101,
            "oldest_message_seconds_max": 901, "connections_max": 501, "orphaned_gb_max": 101,
            "payload_backlog_days_max": 4, **TEAMS, "teams_channel": "19%3abbb%40thread.tacv2",
        },
        "backup": {"retention_days": 4, "hour_utc": 4, "objects": False},
        "audit": {"events": "all", "log_days": 91},
    },
)  # fmt: skip
"""Two instances in VPCs of their own, which differ in each setting that needs only a deploy."""

EXISTING: tuple[dict[str, Any], dict[str, Any]] = (
    {
        "network": EXISTING_VPC,
        "database": {"kind": "fixed", "proxy": True},
        "compaction": {"engine": "emr-ec2-steps", "endpoints": "create"},
        "query": {
            "endpoints": "create", "host": "query.example.org",
            "certificate_arn": ARN.format("acm", f"certificate/{UUID}2"),
        },
        "access": {"endpoints": "create"},
    },
    {
        "network": {
            **EXISTING_VPC,
            "subnet_ids": ["subnet-0123456789abcdef2", "subnet-0123456789abcdef3"],
            "availability_zones": ["eu-central-1b", "eu-central-1c"],
            "route_table_ids": ["rtb-0123456789abcdef2", "rtb-0123456789abcdef3"],
        },
        "database": {"kind": "fixed", "proxy": True, "instance_class": "r8g.xlarge", "readers": 1},
        "compaction": {
            "engine": "emr-ec2-steps", "endpoints": "create", "instance_types": ["m8g.xlarge"],
            "instances_max": 11, "idle_minutes": 16,
        },
        "query": {
            "endpoints": "create", "host": "query.example.org",
            "certificate_arn": ARN.format("acm", f"certificate/{UUID}3"),
        },
        "access": {"endpoints": "create"},
    },
)  # fmt: skip
SLEEPY = {"kind": "serverless", "min_acu": 0}
KEYS: tuple[dict[str, Any], dict[str, Any]] = (
    {
        "backup": {},
        "storage": {"key_arn": ARN.format("kms", f"key/{UUID}2")},
        "database": SLEEPY | {"auto_pause_seconds": 300},
    },
    {
        "backup": {},
        "storage": {"key_arn": ARN.format("kms", f"key/{UUID}3")},
        "database": SLEEPY | {"auto_pause_seconds": 301},
    },
)
"""A change that replaces the vault: its backups keep their key, and the bucket's new ones get another."""

PAIRS = {"own": OWN, "existing": EXISTING, "keys": KEYS}
SWITCHES = frozenset(
    {
        "database.kind", "database.proxy", "network.s3_endpoint", "query.endpoints", "access.endpoints",
        "compaction.endpoints", "commit.endpoints", "commit.service", "rows.own_clusters", "network.vpc_id",
    }
)  # fmt: skip
"""Settings that create or delete resources, so that nothing is replaced."""


def place(changes: dict[str, Any]) -> DeploymentSettings:
    return parse({"id": "replaced", "account": "123456789012", "region": "eu-central-1", **changes})


@cache
def schema(kind: str) -> dict[str, Any]:
    """Returns CloudFormation's schema of a type of resources; empty for a custom resource."""
    listed = json.loads((SCHEMAS / "providers/eu-central-1.json").read_text("utf-8"))
    name = listed.get(kind)
    found: dict[str, Any] = json.loads((SCHEMAS / f"resources/{name}.json").read_text()) if name else {}
    return found


def fixed(kind: str) -> set[str]:
    """Returns the properties of a type whose change replaces the resource."""
    return {path.split("/")[2] for path in schema(kind).get("createOnlyProperties", ())}


def names(kind: str) -> set[str]:
    """Returns the properties of a type that must be unique, such as a name."""
    ids = {path.split("/")[2] for path in schema(kind).get("primaryIdentifier", ())}
    read_only = {path.split("/")[2] for path in schema(kind).get("readOnlyProperties", ())}
    return {name for name in fixed(kind) if name in ids or name.endswith("Name")} - read_only


def clashes(before: Assembly, after: Assembly) -> Iterator[str]:
    """Yields resources that are replaced, but whose literal name stays."""
    old = {str(one): one for one in before.resources()}
    for new in after.resources():
        was = old.get(str(new))
        if was is None or was.type != new.type:
            continue
        changed = {key for key in fixed(new.type) if was.properties.get(key) != new.properties.get(key)}
        kept = {key for key in names(new.type) & new.properties.keys() if key not in changed}
        if changed and kept and not changed & names(new.type):
            yield f"{new}: {', '.join(sorted(changed))} change, but {', '.join(sorted(kept))} stays"


@pytest.mark.slow
@pytest.mark.parametrize("pair", list(PAIRS))
def test_a_replaced_resource_gets_another_name(pair: str, tmp_path: Path) -> None:
    before, after = (
        synthesize(place(changes), tmp_path / str(number), checked=False)
        for number, changes in enumerate(PAIRS[pair])
    )
    assert list(clashes(before, after)) == []


def leaves(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the paths of the settings that need only a deploy."""
    for name, field in model.model_fields.items():
        inner = list(models(field.annotation))
        for one in inner:
            yield from leaves(one, (*path, name))
        change = field.json_schema_extra.get("change") if isinstance(field.json_schema_extra, dict) else None
        if not inner and change == "deploy":
            yield ".".join((*path, name))


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from models(one)


def value(settings: DeploymentSettings, path: str) -> Any:
    found: Any = settings
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def test_each_setting_that_needs_a_deploy_differs_in_a_pair() -> None:
    pairs = [(place(before), place(after)) for before, after in PAIRS.values()]
    same = {
        path
        for path in set(leaves(DeploymentSettings)) - SWITCHES
        if all(value(before, path) == value(after, path) for before, after in pairs)
    }
    assert same == set()
