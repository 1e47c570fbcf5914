"""The right to run SQL that writes. Tokens without it, and jobs, change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.client import connect
from tests.every_door import of_arrow
from tests.serving import http_get, http_post, serving, with_one_row
from tests.support.api import Instance

TOKENS = """
reader query readreadread
writer ingest,compact,query writewritewrite
all * allallallall
payloads payloads,query payloadspayloads
editor sql_writes editeditedit
"""
OWN = "ownownownown"
STATEMENTS = [
    "insert into t values (2, 'new')",
    "delete from t",
    "truncate t",
    "update t set v = 'gone'",
    "merge into t using (select 1 as k) s using (k) when matched then delete",
]
Row = dict[str, Any]


@pytest.fixture(scope="module")
def instance(module_instance: Instance) -> Instance:
    return with_one_row(module_instance)


@pytest.fixture(scope="module")
def url(instance: Instance, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tokens: Path = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    with serving(instance, token=OWN, job_threads=1, job_tokens_file=tokens) as url:
        yield url


def execute(url: str, token: str, statement: str, **more: Any) -> tuple[int, Row]:
    found = http_post(
        f"{url}/v1/execute",
        json={"statement": statement, **more},
        headers={"authorization": f"Bearer {token}"} if token else {},
        timeout=60,
    )
    return found.status_code, found.json()


def rows(instance: Instance) -> list[Row]:
    return of_arrow(instance.table("t").query())


@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.parametrize("token", ["readreadread", "writewritewrite", "allallallall", "payloadspayloads"])
def test_a_token_without_the_right_changes_nothing(
    instance: Instance, url: str, token: str, statement: str
) -> None:
    before = rows(instance)
    for more in ({}, {"dry_run": True}, {"edit_id": "x"}):
        status, problem = execute(url, token, statement, **more)
        assert (status, problem["type"]) == (403, "urn:dormouse:job-forbidden")
        assert "SQL that writes" in problem["detail"]
    assert rows(instance) == before


def test_without_a_token_nothing_is_changed(instance: Instance, url: str) -> None:
    before = rows(instance)
    assert execute(url, "", STATEMENTS[1])[0] == 401
    assert execute(url, "editeditedi", STATEMENTS[1])[0] == 401
    assert rows(instance) == before


@pytest.mark.parametrize("token", ["editeditedit", OWN])
def test_a_token_with_the_right_writes_once_for_each_id(instance: Instance, url: str, token: str) -> None:
    insert = "insert into t values ($1, 'by token')"
    with connect(url, token) as client:
        would = client.execute(insert, [50], dry_run=True)
        assert (would.inserted, would.applied) == (1, False)
        before = len(rows(instance))
        assert client.execute(insert, [50], edit_id=f"id {token}").applied
        assert not client.execute(insert, [50], edit_id=f"id {token}").applied
        assert len(rows(instance)) == before + 1
        assert client.execute("delete from t where k = 50").applied
    assert len(rows(instance)) == before


def test_the_right_to_write_starts_no_jobs(url: str) -> None:
    with connect(url, "editeditedit") as client, pytest.raises(dm.errors.JobForbidden):
        client.jobs.start("query", {"statement": "select 1"})


@pytest.mark.parametrize("statement", STATEMENTS)
def test_no_job_and_no_query_writes(instance: Instance, url: str, statement: str) -> None:
    before = rows(instance)
    with connect(url, OWN) as client:
        for kind in ("execute", "sql_writes", "update", "merge"):
            with pytest.raises(dm.errors.InvalidInput, match="none of"):
                client.jobs.start(kind, {"statement": statement})
        for ask in (
            lambda: client.jobs.start("query", {"statement": statement}),
            lambda: client.sql(statement).read_all(),
            lambda: client.explain_sql(statement),
            lambda: client.sql(f"explain {statement}").read_all(),
        ):
            with pytest.raises(dm.errors.InvalidQuery, match=r"instance\.execute"):
                ask()
    assert rows(instance) == before


def test_a_service_that_takes_no_jobs_does_not_write(instance: Instance) -> None:
    before = rows(instance)
    with serving(instance, token=OWN) as url:
        assert execute(url, OWN, STATEMENTS[1])[0] == 404
        described = http_get(f"{url}/openapi.json").json()
        assert "/v1/execute" not in described["paths"]
    assert rows(instance) == before


def test_the_api_describes_the_path(url: str) -> None:
    described = http_get(f"{url}/openapi.json").json()["paths"]["/v1/execute"]["post"]
    assert {"200", "400", "401", "403", "409", "429", "504"} <= described["responses"].keys()


@pytest.fixture(scope="module")
def of_one_worker(instance: Instance) -> Iterator[str]:
    with serving(instance, job_threads=0, sql_workers=1) as url:
        yield url


def test_statements_are_parsed_in_a_worker(of_one_worker: str) -> None:
    with connect(of_one_worker) as client:
        assert client.execute("insert into t values (?, ?)", [60, "it's; --"], dry_run=True).inserted == 1
        with pytest.raises(dm.errors.InvalidQuery, match="not COPY"):
            client.execute("copy t to '/tmp/x'")


def test_statements_run_in_the_only_worker(instance: Instance, of_one_worker: str) -> None:
    """A statement reads a source and the table, one after the other: no part of it waits for another."""
    with connect(of_one_worker) as client:
        before = rows(instance)
        client.execute("insert into t select k + 70, v from t where k = 1")
        assert client.execute("update t set v = v || '!' where k > 70 or v is null").updated == 1
        merged = client.execute(
            "merge into t using (select k + 70 as k, 'x' as v from t where k < 3 union all select 72, 'y') s "
            "using (k) when matched then update set v = t.v || s.v when not matched then insert by name"
        )
        assert (merged.updated, merged.inserted) == (1, 1)
        assert {row["k"]: row["v"] for row in rows(instance) if row["k"] > 70} == {71: "old!x", 72: "y"}
        assert client.execute("delete from t where k > 70 and v is not null").deleted == 2
    assert rows(instance) == before


def test_limits_apply_to_statements(instance: Instance) -> None:
    with serving(instance, job_threads=0, body_bytes_max=1_000) as url:
        assert execute(url, "", f"delete from t where v = '{'x' * 2_000}'")[0] == 413
