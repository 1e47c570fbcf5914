"""Abandoned statements stop during planning and during DuckDB's computation."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import DormouseError
from dormouse.reading.sql import statements
from dormouse.reading.sql.engine import LocalSession
from dormouse.reading.sql.narrowing import Narrowed
from dormouse.reading.sql.table_files import TableFiles
from tests.serving import SECONDS_MAX, computes_nothing, connected, eventually, metric, request, serving
from tests.standard import OF_KEYS
from tests.support.reading import Interruption

NUMBERS = "range(1000000)"
# thousands of years of counting before the first row
HEAVY = f"select count(*) from {NUMBERS} a(i), {NUMBERS} b(j), {NUMBERS} c(k) where i * j <> k + 1"
# rows at once, and then none in any reasonable time
SEARCH = "select i from range(1000000000000) a(i) where i < 1000000 or i % 3 = 5"
FEW_FOUND = "select i from range(1000000000000) a(i) where i < 10 or i % 3 = 5"
INTERRUPTED = "the query was interrupted"


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event that is set when a statement is about to run."""
    begun, rows = threading.Event(), LocalSession.rows

    def watched(*given: Any) -> Any:
        begun.set()
        return rows(*given)

    monkeypatch.setattr(LocalSession, "rows", watched)
    return begun


@pytest.fixture(scope="module")
def instance(module_instance: dm.Instance) -> dm.Instance:
    table = module_instance.create_table("t", OF_KEYS)
    table.ingest(pa.table({"key": [1, 2, 3]}))
    return module_instance


def test_a_reader_that_waits_for_the_first_row_can_be_interrupted(
    instance: dm.Instance, computing: threading.Event
) -> None:
    interruption = Interruption()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(instance.table("t").sql, HEAVY, interruption=interruption)
        assert computing.wait(SECONDS_MAX)
        assert not waiting.done()
        interruption.set()
        with pytest.raises(DormouseError, match=INTERRUPTED):
            waiting.result(SECONDS_MAX)
    del waiting  # the interruption may be kept
    eventually(computes_nothing)


@pytest.fixture
def ctrl_c(computing: threading.Event) -> Iterator[None]:
    """Sends Ctrl-C when a statement runs."""

    def press() -> None:
        assert computing.wait(SECONDS_MAX)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    yield
    pressing.join()


@pytest.mark.few(1)
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("statement", [HEAVY, f"explain analyze {HEAVY}", SEARCH, FEW_FOUND])
@pytest.mark.parametrize("restarts", [False, True], ids=["", "calls begin anew"])
def test_ctrl_c_ends_the_computation(instance: dm.Instance, statement: str, restarts: bool) -> None:
    """Holds even with a library, such as Polars, that restarts calls which a signal interrupts."""
    signal.siginterrupt(signal.SIGINT, not restarts)
    try:
        with pytest.raises(KeyboardInterrupt):
            instance.sql(statement).read_all()
    finally:
        signal.siginterrupt(signal.SIGINT, True)
    eventually(computes_nothing)


@pytest.mark.slow
def test_dropping_a_reader_ends_its_computation(instance: dm.Instance) -> None:
    reader = instance.sql(SEARCH)
    for _ in range(2):
        assert reader.read_next_batch().num_rows
    del reader
    gc.collect()
    eventually(computes_nothing)


@pytest.mark.parametrize("statement", ["select 1", "select * from t limit 1", "select * from t", HEAVY])
def test_a_statement_interrupted_before_planning_is_not_planned(
    instance: dm.Instance, statement: str
) -> None:
    interruption = Interruption()
    interruption.set()
    with pytest.raises(DormouseError, match=INTERRUPTED):
        instance.sql(statement, interruption=interruption)


@pytest.mark.parametrize(
    ("of", "step"), [(Narrowed, "reads"), (statements._Statement, "_on"), (TableFiles, "select")]
)
def test_a_statement_interrupted_during_planning_does_not_run(
    instance: dm.Instance, computing: threading.Event, of: type, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interruption = Interruption()
    whole = getattr(of, step)

    def interrupted(*given: Any) -> Any:
        interruption.set()
        return whole(*given)

    monkeypatch.setattr(of, step, interrupted)
    with pytest.raises(DormouseError, match=INTERRUPTED):
        instance.sql("select count(*) from t where key <> 2", interruption=interruption)
    assert step == "select" or not computing.is_set()


@pytest.mark.slow
def test_a_client_that_disconnects_before_the_first_row_ends_the_computation(
    instance: dm.Instance, computing: threading.Event
) -> None:
    with serving(instance, queries_max=1, queue_seconds_max=SECONDS_MAX) as url:
        with connected(url) as sock:
            sock.sendall(request("/v1/sql", b'{"statement": "%s"}' % HEAVY.encode()))
            assert computing.wait(SECONDS_MAX)
            assert metric(url, "dormouse_queries_running") == 1
        found = httpx.post(f"{url}/v1/sql", json={"statement": "select 1 as n"}, timeout=SECONDS_MAX)
        assert found.text == '{"n":1}\n'
        assert metric(url, "dormouse_queries_total", outcome="client_gone") == 1
        eventually(lambda: metric(url, "dormouse_queries_running") == 0)
        eventually(computes_nothing)


@pytest.mark.slow
def test_the_time_limit_ends_the_computation(instance: dm.Instance) -> None:
    with serving(instance, seconds_max=0.3) as url:
        found = httpx.post(f"{url}/v1/sql", json={"statement": HEAVY}, timeout=SECONDS_MAX)
        assert (found.status_code, found.json()["type"]) == (504, "urn:dormouse:query-time-over")
        eventually(lambda: metric(url, "dormouse_queries_running") == 0)
        eventually(computes_nothing)
