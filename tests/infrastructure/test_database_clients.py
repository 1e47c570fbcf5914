"""Tests of the clients, besides the lambdas, that the settings allow to connect to the database."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dormouse.errors import InvalidInput
from tests.assembly import CONFIGURATIONS, Assembly, settings, synthesize
from tests.support.settings import parse

All = Callable[[str], Assembly]
PROXY_PORT, PORT = 5432, 5433


def rules(assembly: Assembly) -> list[tuple[str, int, int]]:
    """Returns (source, first port, last port) of each inbound rule for clients."""
    found: list[tuple[str, int, int]] = []
    for one in assembly.resources("AWS::EC2::SecurityGroup", "AWS::EC2::SecurityGroupIngress"):
        if one.stack == "database":
            for rule in one.properties.get("SecurityGroupIngress", [one.properties]):
                if rule.get("Description") == "clients":
                    client = rule.get("CidrIp") or rule["SourceSecurityGroupId"]
                    found.append((client, rule["FromPort"], rule["ToPort"]))
    return sorted(found)


def test_only_clients_of_the_settings_may_connect(synthesized: All) -> None:
    settings = CONFIGURATIONS["steps"]().database
    named = [*settings.client_cidrs, *settings.client_security_groups]
    assert rules(synthesized("steps")) == sorted((one, PROXY_PORT, PROXY_PORT) for one in named) != []
    assert rules(synthesized("dev")) == rules(synthesized("prod")) == []


@pytest.mark.slow
def test_clients_of_a_proxy_may_also_connect_to_the_clusters_of_row_tables(tmp_path: Path) -> None:
    """Clusters of row tables have no proxy, and so another port than the proxy.

    Each client has one rule for the range of both ports, because a security group has at most 60 rules. The
    host for access and the query service have the same rights.
    """
    database = {"kind": "serverless", "min_acu": 1, "proxy": True, "client_cidrs": ["10.30.0.0/16"]}
    rows = {"databases": 1, "own_clusters": True}
    configuration = settings("minimal", database=database, rows=rows, access={}, query={})
    found = synthesize(configuration, tmp_path / "assembly", checked=False)
    assert rules(found) == [("10.30.0.0/16", PROXY_PORT, PORT)]
    for kind in ("AWS::EC2::SecurityGroupIngress", "AWS::EC2::SecurityGroupEgress"):
        ways = {
            one.stack: (one.properties["FromPort"], one.properties["ToPort"])
            for one in found.resources(kind)
            if one.stack in ("access", "query") and "the database" in one.properties["Description"]
        }
        assert ways == {"access": (PROXY_PORT, PORT), "query": (PROXY_PORT, PORT)}


@pytest.mark.parametrize(
    ("database", "line"),
    [
        ({"client_cidrs": ["10.0.0.0/8", "10.1.0.0/16"]}, "10.1.0.0/16 overlaps 10.0.0.0/8: leave one out"),
        ({"client_cidrs": ["10.1.0.0/16", "10.1.0.0/16"]}, "each may be listed only once"),
        ({"client_cidrs": ["8.8.8.0/24"]}, "it must be private"),
        ({"client_security_groups": ["default"]}, "client_security_groups"),
        ({"client_cidrs": [f"10.{one}.0.0/16" for one in range(41)]}, "there are 41 clients"),
    ],
)
def test_invalid_networks_are_one_line(database: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse({"id": "dev", "database": {"kind": "serverless", **database}})
    assert line in str(refused.value) and "\n" not in str(refused.value)
