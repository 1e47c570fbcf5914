"""Tests of access to the query service, of settings that it refuses, and of a database that is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import dormouse as dm
from tests.serving import eventually, http_get, serving
from tests.standard import OF_KEYS
from tests.support.settings import load_service_settings

TOKEN = "s3cret-token"  # noqa: S105


@pytest.fixture(scope="module")
def instance(module_instance: dm.Instance) -> dm.Instance:
    return module_instance


@pytest.fixture(scope="module")
def url(instance: dm.Instance) -> Iterator[str]:
    with serving(instance) as url:
        yield url


def test_all_paths_except_health_require_the_token(
    instance: dm.Instance, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), serving(instance, token=TOKEN) as url:
        for given in (None, "s3cret", "s3cret-tokens", "x", "é"):
            headers = {} if given is None else {"authorization": f"Bearer {given}".encode()}
            for path in ("/v1/tables", "/metrics", "/health/ready", "/nix"):
                found = http_get(f"{url}{path}", headers=headers)
                assert (found.status_code, found.json()["type"]) == (401, "urn:dormouse:unauthorized")
                assert found.headers["www-authenticate"].startswith("Bearer")
        assert http_get(f"{url}/health").status_code == 200
        basic = {"authorization": "Basic s3cret-token"}
        assert http_get(f"{url}/v1/tables", headers=basic).status_code == 401
        right = {"authorization": "bearer s3cret-token", "host": "anything.example"}
        assert http_get(f"{url}/v1/tables", headers=right).status_code == 200
        assert http_get(f"{url}/health/ready", headers=right).json() == {"status": "ready"}
    assert "s3cret" not in caplog.text
    assert "GET /v1/tables 200 rows=0" in caplog.text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("127.0.0.1:1", 200), ("127.9.9.9", 200), ("[::1]:5", 200), ("LOCALHOST:5", 200),
        ("evil.example", 421), ("127.0.0.1.evil.example", 421), ("", 421), ("[::1", 200), ("10.0.0.1", 421),
    ],
)  # fmt: skip
def test_a_service_without_a_token_accepts_only_local_host_names(url: str, host: str, status: int) -> None:
    assert http_get(f"{url}/v1/tables", headers={"host": host}).status_code == status


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"host": "0.0.0.0"}, "give a token"),  # noqa: S104
        ({"host": "service.example"}, "give a token"),
        ({"token": "two words"}, "token must be of"),
        ({"token": "a", "token_file": Path("b")}, "contradict"),
        ({"tls_key": Path("k")}, "go together"),
        ({"port": 70_000}, "DORMOUSE_SERVICE_PORT"),
        ({"queries_max": 0}, "DORMOUSE_SERVICE_QUERIES_MAX"),
        ({"seconds_max": math.inf}, "DORMOUSE_SERVICE_SECONDS_MAX"),
    ],
)
def test_invalid_settings_are_named(given: dict[str, Any], word: str) -> None:
    with pytest.raises(dm.errors.InvalidInput, match=word):
        load_service_settings(**given)


@pytest.mark.parametrize("name", ["DORMOUSE_SERVICE_TOKNE", "dormouse_service_Tokens"])
def test_an_unknown_variable_is_refused_with_the_nearest_setting(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "secret")
    with pytest.raises(dm.errors.InvalidInput, match=f"^{name} is not a setting .* DORMOUSE_SERVICE_TOKEN$"):
        load_service_settings()


@pytest.mark.slow
def test_a_database_that_is_unreachable_for_a_while(
    new_database: Callable[[str], str],
    template_database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests get status 503 during that time. Later they get answers again without a restart of the
    service.
    """
    monkeypatch.setenv("DORMOUSE_CONNECTION_WAIT_SECONDS_MAX", "1")
    dsn = new_database(template_database)
    name = conninfo_to_dict(dsn)["dbname"]
    with (
        dm.connect(dsn, tmp_path.as_uri()) as instance,
        psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True) as conn,
    ):
        instance.create_table("t", OF_KEYS)
        with serving(instance) as url:
            paths = [("GET", "/v1/tables"), ("GET", "/v1/tables/t"), ("GET", "/health/ready")]
            paths += [("POST", "/v1/tables/t/query"), ("POST", "/v1/tables/t/plan")]

            def statuses() -> set[int]:
                json_of = {"POST": {}}
                return {
                    httpx.request(method, f"{url}{path}", json=json_of.get(method), timeout=60).status_code
                    for method, path in paths
                }

            assert statuses() == {200}
            conn.execute(f'alter database "{name}" with allow_connections false')
            conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,))
            assert statuses() == {503}
            assert http_get(f"{url}/health").status_code == 200
            conn.execute(f'alter database "{name}" with allow_connections true')
            eventually(lambda: statuses() == {200})
