"""A local Spark session. It starts with each Java, is quiet, leaves nothing behind, and can be
interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark import SparkContext

from dormouse.errors import InvalidInput
from dormouse.spark.session import spark_session

WAIT_SECONDS_MAX = 240
SETTINGS = {"DORMOUSE_SPARK_MASTER": "local[3]", "DORMOUSE_SPARK_DRIVER_MEMORY": "700m"}
Start = Callable[..., subprocess.Popen[str]]

WORK = """
import json, os, signal, sys, time
from pathlib import Path
import pyarrow as pa
before = dict(os.environ)
handler = signal.getsignal(signal.SIGINT)
from dormouse.errors import DormouseError
from dormouse.spark.session import spark_session
from dormouse.spark.tasks import run_action, run_tasks

def batches(stream):
    import dormouse
    for batch in stream:
        facts = {"rows": [batch.num_rows], "python": [sys.executable], "parent": [os.getppid()]}
        yield pa.RecordBatch.from_pydict(facts)

def parent(n):
    return os.getppid()

def task(n):
    if n == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if n == 4:
        raise KeyError("four")
    if n == 5:
        sys.exit(1)
    return n * n

spark = spark_session(cores=2, driver_memory="1g")
frame = spark.range(100_000, numPartitions=2).mapInArrow(batches, "rows long, python string, parent long")
rows = run_action(spark, frame.collect)
[of_task] = run_tasks(spark, parent, [0])
outcomes = sorted(run_tasks(spark, task, range(int(sys.argv[1]))), key=lambda outcome: outcome.payload)
print(json.dumps({
    "handler": signal.getsignal(signal.SIGINT) is handler,
    "temporary": spark._jvm.System.getProperty("java.io.tmpdir"),
    "java": spark._jvm.System.getProperty("java.version"),
    "rows": sum(row.rows for row in rows),
    "pythons": sorted({row.python for row in rows}),
    "python": sys.executable,
    "parents": sorted({row.parent for row in rows}),
    "parent": of_task.result,
    "results": [outcome.result for outcome in outcomes],
    "errors": [repr(outcome.error) for outcome in outcomes if outcome.error],
    "pandas": len(spark.range(7).toPandas()),
    "same": spark_session(driver_memory="3g") is spark,
    "changed": [name for name in before if os.environ.get(name) != before[name]],
    "added": [name for name in os.environ if name not in before and not name.startswith("SPARK_")],
    "memory": spark.conf.get("spark.driver.memory"),
    "master": spark.conf.get("spark.master"),
}), flush=True)

def slow(stream):
    for batch in stream:
        (begun / "of an action").touch()
        time.sleep(1000)
        yield batch

def nap(n):
    (begun / "of tasks").touch()
    time.sleep(1000)

begun = Path(sys.argv[2])
for blocked in (
    lambda: run_action(spark, lambda: spark.range(10).mapInArrow(slow, "id long").collect()),
    lambda: list(run_tasks(spark, nap, range(5))),
):
    try:
        blocked()
    except KeyboardInterrupt:
        print("interrupted", spark.range(3).count(), flush=True)
"""

KILLED = """
import json, time
from dormouse.spark.session import spark_session

