"""Streams of batches, of which some are made ahead in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar, cast

import pyarrow as pa

from dormouse.query.sources import Source

T = TypeVar("T")
SIGNALS_SECONDS = 0.2
"""How long a signal may go unheard."""


def first_rows(reader: pa.RecordBatchReader, limit: int) -> pa.RecordBatchReader:
    """The rows up to the limit; no batch is read beyond it."""

    def batches() -> Iterator[pa.RecordBatch]:
        remaining = limit
        while remaining and (batch := next(reader, None)) is not None:
            part = batch.slice(0, remaining)
            remaining -= part.num_rows
            yield part

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def without_first(reader: pa.RecordBatchReader, rows: int) -> pa.RecordBatchReader:
    """The rows after so many."""

    def batches() -> Iterator[pa.RecordBatch]:
        left = rows
        for batch in reader:
            if left < batch.num_rows:
                yield batch.slice(left)
            left = max(0, left - batch.num_rows)

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def one_ahead(items: Iterator[T], interrupt: Callable[[], object] = lambda: None) -> Iterator[T]:
    """The same items; from the second on, each is made in a thread while the one before it is used.

    So an answer of one item needs no thread. Dropping it ends the source, in a thread, when that has made
    what it is at, or has heeded `interrupt`.
    """
    source, end = Source(items, interrupt), object()
    try:
        yield from islice(items, 1)
        second: T | object = next(items, end)
        if second is not end:
            yield from _made_in_thread(source, [cast(T, second)])
    finally:
        source.drop()


def in_thread(
    items: Iterator[T], interrupt: Callable[[], object] = lambda: None, given: Iterable[T] = ()
) -> Iterator[T]:
    """What is given, and the items, each made in a thread while the one before it is used."""
    source = Source(items, interrupt)
    try:
        yield from _made_in_thread(source, given)
    finally:
        source.drop()


def undisturbed(items: Iterator[T]) -> Iterator[T]:
    """The same items, made where they are asked for; dropping it ends the source in a thread."""
    source = Source(items)
    try:
        yield from islice(items, None)  # through which closing does not reach them
    finally:
        source.drop()


def _made_in_thread(source: Source[T], given: Iterable[T]) -> Iterator[T]:
    end = object()
    worker = source.worker = ThreadPoolExecutor(1, thread_name_prefix="dormouse-query")
    upcoming: Future[T | object] = worker.submit(next, source.items, end)
    yield from given
    while (item := _result(upcoming)) is not end:
        upcoming = worker.submit(next, source.items, end)
        yield item  # type: ignore[misc]


def heeding_signals(call: Callable[[], T], interrupt: Callable[[], object]) -> T:
    """What a call gives; where Ctrl-C arrives, a thread makes it: code that is not Python's hears none."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    with ThreadPoolExecutor(1, thread_name_prefix="dormouse-query") as worker:
        made = worker.submit(call)
        try:
            return _result(made)
        finally:
            if not made.done():
                interrupt()


def _result(made: Future[T]) -> T:
    """What a thread gives; a signal ends the wait even if a library has it begun anew, as Polars does."""
    while not made.done():
        wait([made], SIGNALS_SECONDS)
    return made.result()
