"""The settings of the query service's stack: sizes of Fargate, allowed clients, and messages for mistakes."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from dormouse.errors import InvalidInput
from dormouse.settings.database import CPU_MEMORY_GB, QuerySettings
from tests.assembly import EXISTING_VPC
from tests.support.settings import parse

CERTIFICATE = "arn:aws:acm:eu-west-1:123456789012:certificate/12345678-1234-1234-1234-123456789012"


def parsed(**query: Any) -> QuerySettings:
    found = parse({"id": "dev", "query": query}).query
    assert found is not None
    return found


def lines(text: str) -> list[str]:
    with pytest.raises(InvalidInput) as caught:
        parse(tomllib.loads(f'id = "dev"\n[query]\n{text}'))
    return [line.removeprefix("settings: ") for line in str(caught.value).split("\n")]


def test_an_empty_table_enables_the_service_with_defaults() -> None:
    query = parsed()
    assert (query.cpu, query.memory_mb, query.port) == (1_024, 4_096, 80)
    assert query.url("dev") == "http://query.dev.dormouse.internal"


def test_exactly_the_pairs_of_cpu_and_memory_of_fargate_are_accepted() -> None:
    for cpu, sizes in CPU_MEMORY_GB.items():
        for memory_gb in (0.5, 1, 2, 3, 4, 8, 9, 16, 17, 18, 20, 30, 31, 32, 40, 60, 61, 64, 120):
            if memory_gb in sizes:
                assert parsed(cpu=cpu, memory_gb=memory_gb).memory_mb == memory_gb * 1_024
            else:
                with pytest.raises(InvalidInput, match=rf"memory_gb = .*: with cpu = {cpu} Fargate has "):
                    parsed(cpu=cpu, memory_gb=memory_gb)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "cpu = 256\nmemory_gb = 4",
            "query.memory_gb = 4: with cpu = 256 Fargate has 0.5, 1 or 2 GB of memory",
        ),
        ("cpu = 1024\nmemory_gb = 1", "query.memory_gb = 1: with cpu = 1024 Fargate has 2 to 8 GB of memory"),
        (
            "cpu = 8192\nmemory_gb = 18",
            "query.memory_gb = 18: with cpu = 8192 Fargate has 16 to 60 GB of memory, in steps of 4",
        ),
        ("cpu = 1000", "query.cpu = 1000: it must be 256, 512, 1024, 2048, 4096, 8192 or 16384"),
        ("tasks_min = 5", "query.tasks_max: it must be tasks_min or more, which is 5"),
        (f'certificate_arn = "{CERTIFICATE}"', "query.certificate_arn = "),
        (
            'client_cidrs = ["0.0.0.0/0"]',
            'query.client_cidrs.0 = "0.0.0.0/0": it must be a private IPv4 network of /8',
        ),
        (
            'client_cidrs = ["8.8.8.0/24"]',
            'query.client_cidrs = ["8.8.8.0/24"]: 8.8.8.0/24: it must be private: within 10.0.0.0/8, ',
        ),
        (
            'client_cidrs = ["10.1.2.3/16"]',
            'query.client_cidrs = ["10.1.2.3/16"]: 10.1.2.3/16: the address is inside a network',
        ),
        (
            'client_security_groups = ["sg-0a1b2c3d", "sg-0a1b2c3d"]',
            'query.client_security_groups = ["sg-0a1b2c3d", "sg-0a1b2c3d"]: each may be listed only once',
        ),
        (
            'image = "docker.io/library/dormouse:1"',
            'query.image = "docker.io/library/dormouse:1": it must be an image in ECR',
        ),
        ('host = "Query"', 'query.host = "Query": it must be a name in the DNS'),
        ("disk_gb = 10", "query.disk_gb = 10: it must be a whole number, 20 to 200"),
    ],
)
def test_a_mistake_is_reported_in_one_line_with_the_allowed_values(text: str, line: str) -> None:
    (found,) = lines(text)
    assert found.startswith(line)


def test_more_clients_than_a_security_group_allows_are_refused() -> None:
    cidrs = [f"10.{number}.0.0/16" for number in range(41)]
    assert parsed(client_cidrs=cidrs[:40]).client_cidrs == tuple(cidrs[:40])
    with pytest.raises(InvalidInput, match="there are 41 clients"):
        parsed(client_cidrs=cidrs)


@pytest.mark.parametrize("seconds", [1, 300, 3_600])
def test_an_idle_connection_outlasts_a_query(seconds: int) -> None:
    assert seconds < parsed(seconds_max=seconds).idle_seconds <= 4_000


def test_with_a_certificate_clients_speak_https() -> None:
    query = parsed(certificate_arn=CERTIFICATE, host="query.example.org")
    assert (query.url("dev"), query.port) == ("https://query.example.org", 443)


@pytest.mark.parametrize("endpoints", ["create", "existing"])
def test_endpoints_of_an_existing_vpc_must_be_chosen(endpoints: str) -> None:
    """Chosen without need, they would take over the names of these services for everything in the VPC."""
    document = {"id": "dev", "network": EXISTING_VPC, "query": {}}
    with pytest.raises(InvalidInput, match=r'query\.endpoints: it must be "create" or "existing"'):
        parse(document)
    found = parse({**document, "query": {"endpoints": endpoints}})
    assert found.query is not None and found.query.endpoints == endpoints
