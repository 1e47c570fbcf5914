"""The program `dormouse demo` in real processes: killed, repeated, interrupted, and two at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import duckdb
import psutil
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.demo.pipeline import compare

DORMOUSE = str(Path(sys.executable).with_name("dormouse"))
SECONDS_MAX = 240


# code that Python runs before the program: the import of one module never ends
NEVER_LOADED = """
import os, sys, time

class Stuck:
    def find_spec(self, name, *_):
        if name == "dormouse.cli.console":
            open(os.environ["MARKER"], "w").close()
            time.sleep(1000)

sys.meta_path.insert(0, Stuck())
"""


def start(folder: Path, *args: str, dsn: str | None = None, **more: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != "DORMOUSE_DSN"} | more
    return subprocess.Popen(
        [DORMOUSE, "demo", "--folder", str(folder), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | ({"DORMOUSE_DSN": dsn} if dsn else {}),
        start_new_session=True,
    )


def wait_for(demo: subprocess.Popen[str], what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not what():
        assert demo.poll() is None, demo.communicate()
        assert time.monotonic() < deadline, "the condition was never met"
        time.sleep(0.02)


@dataclass(frozen=True)
class Finished:
    folder: Path
    code: int
    out: str
    err: str
    second: tuple[int, str, str]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """Kills one demo, then runs another in its folder. Meanwhile, tries to start a third there."""
    folder = tmp_path_factory.mktemp("demo") / "lake"
    killed = start(folder)
    wait_for(killed, (folder / "objects" / "data").exists)
    killed.kill()
    killed.communicate()
    running = start(folder)
    wait_for(running, (folder / ".dormouse-demo" / "December.parquet").exists)
    second = start(folder)
    out, err = second.communicate(timeout=SECONDS_MAX)
    answer = (second.returncode, out, err)
    out, err = running.communicate(timeout=SECONDS_MAX)
    yield Finished(folder, running.returncode, out, err, answer)


@pytest.mark.slow
def test_the_demo_runs_in_the_folder_of_a_killed_one_and_all_answers_match_duckdb(demo: Finished) -> None:
    assert (demo.code, demo.err) == (0, "")
    assert demo.out.count("✓ matches DuckDB") == 5
    assert "all 5 answers match DuckDB's" in demo.out
    assert "\x1b" not in demo.out  # no colour when piped


@pytest.mark.slow
def test_the_demo_shows_every_step(demo: Finished) -> None:
    steps = [
        line for line in demo.out.splitlines() if line.startswith(("ingest", "compact", "split", "collect"))
    ]
    assert [line.split()[0] for line in steps[:12]] == ["ingest"] * 12
    assert "with Spark" in steps[11]
    assert "3 Spark tasks" in steps[12]
    assert sum(line.startswith("split") for line in steps) >= 3
    assert steps[-1].startswith("collect: 15 files deleted")
    assert "336,776" in steps[-1]
    assert "carrier < 'EV'" in demo.out


@pytest.mark.slow
def test_a_second_demo_in_the_folder_is_refused_in_one_line(demo: Finished) -> None:
    code, out, err = demo.second
    assert (code, out) == (1, "")
    assert err == (
        f"dormouse: another demo is running in {demo.folder}: "
        "wait for it, or give this one another --folder\n"
    )


@pytest.mark.slow
def test_the_command_that_the_demo_recommends_works(demo: Finished) -> None:
    line = next(line for line in demo.out.splitlines() if line.startswith("  dormouse sql"))
    command = line.strip().replace("dormouse", DORMOUSE, 1)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)  # noqa: S602 ours
    assert "17,283" in done.stdout.replace("17283", "17,283")  # flights to ORD, the most frequent destination


@pytest.mark.slow
def test_the_demo_leaves_the_table_and_no_scratch_files(demo: Finished) -> None:
    assert not (demo.folder / ".dormouse-demo").exists()
    with dm.local(demo.folder, read_only=True) as instance:
        status = instance.table("flights").status()
        assert (status.row_count, status.rows_exact, status.unreferenced_files) == (336_776, True, 0)
        assert status.leaves > 8
    on_disk = {path.name for path in (demo.folder / "objects" / "data" / "t1").rglob("*.parquet")}
    assert on_disk == set()  # these would be files of the killed demo


INTERRUPT, TERMINATE = (signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [INTERRUPT, TERMINATE])
def test_an_interrupt_while_python_imports_ends_in_one_line(
    tmp_path: Path, kind: tuple[signal.Signals, int, str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NEVER_LOADED)
    marker = tmp_path / "marker"
    process = start(tmp_path / "lake", PYTHONPATH=str(tmp_path), MARKER=str(marker))
    wait_for(process, marker.exists)
    process.send_signal(kind[0])
    process.send_signal(kind[0])
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (kind[1], f"dormouse: {kind[2]}\n")
    assert not (tmp_path / "lake").exists()


def has_a_server(folder: Path, _demo: psutil.Process) -> bool:
    return any(folder.glob("postgres*"))


def has_objects(folder: Path, _demo: psutil.Process) -> bool:
    return (folder / "objects" / "data").exists()


def has_java(_folder: Path, demo: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # the process ended in the meantime
        return any("java" in child.name() for child in demo.children(recursive=True))
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "rows", "kind"),
    [
        (has_a_server, "1000", TERMINATE),
        pytest.param(has_objects, None, INTERRUPT, marks=pytest.mark.slow),
        pytest.param(
            has_java, "1000", TERMINATE, marks=pytest.mark.slow
        ),  # with lineitem, the first ingest runs on Spark
    ],
)
def test_an_interrupt_ends_in_one_line_and_leaves_no_process(
    tmp_path: Path,
    moment: Callable[[Path, psutil.Process], bool],
    rows: str | None,
    kind: tuple[signal.Signals, int, str],
) -> None:
    """The interrupts come at the start of PostgreSQL, in an ingest, and at the start of Spark."""
    process = start(tmp_path / "lake", *(("--rows", rows) if rows else ()))
    wait_for(process, lambda: moment(tmp_path / "lake", psutil.Process(process.pid)))
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(kind[0])
    process.send_signal(kind[0])  # a second Ctrl-C must not stop the clean-up
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (kind[1], f"dormouse: {kind[2]}\n")
    _, alive = psutil.wait_procs(children, timeout=60)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
    started = [
        p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])
    ]
    assert started == []


def difference(ours: list[list[int]], theirs: list[int]) -> str | None:
    """Returns the difference that the demo's check finds between batches and DuckDB's rows."""
    schema = pa.schema([("a", pa.int64())])
    batches = [pa.record_batch({"a": part}, schema=schema) for part in ours]
    with duckdb.connect() as db:
        db.execute("create table t (n integer, a bigint)")
        db.executemany("insert into t values (?, ?)", list(enumerate(theirs)))
        return compare(
            lambda: pa.RecordBatchReader.from_batches(schema, batches), db, "select a from t order by n"
        ).difference


def test_the_check_finds_every_kind_of_difference() -> None:
    assert difference([[1, 2], [], [3]], [1, 2, 3]) is None
    assert difference([[1, 2], [4]], [1, 2, 3]) == "row 2 is {'a': 4}, DuckDB has {'a': 3}"
    assert "row 1" in str(difference([[1, 3, 2]], [1, 2, 3]))
    assert str(difference([[1, 2]], [1, 2, 3])).startswith("fewer rows")
    assert str(difference([[1, 2], [3, 4]], [1, 2, 3])).startswith("more rows")
