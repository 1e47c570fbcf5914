"""Abandoned readers that the garbage collector frees, in any thread and at any moment."""

from __future__ import annotations

import concurrent.futures.thread
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from dormouse.reading.streams import _read, batches_ahead, in_thread, undisturbed
from tests.support.reading import Interruption

STREAMS = {"ahead": batches_ahead, "in a thread": in_thread, "here": undisturbed}
BATCHES = [pa.record_batch({"n": [number]}) for number in range(10)]


def dropped_in_a_cycle(stream: Any, taken: int) -> None:
    """Reads some batches, and then leaves the stream in a cycle of references.

    Only the garbage collector frees such a stream.
    """
    for _ in range(taken):
        next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)


@pytest.mark.few(1)
@pytest.mark.parametrize("taken", [1, 3])
@pytest.mark.parametrize("streamed", STREAMS)
def test_freeing_a_reader_waits_for_no_lock_of_the_thread(streamed: str, taken: int) -> None:
    lock, closed = threading.Lock(), threading.Event()

    def items() -> Iterator[pa.RecordBatch]:
        try:
            yield from BATCHES
        finally:
            with lock:
                closed.set()

    def collect() -> None:
        # holds the lock that a submit to a thread pool takes, and the one that closing the source takes
        with concurrent.futures.thread._global_shutdown_lock, lock:
            gc.collect()

    gc.collect()
    make: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] = STREAMS[streamed]
    dropped_in_a_cycle(make(items()), taken)
    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    collector.join(30)
    assert not collector.is_alive()
    assert closed.wait(30)


@pytest.mark.parametrize("streamed", STREAMS)
def test_nothing_is_kept_of_a_stream_that_ended_or_failed(streamed: str) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield from BATCHES[:3]
        raise ValueError

    def emptied() -> bool:
        for _ in range(3_000):
            if len(_read) == before:
                return True
            threading.Event().wait(0.01)
        return False

    before = len(_read)
    make: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] = STREAMS[streamed]
    assert list(make(batch for batch in BATCHES)) == BATCHES
    assert list(make(iter(BATCHES))) == BATCHES
    with pytest.raises(ValueError):
        list(make(failing()))
    assert emptied()


def test_an_interruption_can_be_set_by_a_thread_that_holds_its_lock() -> None:
    """The garbage collector may run in a thread that is just registering a wait with the interruption."""
    interruption, done = Interruption(), threading.Event()

    def collect() -> None:
        with interruption._lock:
            interruption.set()
        done.set()

    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(30)


@pytest.mark.slow
@pytest.mark.parametrize("taken", [1, 3])
def test_a_reader_dropped_at_the_end_of_a_program_is_closed(taken: int) -> None:
    code = f"""
import gc
import pyarrow as pa
from dormouse.reading.streams import batches_ahead
def items():
    try:
        for number in range(10):
            yield pa.record_batch({{"n": [number]}})
    finally:
        print("ended", flush=True)
stream = batches_ahead(items())
for _ in range({taken}):
    next(stream)
del stream
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr, done.returncode) == ("ended\n", "", 0)


@pytest.mark.slow
def test_a_forked_child_closes_the_readers_it_drops() -> None:
    code = """
import os, threading, time
import pyarrow as pa
from dormouse.reading import streams
from dormouse.reading.streams import batches_ahead
batches = [pa.record_batch({"n": [number]}) for number in range(4)]
assert list(batches_ahead(iter(batches))) == batches
while not streams._idle:  # until the threads have started and one waits for a reader
    time.sleep(0.01)
if not (child := os.fork()):
    closed = threading.Event()
    def items():
        try:
            yield from batches
        finally:
            closed.set()
    stream = batches_ahead(items())
    for _ in range(3):
        next(stream)
    del stream
    os._exit(0 if closed.wait(30) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.slow
def test_a_program_that_ends_with_an_open_reader_waits_for_one_batch() -> None:
    code = """
import time
import pyarrow as pa
from dormouse.reading.streams import batches_ahead
def items():
    while True:
        yield pa.record_batch({"n": [1]})
        time.sleep(0.3)
stream = batches_ahead(items())
for _ in range(3):
    next(stream)
print("the end", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=20
    )
    assert (done.stdout, done.stderr, done.returncode) == ("the end\n", "", 0)
