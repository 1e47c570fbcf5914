"""Processes of clients: threads that look up keys one after another, and judge every answer."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.concurrency.ledger import PROCESSES, Ledger, judge, row, rows_of

_EXAMPLES_MAX = 5


@dataclass(frozen=True)
class Target:
    """What is asked: a query service at `url`, or else the façade, in the clients' processes."""

    dsn: str
    objects: str
    url: str | None = None
    table: str = "lookups"


@dataclass
class Lookups:
    """What became of look-ups; `seconds` of those that were answered."""

    seconds: list[float] = field(default_factory=list)
    errors: int = 0
    wrong: int = 0
    stale: int = 0
    examples: list[str] = field(default_factory=list)
    elapsed_seconds: float = 0

    def percentile_ms(self, percent: int) -> float:
        if len(self.seconds) < 2:
            return 1_000 * sum(self.seconds)
        return 1_000 * statistics.quantiles(self.seconds, n=100, method="inclusive")[percent - 1]

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
        """One more of `errors`, `wrong` or `stale`."""
        setattr(self, verdict, getattr(self, verdict) + 1)
        self.examples = [*self.examples, f"{verdict}: {example}"][:_EXAMPLES_MAX]


class Clients:
    """The processes, which stay for every phase."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def measure(self, over: Callable[[], bool]) -> Lookups:
        """Looks up keys until it is over."""
        began = time.monotonic()
        for pipe in self._pipes:
            pipe.send("start")
        while not over() and not any(pipe.poll() for pipe in self._pipes):
            time.sleep(0.02)
        found = Lookups(elapsed_seconds=time.monotonic() - began)
        for pipe in self._pipes:
            pipe.send("stop")
        for pipe in self._pipes:
            found.add(received(pipe))
        return found


@contextmanager
def clients(target: Target, ledger: Ledger, count: int, processes: int) -> Iterator[Clients]:
    """Starts so many clients, and ends them."""
    shares = [count // processes + (number < count % processes) for number in range(processes)]
    with ExitStack() as stack:
        pipes = [stack.enter_context(worker(_work, target, ledger, share)) for share in shares]
        for pipe in pipes:
            received(pipe)
        yield Clients(pipes)


@contextmanager
def worker(main: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process that is ended with its pipe."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=main, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()


def received(pipe: Connection) -> Any:
    """The next message; raises it when it is an error."""
    found = pipe.recv()
    if isinstance(found, Exception):
        raise found
    return found


def _work(pipe: Connection, target: Target, ledger: Ledger, count: int) -> None:
    """A process's main: a phase for each start, until the benchmark ends."""
    try:
        with ExitStack() as stack:
            ask = [stack.enter_context(_asking(target)) for _ in range(count if target.url else 1)]
            pipe.send("ready")
            while True:
                pipe.recv()
                pipe.send(_phase(pipe, [ask[n % len(ask)] for n in range(count)], ledger))
    except (EOFError, ConnectionError):
        pass  # the benchmark ended
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


@contextmanager
def _asking(target: Target) -> Iterator[Any]:
    """A client's table."""
    if target.url is not None:
        from dormouse.client import connect

        with connect(target.url) as client:
            yield client.table(target.table)
    else:
        import dormouse as dm

        with dm.connect(target.dsn, target.objects, read_only=True) as instance:
            yield instance.table(target.table)


def _phase(pipe: Connection, tables: Sequence[Any], ledger: Ledger) -> Lookups:
    stop = threading.Event()
    found = [Lookups() for _ in tables]
    threads = [
        threading.Thread(target=_look_up, args=(table, ledger, each, stop), daemon=True)
        for table, each in zip(tables, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        pipe.recv()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    merged = Lookups()
    for each in found:
        merged.add(each)
    return merged


def _look_up(table: Any, ledger: Ledger, found: Lookups, stop: threading.Event) -> None:
    chance = random.Random()
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
            odd = sorted(set(rows) ^ {row(key, version) for version in range(1, acknowledged + 1)})[:5]
            found.note(verdict, f"key {key}: wanted {wanted}; {len(rows)} rows, different: {odd}")