spark = spark_session()
names = ["spark.master", "spark.driver.memory", "spark.sql.shuffle.partitions"]
found = [spark.conf.get(name) for name in names] + [spark.sparkContext.defaultParallelism]
print(json.dumps(found), spark._jvm.ProcessHandle.current().pid(), sep="\\n", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def environment(tmp_path: Path, quick_java: None) -> dict[str, str]:
    """Returns this machine's environment, with a temporary folder that the test can inspect."""
    (tmp_path / "temporary").mkdir()
    (tmp_path / "here").mkdir()
    return dict(os.environ) | {
        "TMPDIR": str(tmp_path / "temporary"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def without_java(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Returns an environment without Java: PATH has only the programs of Spark's scripts, and no JAVA_HOME is
    set.
    """
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "env", "dirname", "ps"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    kept = {name: value for name, value in environment.items() if name != "JAVA_HOME"}
    return kept | {"PATH": str(tools)}


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    """Yields a function that starts a process in a group of its own, so that a Ctrl-C reaches Java too."""
    with ExitStack() as started:

        def process(*arguments: str, **changed: str) -> subprocess.Popen[str]:
            one = subprocess.Popen(
                [sys.executable, "-c", *arguments],
                cwd=tmp_path / "here",
                env=environment | changed,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            started.enter_context(one)
            started.callback(one.kill)
            deadline = threading.Timer(WAIT_SECONDS_MAX, one.kill)
            deadline.start()
            started.callback(deadline.cancel)
            return one

        yield process


def interrupt_when(begun: Path, process: subprocess.Popen[str]) -> None:
    """Sends a Ctrl-C to a process once a task has begun."""
    while not begun.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("java", "tasks"),
    [
        ("of the machine", 7),  # on a machine without Java, this is the Java of the wheel
        ("of the wheel", 2),
    ],
)
def test_spark_runs_python_quietly_is_interrupted_and_leaves_nothing(
    tmp_path: Path, environment: dict[str, str], start: Start, java: str, tasks: int
) -> None:
    """The test checks standard error, leftover files and the environment.

    Each Ctrl-C raises a KeyboardInterrupt, after which the same session works. A caller's arguments override
    the environment.
    """
    if java == "of the wheel":
        environment.update(without_java(environment, tmp_path))
        environment.pop("JAVA_HOME", None)
    process = start(WORK, str(tasks), str(tmp_path), **SETTINGS)
    assert process.stdout
    said = process.stdout.readline()
    assert said, process.communicate()
    for moment in ("of an action", "of tasks"):
        interrupt_when(tmp_path / moment, process)
        line = process.stdout.readline()
        assert line == "interrupted 3\n", process.communicate()
    out, err = process.communicate(timeout=WAIT_SECONDS_MAX)
    assert (process.returncode, out, err) == (0, "", "")
    assert list((tmp_path / "temporary").iterdir()) == []
    assert list((tmp_path / "here").iterdir()) == []
    report: dict[str, Any] = json.loads(said)
    assert java == "of the machine" or report["java"].startswith("21.")
    assert Path(report["temporary"]).parent == tmp_path / "temporary"
    assert report["handler"], "Spark's handler of Ctrl-C garbles its gateway"
    assert report["rows"] == 100_000
    assert report["pythons"] == [report["python"]]
    assert report["parents"] == [report["parent"]], "a task started Python workers of its own"
    assert report["pandas"] == 7
    assert (report["same"], report["memory"], report["master"]) == (True, "1g", "local[2]")
    assert (report["changed"], report["added"]) == ([], [])
    results = [0, 1, 4, None, None, None, 36]
    assert report["results"] == results[:tasks], "the failed tasks ended other tasks"
    assert ["process died" in error or error for error in report["errors"]] == [
        True,
        "KeyError('four')",
        "JobFailed('The task ended itself: SystemExit(1)')",
    ][: results[:tasks].count(None)]


@pytest.mark.slow
def test_the_environment_is_used_and_java_ends_with_its_process(start: Start) -> None:
    """The environment sets the master and the memory. Java ends even when its process is killed."""
    process = start(KILLED, **SETTINGS)
    assert process.stdout
    assert json.loads(process.stdout.readline()) == ["local[3]", "700m", "12", 3]
    java = psutil.Process(int(process.stdout.readline()))
    assert "java" in java.name()
    process.kill()
    java.wait(timeout=WAIT_SECONDS_MAX)


def test_an_invalid_master_is_refused_before_java_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setenv("DORMOUSE_SPARK_MASTER", "everywhere")
    with pytest.raises(
        InvalidInput, match=r"^the setting spark_master \(DORMOUSE_SPARK_MASTER\) is not valid"
    ):
        spark_session()
