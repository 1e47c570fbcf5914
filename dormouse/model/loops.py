"""Helpers for long work: progress, retries with pauses, and streams of items that threads make ahead.

Close such a stream when it is no longer needed. Closing waits for the items that are being made.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

BACKOFF_SECONDS_MIN = 0.005
BACKOFF_SECONDS_MAX = 1.0

T = TypeVar("T")

S = TypeVar("S")

Progress = Callable[[int, int | None], object]
"""A callback that gets the amount done, and the total, which is None if it is not known."""


def no_progress(done: int, total: int | None) -> None:
    """Ignores the progress of work."""


def backoff_seconds(
    attempt: int, seconds_min: float = BACKOFF_SECONDS_MIN, seconds_max: float = BACKOFF_SECONDS_MAX
) -> float:
    """Returns a random pause before the next attempt, in seconds.

    The pause is from 0 to a limit: twice `seconds_min` after the first attempt, doubled after each further
    one, and at most `seconds_max`. Source (full jitter):
    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """
    ceiling = min(seconds_max, seconds_min * 2 ** min(attempt, 20))
    return random.uniform(0, ceiling)  # noqa: S311


@dataclass(slots=True)
class Try:
    """One try of work that may be repeated, counted from 1. The caller may change the pause after it."""

    number: int
    until: float
    pause_seconds: float

    @property
    def seconds_left(self) -> float:
        return max(self.until - time.monotonic(), 0.0)


def tries(
    seconds_max: float = math.inf,
    *,
    tries_max: int | None = None,
    pause: float | Callable[[int], float] = backoff_seconds,
    sleep: Callable[[float], object] | None = None,
) -> Iterator[Try]:
    """Yields the tries of some work outside a transaction, and pauses between them.

    The caller leaves the loop when the work is done. The loop ends after `tries_max` tries, or after the
    first try that ends past `seconds_max`; the caller then raises the last error. `pause` is in seconds, or
    a function of the try's number. `sleep` replaces `time.sleep`, and may be interrupted.
    """
    until = time.monotonic() + seconds_max
    for number in itertools.count(1):
        this = Try(number, until, pause(number) if callable(pause) else pause)
        yield this
        left = this.seconds_left
        if left <= 0 or number == tries_max:
            return
        (sleep or time.sleep)(min(this.pause_seconds, left))


def ahead(items: Iterator[T], count: int) -> Generator[T, None, None]:
    """Yields the same items. A thread makes up to `count` of them before the caller asks for them."""
    return chained_ahead([items], 1, count)


def chained_ahead(streams: Iterable[Iterator[T]], threads: int, count: int) -> Generator[T, None, None]:
    """Yields the items of all streams in order.

    Threads make the first `count` items of the next `threads` streams before the caller asks for them.
    """
    with _threads(threads) as pool:
        for stream in _early(lambda stream: _begun(pool, stream, count), streams, threads):
            yield from stream


def mapped_ahead(function: Callable[[S], T], items: Iterable[S], threads: int) -> Generator[T, None, None]:
    """Yields the function's result for each item, in order.

    Threads make up to `threads` results before the caller asks for them.
    """
    with _threads(threads) as pool:
        yield from map(Future.result, _early(lambda item: pool.submit(function, item), items, threads))


def _early(begin: Callable[[S], T], items: Iterable[S], count: int) -> Iterator[T]:
    """Yields `begin(item)` for each item, in order; `begin` is called `count` items ahead."""
    begun: deque[T] = deque()
    for item in items:
        begun.append(begin(item))
        if len(begun) > count:
            yield begun.popleft()
    while begun:
        yield begun.popleft()


def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="dormouse-ahead")


def _begun(pool: ThreadPoolExecutor, items: Iterator[T], count: int) -> Iterator[T]:
    def some() -> list[T]:
        return list(islice(items, count))

    def all_of(made: Future[list[T]]) -> Iterator[T]:
        while found := made.result():
            made = pool.submit(some)
            yield from found

    return all_of(pool.submit(some))


def joined(parts: Sequence[T], join: Callable[[T, T], T]) -> T:
    """Joins all parts (at least one), half with half, so that the nesting is only logarithmic."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return join(joined(parts[:middle], join), joined(parts[middle:], join))


def portions(items: Iterable[T], size_of: Callable[[T], float], size_min: float) -> Iterator[list[T]]:
    """Yields the items in lists. A list ends at the item with which its total size reaches `size_min`."""
    held: list[T] = []
    size = 0.0
    for item in items:
        held.append(item)
        size += size_of(item)
        if size >= size_min:
            yield held
            held, size = [], 0.0
    if held:
        yield held
