"""Sides of a comparison, each in a process of its own, measured in turns."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import psutil

_SAMPLE_SECONDS = 0.02


@dataclass
class Side:
    """What was measured of one side, a figure per counted round."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


class Worker:
    """A process that runs one side whenever it is asked; stopped at the end of the `with`."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._tree = psutil.Process(self._process.pid)
        self.peak_bytes = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def run(self) -> Any:
        """One run: what the worker said of it."""
        done = threading.Event()
        # a daemon: SIGTERM may come before the `try`, and Python would wait for it for ever
        sampler = threading.Thread(target=self._sample, args=(done,), daemon=True)
        sampler.start()
        try:
            return self._ask()
        finally:
            done.set()
            sampler.join()

    def _ask(self) -> Any:
        pipes = self._process.stdin, self._process.stdout
        if pipes[0] is None or pipes[1] is None:
            raise RuntimeError("the worker has no pipes")
        pipes[0].write("\n")
        pipes[0].flush()
        answer = pipes[1].readline()
        if not answer:
            raise RuntimeError(f"a measured side failed with exit code {self._process.wait()}")
        return json.loads(answer)

    def _sample(self, done: threading.Event) -> None:
        """The resident memory of the process and its children (Spark's Java), at its highest."""
        while not done.wait(_SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, sum(map(_resident, self._processes())))

    def _processes(self) -> list[psutil.Process]:
        try:
            return [self._tree, *self._tree.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def orderly_end() -> None:
    """SIGTERM ends this process as Python ends: what it started ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def serve(run: Callable[[], Mapping[str, Any]]) -> None:
    """A worker's main: run once for each line of the input, and answer how long it took."""
    for _ in sys.stdin:
        started = time.perf_counter()
        facts = dict(run())
        facts["seconds"] = time.perf_counter() - started
        print(json.dumps(facts), flush=True)


def measure(workers: Mapping[str, Worker], rounds: int, check: Callable[[str, Any], None]) -> dict[str, Side]:
    """Rounds in turn over all sides; the first warms everything up and is not counted."""
    sides = {name: Side() for name in workers}
    names = list(workers)
    for number in range(rounds + 1):
        # the order turns, so that nobody always follows the same neighbour
        for name in names[number % len(names) :] + names[: number % len(names)]:
            answer = workers[name].run()
            check(name, answer)
            if number:
                sides[name].seconds.append(answer["seconds"])
    for name, worker in workers.items():
        sides[name].peak_bytes = worker.peak_bytes
    return sides


def ratio(ours: Side, theirs: Side) -> float:
    """Throughput, ours ÷ theirs: the median over the rounds, whose runs share the machine's noise."""
    pairs = zip(ours.seconds, theirs.seconds, strict=True)
    return statistics.median(them / us for us, them in pairs)


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
