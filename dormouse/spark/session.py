"""A quiet local Spark session, or the user's own."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from pyspark import SparkContext
from pyspark.sql import SparkSession

from dormouse.settings import Settings, load_settings
from dormouse.spark.java import java_home

LOGGING = Path(__file__).parent / "log4j2.properties"
JAVA_EXIT_SECONDS_MAX = 10
REDACTED_BY_SPARK = "(?i)url"
REDACTED = {"spark.sql.redaction.options.regex": "(?i)url|dsn"}
"""Spark logs the options of what it reads and writes; of itself it leaves those out that are URLs."""

_starting = threading.Lock()


def spark_session(
    *, cores: int | None = None, driver_memory: str | None = None, config: Mapping[str, str] | None = None
) -> SparkSession:
    """The session that the user has running, untouched; else one of the settings' master and memory.

    `cores` makes it a local one; `driver_memory` bounds its heap; `config` adds to its settings, or replaces
    them. A local session ends with the process, listens on 127.0.0.1 alone, needs no network, and
    writes to a temporary folder only. Raises InvalidInput when a setting is not valid.
    """
    with _starting:
        if SparkContext._active_spark_context is not None:
            return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
        settings = load_settings()
        master = f"local[{cores}]" if cores else settings.spark_master or "local[*]"
        ours = _configuration(master, driver_memory or settings.spark_driver_memory)
        return _start(ours | dict(config or {}), _gateway_environment(master, settings))


def _start(config: Mapping[str, str], environment: Mapping[str, str]) -> SparkSession:
    scratch = Path(tempfile.mkdtemp(prefix="dormouse-spark-"))
    builder = SparkSession.builder.appName("dormouse")
    for name, value in (_folders(scratch) | dict(config)).items():
        builder = builder.config(name, value)
    try:
        with _environment(environment):
            session, interrupt = _uninterrupted(builder.getOrCreate)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    process = getattr(SparkContext._gateway, "proc", None)
    atexit.register(_end, session.sparkContext, process, scratch)
    # it is the starting thread's; without one, writers find no data source of Python's
    session._jvm.SparkSession.setActiveSession(session._jsparkSession)  # type: ignore[union-attr]
    if interrupt is not None:
        raise interrupt
    return session


def _uninterrupted(start: Callable[[], SparkSession]) -> tuple[SparkSession, KeyboardInterrupt | None]:
    """Starts Spark on another thread, to its end: a Ctrl-C meanwhile would leave a Java without an owner.

    Away from the main thread, Spark also leaves our handler of Ctrl-C alone. Gives the first one that came.
    """
    interrupt = None
    with ThreadPoolExecutor(1, thread_name_prefix="dormouse-spark-start") as pool:
        starting = pool.submit(start)
        while not starting.done():
            try:
                wait([starting])
            except KeyboardInterrupt as error:
                interrupt = interrupt or error
    return starting.result(), interrupt


def _end(context: SparkContext, process: Popen[bytes] | None, scratch: Path) -> None:
    """At exit: let Java end, which stops Spark first, then remove its folders.

    Java ends when its standard input does; to call it could wait for a job that Ctrl-C has abandoned.
    """
    with suppress(Exception):  # it is gone when the session was stopped
        context._accumulatorServer.shutdown()  # which complains when Java leaves first
    if process and process.stdin:
        process.stdin.close()
        with suppress(TimeoutExpired):
            process.wait(JAVA_EXIT_SECONDS_MAX)
    shutil.rmtree(scratch, ignore_errors=True)


def _folders(scratch: Path) -> dict[str, str]:
    options = f"-Dlog4j2.configurationFile={LOGGING.as_uri()} -Djava.io.tmpdir={shlex.quote(str(scratch))}"
    return {
        "spark.local.dir": str(scratch / "local"),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.driver.extraJavaOptions": options,
    }


def _configuration(master: str, driver_memory: str) -> dict[str, str]:
    return {
        "spark.master": master,
        "spark.driver.memory": driver_memory,
        **(_on_this_machine(master) if master.startswith("local") else {}),
        "spark.pyspark.python": sys.executable,
        "spark.pyspark.driver.python": sys.executable,
        "spark.python.worker.reuse": "true",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.session.timeZone": "UTC",
        **REDACTED,
        # it is in the environment of an ingest's workers: compaction would have to start its own
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    }


def _on_this_machine(master: str) -> dict[str, str]:
    """For a local master: one machine, which need not know its own name, and `local[4]` of its cores."""
    given = re.search(r"\[(\d+|\*)", master)
    threads = 1 if given is None else os.cpu_count() or 1 if given[1] == "*" else int(given[1])
    return {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(4 * threads),
    }


def _gateway_environment(master: str, settings: Settings) -> dict[str, str]:
    """What the Java process and Spark's set-up read from the environment, and from nowhere else."""
    chosen = {"JAVA_HOME": str(settings.java_home)} if settings.java_home else {}
    found = {"JAVA_HOME": str(java_home({**os.environ, **chosen})), "PYSPARK_PYTHON": sys.executable}
    if master.startswith("local"):
        found["SPARK_LOCAL_IP"] = "127.0.0.1"  # otherwise the machine's name must resolve
    return found


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
