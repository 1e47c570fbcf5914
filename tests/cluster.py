"""A standalone Spark cluster, a master and workers from the wheel pyspark, whose processes can be killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import psutil
import pyspark

from dormouse.spark.session import java_home

SPARK_HOME = Path(pyspark.__file__).parent
SECONDS_MAX = 600
# a lost connection shows that a process died; a timeout would also end slow ones
_SETTINGS = f"-Dspark.master.rest.enabled=false -Dspark.worker.timeout={SECONDS_MAX}"
Victim = Literal["executor", "worker"]


class Cluster:
    """A Spark cluster. `url` is the master for a session. A worker has one core, so it runs one executor."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = {
            **os.environ,
            **environment,
            "JAVA_HOME": str(java_home(os.environ)),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_SCALA_VERSION": "2.13",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} {_SETTINGS}",
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._workers: list[subprocess.Popen[bytes]] = []
        master = self._start("master", "master.Master")
        self.url = self._said(master, r"Starting Spark master at (spark://\S+)")

    def add_worker(self) -> None:
        """Starts a worker and waits until the master has registered it."""
        log = self._start("worker", "worker.Worker", "--cores", "1", "--memory", "1g", self.url)
        self._workers.append(self._processes[-1])
        self._said(log, r"(Successfully registered) with master")

    def kill(self, pid: int, victim: Victim) -> None:
        """Kills the executor that started the process, or its worker with all processes that the worker
        started.
        """
        of = psutil.Process(pid)
        executor = next(one for one in of.parents() if one.name() == "java")
        worker = next(one for one in self._workers if any(one.pid == up.pid for up in executor.parents()))
        if victim == "executor":
            executor.send_signal(signal.SIGKILL)
            return
        everything = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
        for one in everything:
            one.kill()
        worker.wait()
        self._workers.remove(worker)
        self.add_worker()

    def logs(self) -> str:
        """Returns the last part of the logs of master, workers and executors."""
        found = (path for path in self._folder.rglob("*") if path.name == "stderr" or path.suffix == ".log")
        return "\n".join(f"{path}:\n{path.read_text(errors='replace')[-2_000:]}" for path in found)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(SECONDS_MAX)

    def _start(self, name: str, main: str, *arguments: str) -> Path:
        log = self._folder / f"{name}-{len(self._processes)}.log"
        command = [SPARK_HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{main}"]
        ports = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        folder = ["--work-dir", str(self._folder / "work")] if name == "worker" else []
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *ports, *folder, *arguments],
                env=self._environment,
                cwd=self._folder,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        return log

    def _said(self, log: Path, pattern: str) -> str:
        def said() -> str | None:
            assert self._processes[-1].poll() is None, log.read_text()
            found = re.search(pattern, log.read_text())
            return None if found is None else found[1]

        return wait_for(said)


@contextmanager
def cluster(folder: Path, environment: Mapping[str, str], workers: int = 2) -> Iterator[Cluster]:
    """Yields a cluster that ends with the context."""
    made = Cluster(folder, environment)
    try:
        for _ in range(workers):
            made.add_worker()
        yield made
    finally:
        made.stop()


def wait_for(moment: Callable[[], str | None]) -> str:
    """Calls `moment` until it returns something other than None, and returns that result."""
    deadline = time.monotonic() + SECONDS_MAX
    while (found := moment()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found
