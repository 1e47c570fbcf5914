"""Streams of batches, of which some are made ahead in a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import pyarrow as pa

from dormouse.errors import InvalidQuery, not_installed
from dormouse.model.text import COLUMNS_SHOWN, shown_list
from dormouse.reading.sources import Source, worker

if TYPE_CHECKING:
    import pyarrow as pa

# Answers as DataFrames of other libraries, where these are installed.


class Frames:
    """All rows of a reader, in one call; each row of a reader is read once."""

    def arrow(self) -> pa.Table:
        """Returns the rows as a table of Arrow."""
        reader: pa.RecordBatchReader = self
        return reader.read_all()

    def df(self) -> Any:
        """Returns the rows as a DataFrame of pandas; raises `DependencyMissing`."""
        return pandas_of(lambda: self)

    def pl(self) -> Any:
        """Returns the rows as a DataFrame of Polars; raises `DependencyMissing`."""
        return polars_of(lambda: self)


def shown_reader(schema: pa.Schema) -> str:
    """Returns how a reader shows itself: its columns, and how its rows are read."""
    named = shown_list([f"{field.name} {field.type}" for field in schema], COLUMNS_SHOWN)
    return f"Answer({named}; a reader, whose rows are read once: by batches, arrow(), df() or pl())"


def pandas_of(ask: Callable[[], pa.RecordBatchReader]) -> Any:
    """All rows of an answer; `DependencyMissing` before it is asked for."""
    if find_spec("pandas") is None:
        raise not_installed("pandas", "pandas")
    return ask().read_all().to_pandas()


def polars_of(ask: Callable[[], pa.RecordBatchReader]) -> Any:
    """As `pandas_of`."""
    try:
        import polars
    except ImportError:
        raise not_installed("polars", "polars") from None
    reader = ask()
    for field in reader.schema:
        if _has_intervals(field.type):
            raise InvalidQuery(
                f"column {field.name!r} has intervals, which Polars does not have: cast it to VARCHAR, or "
                "take arrow() or df()"
            )
    return polars.from_arrow(reader.read_all())


def _has_intervals(kind: pa.DataType) -> bool:
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return str(kind) == "month_day_nano_interval" or any(map(_has_intervals, inner))


T = TypeVar("T")
SIGNALS_SECONDS = 0.2
"""How long a signal may go unheard."""
AHEAD_BYTES = 4 * 1024 * 1024
"""Of batches that are made and not taken, before no more is made."""
BATCH_BYTES = 1_024
"""That a batch takes besides its values, of which it may have none."""


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


def batches_ahead(
    batches: Iterator[pa.RecordBatch], interrupt: Callable[[], object] = lambda: None
) -> Iterator[pa.RecordBatch]:
    """The same batches; from the third on, some are made in a thread while those before them are used.

    So an answer of one batch needs no thread. Dropping it ends the source, in a thread, when that has made
    what it is at, or has heeded `interrupt`.
    """
    with Ahead(batches, interrupt, _weight, AHEAD_BYTES) as made:
        yield from made


def in_thread(
    batches: Iterator[pa.RecordBatch], interrupt: Callable[[], object] = lambda: None
) -> Iterator[pa.RecordBatch]:
    """As `batches_ahead`, but in the thread from the first on."""
    with Ahead(batches, interrupt, _weight, AHEAD_BYTES) as made:
        made.begin()
        yield from made


def undisturbed(items: Iterator[T]) -> Iterator[T]:
    """The same items, made where they are asked for; dropping it ends the source in a thread."""
    source = Source(items)
    try:
        yield from islice(items, None)  # through which closing does not reach them
    finally:
        source.drop()


def _weight(batch: pa.RecordBatch) -> int:
    return int(batch.nbytes) + BATCH_BYTES


class Ahead(Generic[T]):
    """Items, of which the first two are made where they are asked for, and the others in a thread.

    That makes more as long as what was not taken yet weighs less than `most`. It is a context, which ends the
    source: within a generator also when that is dropped. There is no lock that a signal could leave taken.
    """

    def __init__(
        self,
        items: Iterator[T],
        interrupt: Callable[[], object] = lambda: None,
        weigh: Callable[[T], int] = lambda _: 1,
        most: int = 1,
    ) -> None:
        self._source = Source(items, interrupt)
        self._weigh = weigh
        self._most = most
        self._has_first = False
        self._is_left = False
        self._made: SimpleQueue[tuple[T, int] | _End] = SimpleQueue()
        """What was not taken yet, with what it weighs."""
        self._made_weight = self._taken_weight = 0
        """Of all items: the first is counted by the thread, the other by the reader."""
        self._pauses: deque[None] = deque()
        """Has one as long as the thread makes none: who takes it out has it go on."""

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        self._made = SimpleQueue()
        self._source.drop()

    def __iter__(self) -> Ahead[T]:
        return self

    def __next__(self) -> T:
        if self._source.worker is not None:
            return self._taken(self._source.worker)
        item = next(self._source.items)
        if self._has_first:
            self.begin()
        self._has_first = True
        return item

    def begin(self) -> None:
        """Has the thread make the next ones from now on."""
        if self._source.worker is None:
            self._source.worker = worker()
            self._source.worker.submit(self._make, self._source.worker)

    def _taken(self, worker: ThreadPoolExecutor) -> T:
        while True:
            with suppress(Empty):
                # a signal ends the wait even if a library has it begun anew, as Polars does
                found = self._made.get(timeout=SIGNALS_SECONDS)
                break
        if isinstance(found, _End):
            self._made.put(_End())
            try:
                raise found.error or StopIteration
            finally:
                del found  # the error has this frame, which would have the error
        item, weight = found
        self._taken_weight += weight
        self._go_on(worker)
        return item

    def _make(self, worker: ThreadPoolExecutor) -> None:
        """An item, in the thread, and then the next, if there are to be more.

        Each is a job of its own: when the program ends the thread is waited for, and has no more jobs.
        """
        if self._is_left:
            return
        try:
            item = next(self._source.items)
            weight = self._weigh(item)
            self._made_weight += weight
            self._made.put((item, weight))
            del item
            if self._made_weight - self._taken_weight < self._most and not self._is_left:
                worker.submit(self._make, worker)
            else:
                self._pauses.append(None)
                self._go_on(worker)  # all may have been taken meanwhile
        except StopIteration:
            self._made.put(_End())
        except BaseException as error:
            if not self._is_left:
                self._made.put(_End(error))

    def _go_on(self, worker: ThreadPoolExecutor) -> None:
        if self._made_weight - self._taken_weight <= self._most // 2 and not self._is_left:
            with suppress(IndexError):
                self._pauses.popleft()
                worker.submit(self._make, worker)


@dataclass(frozen=True, slots=True)
class _End:
    """Of a source: by an error, or because there is no more."""

    error: BaseException | None = None


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


# Answers as users hold them: a stream of batches that other libraries take in one call.


class Answer(Frames):
    """A `pyarrow.RecordBatchReader`, with `arrow()`, `df()` and `pl()` for all of its rows.

    Arrow makes no readers of other classes than its own: this one passes on what it
    is asked, and counts as one for `isinstance`.
    """

    def __init__(self, reader: pa.RecordBatchReader) -> None:
        self._reader = reader

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return pa.RecordBatchReader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self._reader)})

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._reader.__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        return shown_reader(self._reader.schema)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pa.RecordBatch:
        return next(self._reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
