"""Expressions of UPDATE and MERGE that need more time or memory than there is, or read what they must not.

Each ends in time, in a process of its own, and the service then writes as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

import dormouse as dm
from dormouse.client import connect
from dormouse.service.app import Server
from dormouse.service.security import Place
from tests.serving import computes_nothing, eventually, runner_of, running, with_one_row
from tests.support.api import Instance

SECONDS_MAX = 2.0
MEMORY_BYTES_MAX = 512 * 1024**2
TIME = {
    "rows": "list_reduce(range(k, 90000000), (a, b) -> (hash(md5((a + b)::varchar)) % 9)::bigint)::varchar",
    "constants": "levenshtein(repeat('ab', 60000), repeat('ba', 60000))::varchar",
    "a pattern": "regexp_matches(v, repeat('(a|b){0,900}', 900))::varchar",
}
MEMORY = {
    "repeat": "repeat(v, 1000000000000)",
    "range": "range(k + 1000000000000)::varchar",
    "lists": "flatten(list_transform(range(k + 100000), x -> range(100000)))::varchar",
    "doubled text": "".join(["replace("] * 6) + "repeat(v, 30)" + ", 'o', repeat(v, 30))" * 6,
}
READING = {
    "getenv('HOME')": "getenv",
    "read_text('/etc/hostname')": "read_text",
    "(select content from read_text('/etc/hostname'))": "reads files",
    "getvariable('x')": "getvariable",
    "current_setting('temp_directory')": "current_setting",
    "current_user": "current_user",
    "query('select 1')": "query",
}
UPDATES = [
    "update t set v = {} where k = 1",
    "merge into t using (select 1 as j) s on t.k = s.j when matched then update set v = {}",
    "update t set v = 'x' where {} is not null",
    "update t set v = {}",
]
HOSTILE = TIME | MEMORY


@pytest.fixture(scope="module")
def instance(module_instance: Instance) -> Instance:
    return with_one_row(module_instance)


@pytest.fixture(scope="module")
def server(instance: Instance) -> Iterator[Server]:
    limits = {"seconds_max": SECONDS_MAX, "sql_memory_bytes_max": MEMORY_BYTES_MAX}
    with running(instance, job_threads=0, sql_workers=1, **limits) as server:
        yield server


@pytest.fixture(scope="module")
def url(server: Server) -> str:
    return server.url


@pytest.mark.few(2)
@pytest.mark.parametrize("statement", UPDATES)
@pytest.mark.parametrize("expression", HOSTILE.values(), ids=HOSTILE)
def test_an_expression_that_needs_too_much_harms_nothing(
    instance: Instance, server: Server, monkeypatch: pytest.MonkeyPatch, expression: str, statement: str
) -> None:
    def writes_again() -> bool:
        with suppress(dm.errors.InstanceError):  # a busy machine may not answer in time
            return client.execute("update t set v = v || '' where k = 1").updated == 1
        return False

    with connect(server.url) as client:
        with monkeypatch.context() as patch, pytest.raises(dm.errors.DormouseError):
            if expression in TIME.values():  # which reaches any limit
                patch.setattr(runner_of(server, Place.STATEMENTS), "seconds_max", 0.5)
            client.execute(statement.format(expression))
        eventually(computes_nothing)
        eventually(writes_again)
    assert instance.table("t").query().read_all().to_pylist() == [{"k": 1, "v": "old"}]


@pytest.mark.parametrize("expression", READING)
def test_an_expression_reads_nothing_of_the_service(instance: Instance, url: str, expression: str) -> None:
    with connect(url) as client, pytest.raises(dm.errors.InvalidQuery, match=READING[expression]):
        client.execute(f"update t set v = {expression} where k = 1")
