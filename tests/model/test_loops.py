"""Items that threads make. They come in order and in limited numbers, and the threads end with the
consumer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pyarrow as pa
import pytest

from dormouse.errors import InvalidData
from dormouse.model.loops import ahead, chained_ahead, mapped_ahead, tries
from dormouse.sources import source


def failing_after(items: int) -> Iterator[int]:
    yield from range(items)
    raise InvalidData(f"item {items} is bad")


def threads() -> int:
    return sum(thread.name.startswith("dormouse-ahead") for thread in threading.enumerate())


def test_all_items_come_in_their_order() -> None:
    streams = [range(size) for size in (0, 5, 1, 0, 40, 3)]
    assert list(chained_ahead(map(iter, streams), 2, 3)) == [item for each in streams for item in each]
    assert list(ahead(iter(range(100)), 7)) == list(range(100))
    assert list(mapped_ahead(str, range(100), 3)) == list(map(str, range(100)))


def test_an_error_is_raised_in_the_order_of_the_items() -> None:
    """A later stream fails long before an earlier one does."""
    found = []
    with pytest.raises(InvalidData, match="item 2 is bad"):
        for item in chained_ahead([iter(range(50)), failing_after(2), failing_after(0)], 2, 2):
            found.append(item)
    assert found[:50] == list(range(50))


def test_only_a_few_unread_items_are_made_ahead() -> None:
    made: list[int] = []

    def counted(number: int) -> Iterator[int]:
        for item in count():
            made.append(item)
            yield number

    stream = chained_ahead(map(counted, count()), 2, 3)
    assert [next(stream) for _ in range(6)] == [0] * 6
    stream.close()
    assert threads() == 0
    assert len(made) <= 3 * 4 + 3  # three streams that have begun, and the next items of the first


@pytest.mark.slow
def test_many_small_files_are_read_as_few_batches() -> None:
    def read(number: int) -> Iterator[pa.RecordBatch]:
        if number == 9_000:
            raise InvalidData("file 9000 is bad")
        yield pa.record_batch([pa.array([number, number])], names=["n"])

    found: list[pa.RecordBatch] = []
    with pytest.raises(InvalidData, match="file 9000"):
        found.extend(source.read_files(range(10_000), read, lambda _: 100))
    batches = list(source.read_files(range(8_000), read, lambda _: 100))
    assert pa.Table.from_batches(batches)["n"].to_pylist() == [n for n in range(8_000) for _ in "12"]
    assert len(batches) <= 8_000 / source.FILES_TOGETHER
    assert list(source.each_file(str, range(1_000))) == list(map(str, range(1_000)))


def test_tries_end_after_the_last_and_pause_between_them() -> None:
    """The caller may lengthen the pause after a try. There is no pause after the last try."""
    slept: list[float] = []
    numbers = []
    for this in tries(tries_max=4, pause=lambda number: number / 10, sleep=slept.append):
        numbers.append(this.number)
        if this.number == 2:
            this.pause_seconds = 7
    assert (numbers, slept) == ([1, 2, 3, 4], [0.1, 7, pytest.approx(0.3)])


def test_no_try_begins_after_the_time_limit_and_no_pause_exceeds_it() -> None:
    slept: list[float] = []
    for this in tries(60, pause=100, sleep=slept.append):
        assert 0 < this.seconds_left <= 60
        if this.number == 2:
            this.until = 0.0
    assert len(slept) == 1
    assert 59 < slept[0] <= 60
    assert len(list(tries(0, pause=100))) == 1
