"""Worker processes that run SQL: their answers, and statements that exhaust or crash only their own."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from dormouse.errors import DormouseError, EngineFailed, InstanceError, InvalidQuery, QueryTooLarge
from dormouse.model.region import min_value
from dormouse.model.types import KEY_TYPES
from dormouse.reading.sql.engine import Engine, Session
from dormouse.reading.sql.wanted import Planning
from dormouse.reading.sql.workers import WorkerLimits, Workers, WorkerSession
from tests.serving import SECONDS_MAX, eventually
from tests.support.model import BYTES, LONG, DataType, Field, Range, Schema
from tests.support.objects import open_store
from tests.support.reading import Interruption

MEMORY = 512 * 1024**2
MANY = "SELECT range AS n, range::VARCHAR AS text FROM range(20_000_000)"
UNHEEDING = "SELECT levenshtein(repeat('ab', 60000), repeat('ba', 60000))"
ENDLESS = "SELECT sum(a.range * b.range) FROM range(100_000_000) a, range(1_000_000) b"


@contextmanager
def pool(folder: Path, count: int = 1, **limits: float | None) -> Iterator[Workers]:
    given: dict[str, object] = {"memory_bytes_max": MEMORY, "wait_seconds_max": SECONDS_MAX, **limits}
    workers = Workers(open_store(folder / "objects"), WorkerLimits(count, **given))  # type: ignore[arg-type]
    with closing(workers.start()):
        yield workers


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Yields a pool of a server that has secrets in its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DORMOUSE_SERVICE_TOKEN", "hunter-1")
        patch.setenv("PGPASSWORD", "hunter-2")
        with pool(tmp_path_factory.mktemp("workers"), 2, memory_bytes_max=2 * MEMORY) as found:
            yield found


def answer(session: Session, statement: str, parameters: object = ()) -> pa.Table:
    with closing(session):
        rows = session.rows({}, statement, parameters)  # type: ignore[arg-type]
        return pa.Table.from_batches(rows.batches, rows.schema)


def next_answer(workers: Workers) -> int:
    """Runs a statement that selects 42 in a new session, and returns its answer."""
    [value] = answer(workers.session(Interruption()), "SELECT 42 AS n")["n"].to_pylist()
    return int(value)


def lent(session: WorkerSession) -> int:
    return session._worker.process_id


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        ("SELECT 1 AS a, NULL AS b, 'x' AS c, 'ab'::BLOB AS d, 1.5::DECIMAL(9, 3) AS e", ()),
        ("SELECT $1 AS a, $2 AS b", [b"\x00\xff", float("inf")]),
        ("SELECT $x AS a, [{'b': 1, 'c': [MAP {'d': NULL}]}, NULL] AS e", {"x": "é"}),
        ("SELECT TIMESTAMPTZ '2024-01-01', DATE '0001-01-01', INTERVAL 1 MONTH, 'a'::ENUM('a', 'b')", ()),
        ("SELECT range AS n, repeat('x', (range % 100)::INT) AS t FROM range(100000)", ()),
        ("SELECT repeat('x', 1000) AS t FROM range(20000)", ()),
        ("SELECT 1 AS n WHERE false", ()),
    ],
)
def test_workers_give_the_same_answers_as_this_process(
    workers: Workers, tmp_path: Path, statement: str, parameters: object
) -> None:
    with closing(Engine(open_store(tmp_path))) as engine:
        expected = answer(engine.session(Interruption()), statement, parameters)
    found = answer(workers.session(Interruption()), statement, parameters)
    assert found.schema.equals(expected.schema, check_metadata=True)
    assert found.equals(expected)


def test_a_worker_returns_what_a_statement_names_and_needs(workers: Workers, tmp_path: Path) -> None:
    schemas = {"t": Schema([Field("k", LONG), Field("b", BYTES)])}
    statement = "SELECT * FROM t WHERE k IN (3, 5) AND b >= $1::BLOB LIMIT 7"
    with (
        closing(Engine(open_store(tmp_path))) as engine,
        closing(engine.session(Interruption())) as here,
        closing(workers.session(Interruption())) as there,
    ):
        parsed = there.parsed(statement)
        assert parsed == here.parsed(statement)
        planning = Planning(schemas, parsed, [b"\x01"])
        wanted = there.wanted(planning)
        assert wanted == here.wanted(planning)
        assert wanted.ranges["t"]["k"] == (Range.exactly(3), Range.exactly(5))


def test_a_worker_returns_bounds_of_keys_of_every_type(workers: Workers) -> None:
    values = {kind: min_value(DataType(kind)) for kind in sorted(KEY_TYPES)}
    schemas = {"t": Schema([Field(f"k_{kind}", DataType(kind)) for kind in values])}
    statement = "SELECT * FROM t WHERE " + " AND ".join(f"k_{kind} = ${kind}" for kind in values)
    with closing(workers.session(Interruption())) as there:
        wanted = there.wanted(Planning(schemas, there.parsed(statement), values))
    assert wanted.ranges["t"] == {f"k_{kind}": (Range.exactly(value),) for kind, value in values.items()}
    assert lent(there) in workers.process_ids


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("statement", "kind", "message"),
    [
        ("SELECT nothing", InvalidQuery, 'column "nothing"'),
        ("SELECT 'x'::INT", InvalidQuery, "Could not convert string 'x' to INT32"),
        ("SELECT length(repeat('x', 2000000000))", QueryTooLarge, "more memory than it may use"),
        pytest.param(
            *("SELECT list(range) FROM range(1000000000)", QueryTooLarge, "more memory than it may use"),
            marks=pytest.mark.slow,
        ),
        ("SELECT repeat('x', 70000000)", QueryTooLarge, r"a row of the answer has 70,000,\d+ bytes"),
        ("SELECT repeat('x', 1000000) FROM range(1000)", QueryTooLarge, "more memory than it may use"),
    ],
)
def test_errors_of_a_worker_keep_their_class(
    workers: Workers, statement: str, kind: type[DormouseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        answer(workers.session(Interruption()), statement)
    assert next_answer(workers) == 42


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "message"),
    [(signal.SIGKILL, "was killed, as the system does when memory is short"), (signal.SIGSEGV, "SIGSEGV")],
)
def test_a_worker_that_dies_in_the_middle_of_a_result_is_one_clear_line(
    workers: Workers, number: signal.Signals, message: str
) -> None:
    session = workers.session(Interruption())
    with closing(session):
        rows = session.rows({}, MANY, ())
        assert next(rows.batches).num_rows
        os.kill(lent(session), number)
        with pytest.raises(EngineFailed, match=message):
            list(rows.batches)
    assert next_answer(workers) == 42
    eventually(lambda: len(workers.process_ids) == 3)
    assert lent(session) not in workers.process_ids


@pytest.mark.slow
def test_a_worker_that_died_while_idle_is_not_lent(tmp_path: Path) -> None:
    with pool(tmp_path) as workers:
        eventually(lambda: len(workers.process_ids) == 2)
        for worker in workers._idle:
            os.kill(worker.process_id, signal.SIGKILL)
        eventually(lambda: not any(worker.is_alive for worker in workers._idle))
        assert next_answer(workers) == 42


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives workers a long time to react to an interruption, so that slow machines do not kill them."""
    monkeypatch.setattr("dormouse.reading.sql.workers.STOP_SECONDS_MAX", SECONDS_MAX)


