"""Items that a thread makes ahead: their number, errors among them, and the life of the thread."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

import pyarrow as pa
import pytest

from dormouse.reading import streams
from dormouse.reading.streams import AHEAD_BYTES, Ahead, batches_ahead, in_thread, interruptible_call
from tests.stored import wait_until


def one_ahead(items: Iterator[int]) -> Iterator[int]:
    with Ahead(items) as made:
        yield from made


def test_one_item_is_made_ahead_and_no_more() -> None:
    """While a consumer uses an item, the thread makes one more. The thread starts with the second item."""
    made: list[int] = []
    third = threading.Event()

    def items() -> Iterator[int]:
        for number in range(5):
            made.append(number)
            if number == 2:
                third.set()
            yield number

    stream = one_ahead(items())
    assert made == []
    assert next(stream) == 0
    assert made == [0]
    assert next(stream) == 1
    assert third.wait(60)
    time.sleep(0.05)
    assert made == [0, 1, 2]
    assert list(stream) == [2, 3, 4]


def test_an_error_comes_after_the_items_made_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise LookupError("gone")

    stream = one_ahead(items())
    assert next(stream) == 1
    with pytest.raises(LookupError, match="gone"):
        next(stream)


def test_a_stream_that_is_closed_ends_its_thread_and_its_source() -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from range(1_000)
        finally:
            closed.set()

    for used in (1, 2, 3):
        closed.clear()
        stream = one_ahead(items())
        for _ in range(used):
            next(stream)
        del stream
        assert closed.wait(60)


def batch(size: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array([b"x" * size], pa.binary())})


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 100_000, AHEAD_BYTES])
def test_batches_are_made_ahead_up_to_some_bytes(size: int) -> None:
    """Empty batches also count as some bytes. The thread goes on when half of the bytes were taken."""
    made = count()
    stream = in_thread(batch(size) for _ in made)
    next(stream)
    most = AHEAD_BYTES // (size + 1_000) + 2
    settled = _settled(made)
    assert most // 2 <= settled <= most + 1
    taken = 1 + sum(1 for _, _ in zip(range(most), stream, strict=False))
    assert most < _settled(made) <= taken + most + 1


def _settled(made: Iterator[int]) -> int:
    """Waits until no more items are made, and returns their number."""
    before = -1
    while (now := int(repr(made)[6:-1])) != before:
        before = now
        time.sleep(0.2)
    return now


def test_a_thread_that_makes_many_items_ends_when_its_reader_is_dropped() -> None:
    closed = threading.Event()

    def items() -> Iterator[pa.RecordBatch]:
        try:
            while True:
                time.sleep(0.02)
                yield batch(1)
        finally:
            closed.set()

    stream = batches_ahead(items())
    for _ in range(3):
        next(stream)
    del stream
    assert closed.wait(20)


def test_a_failure_comes_after_all_batches_that_the_thread_made_before_it() -> None:
    def items() -> Iterator[pa.RecordBatch]:
        yield from (batch(1) for _ in range(20))
        raise LookupError("gone")

    stream = batches_ahead(items())
    assert [next(stream).num_rows for _ in range(20)] == [1] * 20
    with pytest.raises(LookupError, match="gone"):
        next(stream)


@pytest.mark.few(1)
@pytest.mark.parametrize("read", ["whole", "failed", "dropped"])
def test_the_memory_of_a_reader_is_freed_with_it(read: str) -> None:
    """Python's garbage collector does not know how much memory Arrow holds, so it could run too late."""

    def items() -> Iterator[pa.RecordBatch]:
        yield from (batch(100_000) for _ in range(20))
        if read == "failed":
            raise LookupError("gone")

    gc.collect()
    before = pa.total_allocated_bytes()
    gc.disable()
    try:
        for _ in range(20):
            stream = batches_ahead(items())
            with suppress(LookupError):
                for number, _ in enumerate(stream):
                    if read == "dropped" and number == 3:
                        break
            del stream, _
        wait_until(lambda: pa.total_allocated_bytes() <= before)
    finally:
        gc.enable()


def test_a_thread_serves_one_reader_after_another() -> None:
    wait_until(lambda: len(_threads()) == len(streams._idle))  # no reader of another test has one
    streams.end_idle()

    def thread_of_a_reader() -> int:
        def items() -> Iterator[pa.RecordBatch]:
            for _ in range(3):
                found.add(threading.get_ident())
                yield batch(1)

        found: set[int] = set()
        assert len(list(in_thread(items()))) == 3
        [thread] = found
        return thread

    first = thread_of_a_reader()
    wait_until(lambda: len(streams._idle) == 1)
    assert thread_of_a_reader() == first
    wait_until(lambda: len(streams._idle) == 1)
    streams.end_idle()
    assert not any(thread.ident == first for thread in threading.enumerate())


def test_calls_that_ctrl_c_may_interrupt_have_a_thread_that_is_kept() -> None:
    wait_until(lambda: len(_threads()) == len(streams._idle))  # no reader of another test has one
    streams.end_idle()

    def fail() -> None:
        failed.append(threading.get_ident())
        raise LookupError("gone")

    failed: list[int] = []
    threads = {interruptible_call(threading.get_ident, lambda: None) for _ in range(3)}
    with pytest.raises(LookupError, match="gone"):
        interruptible_call(fail, lambda: None)
    assert threads == {*failed}
    assert threads != {threading.get_ident()}
    assert len(streams._idle) == 1
    streams.end_idle()


def test_few_threads_are_kept() -> None:
    dropped = [in_thread(batch(1) for _ in range(5)) for _ in range(2 * streams.IDLE_MAX)]
    for stream in dropped:
        next(stream)
    threads = _threads()
    assert len(threads) >= len(dropped)
    del stream, dropped
    wait_until(lambda: sum(thread.is_alive() for thread in threads) <= streams.IDLE_MAX)
    wait_until(lambda: len(streams._idle) == streams.IDLE_MAX)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("dormouse-query")]
