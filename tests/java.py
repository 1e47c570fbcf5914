"""Options with which Java starts quickly: it compiles little, and has Spark's classes in an archive."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
_KEY = hashlib.sha256(f"{sys.prefix} {version('pyspark')}".encode()).hexdigest()[:16]
ARCHIVE = ROOT / "build" / "java" / f"{_KEY}.jsa"
"""The archive of classes. Java ignores it if it is missing, or from another Java or other jars."""

# a Java process of the tests lives for seconds: compile quickly, and skip the verification of Spark's jars
QUICK = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
OPTIONS = f"{QUICK} -XX:SharedArchiveFile={ARCHIVE} -Xlog:disable"
SESSION = """
from pyspark import SparkContext
from dormouse.spark.session import spark_session
spark = spark_session(cores=2)
rows = spark.createDataFrame([(1, 2.0, "x")], "k long, v double, s string").repartition(2)
rows.mapInArrow(lambda batches: batches, rows.schema).groupBy("s").count().sort("s").collect()
rows.write.parquet(__import__("sys").argv[1])
java = SparkContext._gateway.proc
java.stdin.close()
java.wait()
"""
"""A program whose Java loads the classes that most work needs, and archives them when it ends."""


def make_archive(folder: Path) -> None:
    """Makes the archive if it is missing, which takes as long as a few starts of Spark.

    A process that finds another process at it does not wait. The work uses `folder`, which is new.
    """
    if ARCHIVE.exists():
        return
    ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    with ARCHIVE.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        for old in ARCHIVE.parent.glob("*.jsa"):
            old.unlink()
        unfinished = ARCHIVE.with_suffix(".unfinished")
        options = f"{QUICK} -XX:ArchiveClassesAtExit={unfinished} -Xlog:disable"
        command = [sys.executable, "-c", SESSION, str(folder / "rows")]
        environment = {**os.environ, "SPARK_SUBMIT_OPTS": options}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=600)
        unfinished.rename(ARCHIVE)
