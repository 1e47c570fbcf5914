"""A local Spark session: starts with either Java, is quiet, leaves nothing behind, and can be interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark import SparkContext

from dormouse.errors import InvalidInput
from dormouse.spark.session import spark_session

WAIT_SECONDS_MAX = 240

WORK = """
import json, os, signal, sys
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
}))
"""

INTERRUPTED = """
import json, os, sys, time
from dormouse.spark.session import spark_session
from dormouse.spark.tasks import run_action, run_tasks

def slow(stream):
    for batch in stream:
        time.sleep(1000)
        yield batch

def nap(n):
    time.sleep(1000)

spark = spark_session()
names = ["spark.master", "spark.driver.memory", "spark.sql.shuffle.partitions"]
found = [spark.conf.get(name) for name in names] + [spark.sparkContext.defaultParallelism]
print(json.dumps(found), flush=True)
for blocked in (
    lambda: run_action(spark, lambda: spark.range(10).mapInArrow(slow, "id long").collect()),
    lambda: list(run_tasks(spark, nap, range(5))),
):
    try:
        print("running", flush=True)
        blocked()
    except KeyboardInterrupt:
        print("interrupted", spark.range(3).count(), flush=True)
print(spark._jvm.ProcessHandle.current().pid(), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """This machine's own, with a temporary folder that shows what is left in it."""
    (tmp_path / "temporary").mkdir()
    (tmp_path / "here").mkdir()
    return dict(os.environ) | {
        "TMPDIR": str(tmp_path / "temporary"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def without_java(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """A PATH with what Spark's shell scripts call, and no Java; no JAVA_HOME."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "env", "dirname", "ps"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    kept = {name: value for name, value in environment.items() if name != "JAVA_HOME"}
    return kept | {"PATH": str(tools)}


def check(done: subprocess.CompletedProcess[str], tmp_path: Path) -> dict[str, Any]:
    assert (done.returncode, done.stderr) == (0, "")
    assert list((tmp_path / "temporary").iterdir()) == []
    assert list((tmp_path / "here").iterdir()) == []
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(
    ("java", "tasks"),
    [
        ("of the machine", 7),  # on a machine without one, it is the wheel's
        pytest.param("of the wheel", 2, marks=pytest.mark.slow),
    ],
)
def test_spark_runs_python_quietly_and_leaves_nothing(
    tmp_path: Path, environment: dict[str, str], java: str, tasks: int
) -> None:
    """Not a line on standard error, no file here or in the temporary folder, the environment as it was."""
    if java == "of the wheel":
        environment = without_java(environment, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(tasks)],
        cwd=tmp_path / "here",
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS_MAX,
        check=False,
    )
    report = check(done, tmp_path)
    assert java == "of the machine" or report["java"].startswith("21.")
    assert Path(report["temporary"]).parent == tmp_path / "temporary"
    assert report["handler"], "Spark's handler of Ctrl-C garbles its gateway"
    assert report["rows"] == 100_000
    assert report["pythons"] == [report["python"]]
    assert report["parents"] == [report["parent"]], "a task started Python workers of its own"
    assert report["pandas"] == 7
    assert (report["same"], report["memory"]) == (True, "1g")
    assert (report["changed"], report["added"]) == ([], [])
    results = [0, 1, 4, None, None, None, 36]
    assert report["results"] == results[:tasks], "the tasks that failed took others with them"
    assert ["process died" in error or error for error in report["errors"]] == [
        True,
        "KeyError('four')",
        "JobFailed('The task ended itself: SystemExit(1)')",
    ][: results[:tasks].count(None)]


@pytest.fixture
def interrupted(environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, as a shell starts one, so that a Ctrl-C reaches Java too."""
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        cwd=tmp_path / "here",
        env=environment | {"DORMOUSE_SPARK_MASTER": "local[3]", "DORMOUSE_SPARK_DRIVER_MEMORY": "700m"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        deadline = threading.Timer(WAIT_SECONDS_MAX, process.kill)
        deadline.start()
        yield process
        deadline.cancel()
        process.kill()


def test_the_environment_is_heeded_ctrl_c_reaches_us_and_java_ends_when_we_are_killed(
    interrupted: subprocess.Popen[str],
) -> None:
    """The environment says the master and the memory.

    Each Ctrl-C is a KeyboardInterrupt, after which the same session works; Java does not outlive us.
    """
    assert interrupted.stdout
    assert json.loads(interrupted.stdout.readline()) == ["local[3]", "700m", "12", 3]
    for _ in range(2):
        assert interrupted.stdout.readline() == "running\n"
        time.sleep(1)  # until the job has begun; earlier is right as well, only less of a test
        os.killpg(interrupted.pid, signal.SIGINT)
        line = interrupted.stdout.readline()
        assert line == "interrupted 3\n", interrupted.stderr and interrupted.stderr.read()
    java = psutil.Process(int(interrupted.stdout.readline()))
    assert "java" in java.name()
    interrupted.kill()
    java.wait(timeout=WAIT_SECONDS_MAX)


def test_a_master_that_is_none_is_refused_before_java_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setenv("DORMOUSE_SPARK_MASTER", "everywhere")
    with pytest.raises(
        InvalidInput, match=r"^the setting spark_master \(DORMOUSE_SPARK_MASTER\) is not valid"
    ):
        spark_session()