@pytest.mark.slow
@pytest.mark.parametrize(("statement", "survives"), [(ENDLESS, True), (UNHEEDING, False)])
def test_an_interruption_ends_statements_even_if_they_do_not_react(
    workers: Workers, statement: str, survives: bool, request: pytest.FixtureRequest
) -> None:
    if survives:
        request.getfixturevalue("patient")
    interruption = Interruption()
    session = workers.session(interruption)
    computed = psutil.Process(lent(session)).cpu_times
    before = computed().user
    with ThreadPoolExecutor(1) as thread:
        answered = thread.submit(answer, session, statement)
        eventually(lambda: computed().user > before + 0.3)  # far more than planning takes
        interruption.set()
        with pytest.raises(DormouseError, match="the query was interrupted"):
            answered.result(SECONDS_MAX)
    assert (lent(session) in workers.process_ids) is survives
    assert next_answer(workers) == 42


@pytest.mark.usefixtures("patient")
def test_a_session_that_is_closed_in_the_middle_gives_its_worker_back(workers: Workers) -> None:
    session = workers.session(Interruption())
    batches = session.rows({}, MANY, ()).batches
    next(batches)
    session.close()
    session.close()
    assert lent(session) in workers.process_ids
    assert next_answer(workers) == 42


@pytest.mark.usefixtures("patient")
def test_a_session_can_start_a_new_statement_during_another(workers: Workers) -> None:
    with closing(workers.session(Interruption())) as session:
        next(session.rows({}, MANY, ()).batches)
        [batch] = session.rows({}, "SELECT 7 AS n", ()).batches
        assert batch.to_pydict() == {"n": [7]}


@pytest.mark.slow
def test_a_worker_that_does_not_free_its_memory_is_replaced(workers: Workers) -> None:
    """A limit on address space counts memory that the worker has freed but not returned to the system."""
    session = workers.session(Interruption())
    with pytest.raises(QueryTooLarge):
        answer(session, "SELECT length(string_agg(repeat(range::VARCHAR, 1000), '')) FROM range(400_000)")
    assert lent(session) not in workers.process_ids
    assert next_answer(workers) == 42


@pytest.mark.slow
def test_the_worker_of_a_session_that_is_dropped_is_replaced(workers: Workers) -> None:
    session = workers.session(Interruption())
    rows, number = session.rows({}, MANY, ()), lent(session)
    next(rows.batches)
    del session, rows
    gc.collect()
    assert number not in workers.process_ids
    assert next_answer(workers) == 42


