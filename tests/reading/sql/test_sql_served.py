"""SQL that a service runs for untrusted clients: parameters, and statements that exhaust resources."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import httpx
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.client import Client, connect
from dormouse.errors import InvalidQuery
from dormouse.reading.sql.workers import Workers
from dormouse.service.running import Runner
from dormouse.service.security import Place
from tests.hostile_statements import HOSTILE, TIME
from tests.serving import (
    ARROW,
    SECONDS_MAX,
    connected,
    eventually,
    http_get,
    http_post,
    metric,
    request,
    runner_of,
    running,
)
from tests.standard import OF_K

ROWS = 100_000
MEMORY = 512 * 1024**2
SPILL = 64 * 1024**2
QUERY_SECONDS = 2.0
ENDLESS_SECONDS = 0.5
"""The limit of statements that need only time, and reach any limit."""
STOP_SECONDS_MAX = 10.0
HEALTH_SECONDS_MAX = 10.0
"""The limit while other tests run on the machine. Without them, an answer takes 0.1 s."""
Served = tuple[str, Workers, Runner]
"""The URL of a service, its workers, and the runner of its statements, which has their time limit."""
ANSWERS = {200, 400, 413, 504}
FEW = (
    "levenshtein", "cross product", "repeat", "rows of megabytes", "list", "string_agg", "backtracking",
    "parentheses", "nested conditions", "long IN", "windows",
)  # fmt: skip


@pytest.fixture(scope="module")
def instance(module_instance: dm.Instance) -> dm.Instance:
    table = module_instance.create_table("t", OF_K)
    table.ingest(pa.table({"k": range(ROWS)}))
    return module_instance


@contextmanager
def _served(instance: dm.Instance, **settings: Any) -> Iterator[Served]:
    """Runs a service with two workers."""
    given = {"sql_workers": 2, "sql_memory_bytes_max": MEMORY, "queue_seconds_max": SECONDS_MAX}
    with running(instance, **given | settings) as server:
        here: Any = server._server.config.app
        yield server.url, here.state.service.sessions.__self__, runner_of(server, Place.STATEMENTS)


@pytest.fixture(scope="module")
def served(instance: dm.Instance) -> Iterator[Served]:
    with _served(instance, seconds_max=QUERY_SECONDS, sql_spill_bytes_max=SPILL) as found:
        yield found


@pytest.fixture(scope="module")
def url(instance: dm.Instance) -> Iterator[str]:
    with _served(instance) as (url, *_):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    with connect(url) as client:
        yield client


def post_sql(url: str, statement: str, **others: Any) -> httpx.Response:
    return http_post(f"{url}/v1/sql", json={"statement": statement, **others}, timeout=SECONDS_MAX)


class Watch:
    """A thread that records the longest response time of `/health`, and the largest memory of a worker."""

    def __init__(self, url: str, workers: Workers) -> None:
        self.health_seconds, self.memory_bytes = 0.0, 0
        self._url, self._workers = url, workers
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.05):
            begun = time.monotonic()
            assert http_get(f"{self._url}/health", timeout=SECONDS_MAX).status_code == 200
            self.health_seconds = max(self.health_seconds, time.monotonic() - begun)
            workers = (*self._workers._idle, *self._workers._lent)
            self.memory_bytes = max(self.memory_bytes, *(worker.grown_bytes for worker in workers), 0)


def _check_hostile(served: Served, name: str) -> None:
    (url, workers, runner), statement = served, HOSTILE[name]
    if name in TIME:
        runner.seconds_max = ENDLESS_SECONDS
    begun, problem = time.monotonic(), None
    with Watch(url, workers) as watch:
        try:
            found = http_post(
                f"{url}/v1/sql", json={"statement": statement}, headers={"Accept": ARROW}, timeout=SECONDS_MAX
            )
            problem = None if found.status_code == 200 else found.json()
        except httpx.RemoteProtocolError:
            pass  # some rows came before it was stopped
        assert time.monotonic() - begun < QUERY_SECONDS + STOP_SECONDS_MAX
        runner.seconds_max = QUERY_SECONDS
        eventually(lambda: post_sql(url, "select 1").status_code == 200)
        text = post_sql(url, "select count(*) as n, max(k) as k from t").text
        assert text == f'{{"n":{ROWS},"k":{ROWS - 1}}}\n'
    assert watch.health_seconds < HEALTH_SECONDS_MAX
    assert watch.memory_bytes <= MEMORY
    if problem is not None:
        assert problem["status"] in ANSWERS or problem["type"] == "urn:dormouse:engine-failed", problem
        assert "\n" not in problem["detail"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FEW)
def test_a_statement_that_exhausts_resources_harms_no_other(served: Served, name: str) -> None:
    _check_hostile(served, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HOSTILE.keys() - set(FEW)))
def test_all_statements_that_exhaust_resources_harm_no_other(served: Served, name: str) -> None:
    _check_hostile(served, name)


@pytest.mark.slow
def test_64_statements_at_once_and_look_ups_meanwhile(instance: dm.Instance) -> None:
    with _served(instance, queries_max=1) as (url, workers, _), ThreadPoolExecutor(64) as threads:
        text = "select count(*) as n from t a, range(20) where a.k < $1"
        answers = [threads.submit(post_sql, url, text, parameters=[n]) for n in range(1, 65)]
        eventually(lambda: metric(url, "dormouse_queries_waiting") > 40)
        found = http_post(f"{url}/v1/tables/t/query", json={"where": {"k": 7}}, timeout=SECONDS_MAX)
        assert found.text == '{"k":7}\n'
        for n, answer in enumerate(answers, 1):
            assert answer.result().text == f'{{"n":{20 * n}}}\n', answer.result().text
        assert len(workers.process_ids) <= 3
        # the metric is updated after the answer
        eventually(lambda: metric(url, "dormouse_queries_running") == 0)


@pytest.mark.slow
def test_the_worker_of_a_disconnected_client_is_freed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, workers, _ = served
    eventually(lambda: len(workers.process_ids) == 3 and not workers._lent)
    # only from here on: workers of earlier tests may be killed if they do not stop in time
    monkeypatch.setattr("dormouse.reading.sql.workers.STOP_SECONDS_MAX", SECONDS_MAX)
    before = set(workers.process_ids)
    with connected(url) as sock:
        sock.sendall(request("/v1/sql", b'{"statement": "select * from t a, t b"}'))
        assert sock.recv(1_000).startswith(b"HTTP/1.1 200 OK")
        assert len(workers._lent) == 1
    eventually(lambda: not workers._lent)
    assert set(workers.process_ids) == before


@pytest.mark.slow
def test_prometheus_metrics_count_ended_workers(served: Served) -> None:
    url, *_ = served
    before = metric(url, "dormouse_sql_workers_ended_total", why="unheeding")
    assert post_sql(url, HOSTILE["levenshtein"]).status_code == 504
    eventually(lambda: metric(url, "dormouse_sql_workers_ended_total", why="unheeding") == before + 1)
    eventually(lambda: metric(url, "dormouse_sql_workers") == 3)


VALUES: list[Any] = [
    7, 2**70, -1.5, math.inf, None, True, "é'\"", b"\x00\xff", [1, None], date(2024, 2, 29), Decimal("0.10"),
    datetime(2024, 1, 1, 12, 30, 0, 5, UTC), datetime(2024, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_served_parameters_have_the_same_values_as_in_python(
    instance: dm.Instance, client: Client, value: Any
) -> None:
    expected = instance.sql("select $1 as v", [value]).read_all()
    assert client.sql("select $1 as v", [value]).read_all().equals(expected)
    assert client.sql("select $v as v", {"v": value}).read_all().equals(expected)


def test_parameters_select_the_files_that_are_read(instance: dm.Instance, client: Client) -> None:
    statement = "select count(*) as n from t where k in (select unnest($1)) or k = $2"
    assert client.sql(statement, [[1, 2], 5]).read_all().to_pylist() == [{"n": 3}]
    assert client.explain_sql("select * from t where k = $k", {"k": -1})["t"].files == 0
    assert client.explain_sql("select * from t where k = $k", {"k": 1})["t"].files == 1
    assert client.table("t").sql("select k from t where k = ?", (3,)).read_all().to_pylist() == [{"k": 3}]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([], r"\$?1"),
        ([1, 2], "parameter"),
        ({"x": 1}, "parameter"),
        ([{"bytes": "?"}], r"parameter \$1 is .*use .*\"timestamp\""),
        ([{"bytes": "AA==", "date": "x"}], "types that JSON lacks, use"),
        ([{"date": 5}], "types that JSON lacks, use"),
        ([{"decimal": "x"}], "types that JSON lacks, use"),
        ({"a b": 1}, "cannot be a parameter's name"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(url: str, parameters: Any, message: str) -> None:
    found = post_sql(url, "select $1 as v", parameters=parameters)
    assert (found.status_code, found.json()["type"]) == (400, "urn:dormouse:invalid-query")
    with pytest.raises(InvalidQuery, match=message):
        raise InvalidQuery(found.json()["detail"])


@pytest.mark.slow
def test_parameters_are_a_list_or_an_object(url: str, client: Client) -> None:
    assert post_sql(url, "select 1", parameters="x").json()["type"] == "urn:dormouse:invalid-input"
    with pytest.raises(InvalidQuery, match="must be a list"):
        client.sql("select 1", "x")
    with pytest.raises(InvalidQuery, match="which SQL has no type for"):
        client.sql("select $1", [object()])
