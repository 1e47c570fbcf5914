"""Clients in separate processes: threads that look up keys one after another and judge every answer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.concurrency.ledger import Ledger, judge, row, rows_of
from benchmarks.harness.processes import FORKSERVER, Remote, remotes
from benchmarks.harness.report import percentile
from benchmarks.harness.service import served

_EXAMPLES_MAX = 5


@dataclass(frozen=True)
class Target:
    """The table to read, through the query service at `url`, or directly if `url` is None."""

    dsn: str
    objects: str
    url: str | None = None
    table: str = "lookups"


@dataclass
class Lookups:
    """The results of look-ups."""

    seconds: list[float] = field(default_factory=list)
    """The duration of each look-up that was answered."""
    errors: int = 0
    wrong: int = 0
    stale: int = 0
    examples: list[str] = field(default_factory=list)
    elapsed_seconds: float = 0

    def percentile_ms(self, percent: int) -> float:
        return 1_000 * percentile(self.seconds, percent)

    @property
    def per_second(self) -> float:
        return len(self.seconds) / self.elapsed_seconds

    def add(self, other: Lookups) -> None:
        self.seconds += other.seconds
        self.errors += other.errors
        self.wrong += other.wrong
        self.stale += other.stale
        self.examples = (self.examples + other.examples)[:_EXAMPLES_MAX]

    def note(self, verdict: str, example: str) -> None:
        """Adds 1 to `errors`, `wrong` or `stale`, and keeps the first few examples."""
        setattr(self, verdict, getattr(self, verdict) + 1)
        self.examples = [*self.examples, f"{verdict}: {example}"][:_EXAMPLES_MAX]


class Clients:
    """The processes of the clients. They stay alive between calls of `measure`."""

    def __init__(self, processes: Sequence[Remote], stop: Any) -> None:
        self._processes = processes
        self._stop = stop

    def measure(self, over: Callable[[], bool]) -> Lookups:
        """Looks up keys until `over` returns true or a process stops early."""
        began = time.monotonic()
        self._stop.clear()
        for process in self._processes:
            process.begin("look_up")
        while not over() and not any(process.has_answered() for process in self._processes):
            time.sleep(0.02)
        found = Lookups(elapsed_seconds=time.monotonic() - began)
        self._stop.set()
        for process in self._processes:
            found.add(process.result())
        return found


@contextmanager
def clients(target: Target, ledger: Ledger, count: int, processes: int) -> Iterator[Clients]:
    """Starts `count` clients in `processes` processes, and ends them."""
    stop = FORKSERVER.Event()
    shares = [count // processes + (number < count % processes) for number in range(processes)]
    with remotes([partial(_opened, target, ledger, share, stop) for share in shares]) as made:
        yield Clients(made, stop)


class _Process:
    """The clients of one process, each with the table that it has opened."""

    def __init__(self, tables: Sequence[Any], ledger: Ledger, stop: threading.Event) -> None:
        self._tables = tables
        self._ledger = ledger
        self._stop = stop

    def look_up(self) -> Lookups:
        """Looks up keys in all threads until the benchmark sets the event `stop`."""
        stop, merged = threading.Event(), Lookups()
        with ThreadPoolExecutor(len(self._tables)) as pool:
            running = [pool.submit(_look_up, table, self._ledger, stop) for table in self._tables]
            self._stop.wait()
            stop.set()
            for each in running:
                merged.add(each.result())
        return merged


@contextmanager
def _opened(target: Target, ledger: Ledger, count: int, stop: Any) -> Iterator[_Process]:
    with ExitStack() as stack:
        # clients of the service have connections of their own; in one process, an instance is shared
        tables = [stack.enter_context(_opened_table(target)) for _ in range(count if target.url else 1)]
        yield _Process([tables[n % len(tables)] for n in range(count)], ledger, stop)


@contextmanager
def _opened_table(target: Target) -> Iterator[Any]:
    """Opens the table for one client."""
    if target.url is not None:
        from dormouse.client import connect

        with connect(target.url) as client:
            yield client.table(target.table)
    else:
        import dormouse as dm

        with dm.connect(target.dsn, target.objects, read_only=True) as instance:
            yield instance.table(target.table)


def _look_up(table: Any, ledger: Ledger, stop: threading.Event) -> Lookups:
    found, chance = Lookups(), random.Random()
    while not stop.is_set():
        key = ledger.some_key(chance)
        acknowledged = ledger.acknowledged[key]
        began = time.monotonic()
        try:
            rows = rows_of(table.query({"key": key}))
        except Exception as error:
            found.note("errors", f"key {key}: {type(error).__name__}: {error}")
            continue
        found.seconds.append(time.monotonic() - began)
        verdict = judge(key, rows, acknowledged, ledger.sent[key])
        if verdict:
            wanted = f"versions 1 to {acknowledged} or more, at most {ledger.sent[key]}"
            different = sorted(set(rows) ^ {row(key, version) for version in range(1, acknowledged + 1)})[:5]
            found.note(verdict, f"key {key}: wanted {wanted}; {len(rows)} rows, different: {different}")
    return found


@contextmanager
def through_service(target: Target, options: Sequence[str] = ()) -> Iterator[Target]:
    """Starts `dormouse serve` and yields the target with its URL; stops the service at the end."""
    with served(target.dsn, target.objects, options) as service:
        yield replace(target, url=service.url)