@pytest.mark.slow
def test_waiting_sessions_get_a_worker_in_turn_or_are_refused(tmp_path: Path) -> None:
    with pool(tmp_path) as workers, ThreadPoolExecutor(3) as threads:
        session = workers.session(Interruption())
        waiting = []
        for number in range(3):
            waiting.append(threads.submit(lambda: (next_answer(workers), time.monotonic())))
            eventually(lambda number=number: len(workers._waiting) == number + 1)  # type: ignore[misc]
        session.close()
        times = [future.result(SECONDS_MAX)[1] for future in waiting]
        assert times == sorted(times)
        with closing(workers.session(Interruption())):
            interruption = Interruption()
            threading.Timer(0.1, interruption.set).start()
            with pytest.raises(DormouseError, match="interrupted"):
                workers.session(interruption)
            workers._limits = replace(workers._limits, wait_seconds_max=0.3)
            with pytest.raises(InstanceError, match="all 1 processes that run SQL are busy; try again later"):
                workers.session(Interruption())
            workers._limits = replace(workers._limits, wait_seconds_max=SECONDS_MAX)
        assert next_answer(workers) == 42
    with pytest.raises(InstanceError, match="are closed"):
        workers.session(Interruption())


@pytest.mark.slow
def test_64_statements_at_once_on_a_pool_of_2(workers: Workers) -> None:
    def run(number: int) -> int:
        found = answer(workers.session(Interruption()), "SELECT sum(range) AS n FROM range($1)", [number])
        assert len(workers.process_ids) <= 3
        return int(found["n"].to_pylist()[0])

    with ThreadPoolExecutor(64) as threads:
        assert list(threads.map(run, range(2, 66))) == [n * (n - 1) // 2 for n in range(2, 66)]


SORTED = "SELECT range FROM range(2_000_000) ORDER BY md5(range::VARCHAR) || repeat('x', 200)"


def _spills(workers: Workers) -> None:
    session = workers.session(Interruption())
    with closing(session), pytest.raises(QueryTooLarge, match=r"temporary data did not fit on disk"):
        list(session.rows({}, SORTED, ()).batches)
    assert next_answer(workers) == 42


@pytest.mark.slow
def test_a_statement_that_spills_more_than_allowed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pool(tmp_path, spill_bytes_max=10 * 1024**2) as workers:
        _spills(workers)
    assert not list(tmp_path.glob("dormouse-sql-*/*"))


@pytest.mark.slow
def test_a_statement_that_fills_the_disk_with_spill_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    try:
        with pool(tmp_path, spill_bytes_max=1024**3) as workers:
            _spills(workers)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


PARENT = """
import sys, threading, time
from dormouse.objects import open_store
from dormouse.reading.streams import Interruption
from dormouse.reading.sql.workers import WorkerLimits, Workers

workers = Workers(open_store(sys.argv[1]), WorkerLimits(2)).start()
for statement in sys.argv[2:]:
    session = workers.session(Interruption())
    threading.Thread(target=lambda: list(session.rows({}, statement, ()).batches), daemon=True).start()
time.sleep(0.5)
print(*workers.process_ids, flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_workers_end_with_their_server_even_while_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds even if the server is killed; the next server removes the workers' files."""
    command = [sys.executable, "-c", PARENT, str(tmp_path / "objects"), UNHEEDING, ENDLESS]
    variables = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as parent:
        assert parent.stdout is not None
        numbers = [int(number) for number in parent.stdout.readline().split()]
        parent.kill()
    assert len(numbers) >= 2
    eventually(lambda: not any(_runs(number) for number in numbers))
    left = list(tmp_path.glob("dormouse-sql-*/*"))
    assert len(left) >= len(numbers)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pool(tmp_path) as workers:
        assert next_answer(workers) == 42
        assert not any(folder.exists() for folder in left)


BUSY = """
import sys
from dormouse.reading.sql.worker import _end_with

_end_with(int(sys.argv[1]))
print(flush=True)
3 ** 10**9
"""


@pytest.mark.slow
def test_a_process_ends_with_its_parent_without_the_interpreters_lock() -> None:
    watched, lifeline = os.pipe()
    command = [sys.executable, "-c", BUSY, str(watched)]
    with subprocess.Popen(command, pass_fds=(watched,), stdout=subprocess.PIPE) as process:
        os.close(watched)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.1)
        os.close(lifeline)
        assert process.wait(SECONDS_MAX) == -signal.SIGIO


def _runs(number: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{number}/stat").read_text("utf-8")
    except FileNotFoundError:
        return False


def test_a_worker_has_limits_and_no_secrets(workers: Workers) -> None:
    with closing(workers.session(Interruption())) as session:
        about = Path(f"/proc/{lent(session)}")
        limits = dict(line[:26].rstrip().partition("  ")[::2] for line in about.joinpath("limits").open())
        assert str(2 * MEMORY) in about.joinpath("limits").read_text("ascii")
        assert "Max core file size" in limits
        assert "hunter" not in about.joinpath("environ").read_text("utf-8", errors="replace")
        assert "objects" not in about.joinpath("cmdline").read_text("utf-8")
        assert about.joinpath("oom_score_adj").read_text("ascii").strip() == "500"
        assert "/pandas/" not in about.joinpath("maps").read_text("utf-8")
        os.kill(lent(session), signal.SIGINT)
        [batch] = session.rows({}, "SELECT 1 AS n", ()).batches
        assert batch.num_rows
