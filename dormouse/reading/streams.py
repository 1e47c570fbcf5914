"""Streams of batches that a thread prepares in advance.

Another thread can interrupt such a stream. It ends when its reader is dropped.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from dormouse.errors import DormouseError, InvalidQuery, not_installed
from dormouse.model.text import COLUMNS_SHOWN, shown_list

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
SIGNALS_SECONDS = 0.2
"""The longest time in seconds before a waiting thread reacts to a signal."""
AHEAD_BYTES = 4 * 1024 * 1024
"""The most bytes of batches that a thread makes before the reader takes them."""
BATCH_BYTES = 1_024
"""The bytes that each batch counts in addition to its values, because a batch may have no values."""
AGAIN_SECONDS = 0.01
ENDING_AT_ONCE = 4
IDLE_MAX = 16
EXIT_SECONDS_MAX = 1.0
_idle: deque[ThreadPoolExecutor] = deque()
# strong references: garbage collection would otherwise close the source of a dropped reader in any thread
_read: set[Source[Any]] = set()


class Source(Generic[T]):
    """A stream of items, which is ended when its reader has finished or is dropped."""

    __slots__ = ("_interrupt", "items", "worker")

    def __init__(self, items: Iterator[T], interrupt: Callable[[], object] = lambda: None) -> None:
        self.items = items
        self.worker: ThreadPoolExecutor | None = None
        """The only thread that takes items from `items`; None if the reader's thread takes them."""
        self._interrupt = interrupt
        _Ending.begin()
        _read.add(self)

    def drop(self) -> None:
        """Requests that a background thread ends this source. It takes no lock and does not wait."""
        if self.worker is None and getattr(self.items, "gi_frame", None) is None:
            _read.discard(self)  # the generator has already ended
        else:
            _Ending.dropped.put(self)

    def end(self, threads: ThreadPoolExecutor) -> None:
        """Closes `items` in the thread that makes them, after the step that is running."""
        _read.discard(self)
        worker, self.worker = self.worker, None
        if worker is not None:
            self._interrupt()
        try:
            if isinstance(self.items, Generator):
                (worker or threads).submit(self.items.close)
            if worker is not None:
                worker.submit(_note_idle, worker)
        except RuntimeError:  # the process is ending and starts no more threads
            with suppress(Exception):
                self.items.close()  # type: ignore[attr-defined]


def worker() -> ThreadPoolExecutor:
    """Returns a thread for a source. It reuses an idle thread, since a new one has to allocate memory."""
    try:
        return _idle.pop()
    except IndexError:
        return ThreadPoolExecutor(1, thread_name_prefix="dormouse-query")


def end_idle() -> None:
    """Ends the threads that no source needs."""
    while _idle:
        worker().shutdown()


def _note_idle(worker: ThreadPoolExecutor) -> None:
    if len(_idle) < IDLE_MAX:
        _idle.append(worker)
    else:
        worker.shutdown(wait=False)


class _Ending:
    """The process's background thread, which ends the sources of dropped readers.

    Python's garbage collector may drop a reader in any thread. If that thread holds a lock that is needed to
    end the reader's source, ending the source there would wait without end.
    """

    dropped: SimpleQueue[Source[Any] | None] = SimpleQueue()
    _lock = threading.Lock()
    _thread: threading.Thread | None = None

    @classmethod
    def reset(cls) -> None:
        """Resets the state in a forked child, which has no such threads and whose queue may be locked."""
        _idle.clear()
        cls.dropped, cls._lock, cls._thread = SimpleQueue(), threading.Lock(), None

    @classmethod
    def begin(cls) -> None:
        if cls._thread is not None and cls._thread.is_alive():
            return
        with cls._lock, suppress(RuntimeError):  # no thread starts while the program ends
            if cls._thread is None or not cls._thread.is_alive():
                cls._thread = threading.Thread(target=cls._run, name="dormouse-sources", daemon=True)
                cls._thread.start()

    @classmethod
    def _run(cls) -> None:
        threads = ThreadPoolExecutor(ENDING_AT_ONCE, thread_name_prefix="dormouse-sources")
        while (source := cls.dropped.get()) is not None:
            source.end(threads)
            del source
        threads.shutdown(wait=False)

    @classmethod
    def end(cls) -> None:
        """Ends the remaining dropped sources when the program exits, so that they release what they hold."""
        if cls._thread is not None and cls._thread.is_alive():
            cls.dropped.put(None)
            cls._thread.join(EXIT_SECONDS_MAX)


os.register_at_fork(after_in_child=_Ending.reset)
atexit.register(_Ending.end)


class Interruption:
    """A switch with which any thread stops the work of a query. Once set, it stays set."""

    def __init__(self) -> None:
        # reentrant: garbage collection may drop one of the query's readers while this thread holds the lock
        self._lock = threading.RLock()
        self._awaited: dict[object, Future[Any]] = {}
        self._ended: Callable[[], object] | None = None
        self.is_set = False

    def set(self) -> None:
        """Stops the work that is running now, and everything that begins later."""
        with self._lock:
            self.is_set = True
            for upcoming in self._awaited.values():
                upcoming.cancel()
            ended = self._ended
        if ended is not None:
            threading.Thread(target=self._end, args=(ended,), name="dormouse-interrupt", daemon=True).start()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Calls `end` repeatedly after the interruption is set, until the block ends."""
        with self._lock:
            self.check()
            self._ended = end
        try:
            yield
        finally:
            with self._lock:
                self._ended = None
        self.check()

    def _end(self, end: Callable[[], object]) -> None:
        # repeated, since a call that has not begun yet ignores the first
        while self._ended is end:
            with suppress(Exception):  # it may have ended and been closed just before
                end()
            time.sleep(AGAIN_SECONDS)

    def check(self) -> None:
        """Raises `DormouseError` if the interruption is set."""
        if self.is_set:
            raise DormouseError("the query was interrupted")

    def checked(self, items: Iterable[T]) -> Iterator[T]:
        """Yields items; raises `DormouseError` once the query was interrupted."""
        for item in items:
            self.check()
            yield item

    def awaits(self, reader: object, upcoming: Future[Any] | None) -> None:
        """Records the future for which a reader of the query waits; None if it no longer waits."""
        with self._lock:
            if upcoming is None:
                self._awaited.pop(reader, None)
                return
            self._awaited[reader] = upcoming
            if self.is_set:
                upcoming.cancel()


def first_rows(reader: pa.RecordBatchReader, limit: int) -> pa.RecordBatchReader:
    """Returns a reader of the first `limit` rows. It reads no batch beyond them."""
    import pyarrow as pa

    return pa.RecordBatchReader.from_batches(reader.schema, up_to(reader, limit))


def up_to(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """Yields rows up to the limit, or all rows if it is None. It reads no batch beyond the limit."""
    if limit is None:
        yield from batches
        return
    while limit and (batch := next(batches, None)) is not None:
        part = batch.slice(0, limit)
        limit -= part.num_rows
        yield part


def without_first(reader: pa.RecordBatchReader, rows: int) -> pa.RecordBatchReader:
    """Returns a reader of the rows after the first `rows` rows."""
    import pyarrow as pa

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
    """Yields the same batches. From the third on, a thread makes them while the caller uses earlier ones.

    So an answer of one batch needs no thread. Dropping the iterator ends the source, in a thread, once its
    current step has ended or `interrupt` has stopped it.
    """
    with Ahead(batches, interrupt, _weight, AHEAD_BYTES) as made:
        yield from made


def in_thread(
    batches: Iterator[pa.RecordBatch], interrupt: Callable[[], object] = lambda: None
) -> Iterator[pa.RecordBatch]:
    """Yields the same batches, all made by a thread. It is interrupted and dropped like `batches_ahead`."""
    with Ahead(batches, interrupt, _weight, AHEAD_BYTES) as made:
        made.begin()
        yield from made


def undisturbed(items: Iterator[T]) -> Iterator[T]:
    """Yields items that the caller's thread makes. If the iterator is dropped, a thread ends the source."""
    source = Source(items)
    try:
        yield from islice(items, None)  # `islice` keeps `close` from reaching the items
    finally:
        source.drop()


def _weight(batch: pa.RecordBatch) -> int:
    return int(batch.nbytes) + BATCH_BYTES


class Ahead(Generic[T]):
    """An iterator whose first two items are made by the caller's thread, and the others by another thread.

    The other thread makes items until those that the reader has not taken weigh `most`. As a context manager
    it ends the source, even if the generator that uses it is dropped. It uses no lock, because an exception
    from a signal handler could leave a lock held.
    """

    # `loops.ahead` differs: its end waits for its thread, since writers then delete what the thread read.
    # Here the end must not wait, as garbage collection may call it in a thread that holds a lock.

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
        """The made items that the reader has not taken, with their weights."""
        self._made_weight = self._taken_weight = 0
        """The total weight of the items that the thread has made, and of those that the reader has taken."""
        self._pauses: deque[None] = deque()
        """Contains an item while the thread makes nothing.

        The thread that removes the item, the reader's or the maker's, schedules the next step.
        """

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
        """Starts a thread that makes all further items."""
        if self._source.worker is None:
            self._source.worker = worker()
            self._source.worker.submit(self._make, self._source.worker)

    def _taken(self, worker: ThreadPoolExecutor) -> T:
        while True:
            with suppress(Empty):
                # the timeout lets a signal end the wait, even if a library retries the wait, as Polars does
                found = self._made.get(timeout=SIGNALS_SECONDS)
                break
        if isinstance(found, _End):
            self._made.put(_End())
            try:
                raise found.error or StopIteration
            finally:
                del found  # the error's traceback has this frame, which would refer to the error
        item, weight = found
        self._taken_weight += weight
        self._go_on(worker)
        return item

    def _make(self, worker: ThreadPoolExecutor) -> None:
        """Makes an item in the thread, and schedules the next one unless enough items wait.

        Each item is a job of its own. At its end, the program waits for the jobs of the thread: so it waits
        for one item at most.
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
                self._go_on(worker)  # the reader may have taken all meanwhile
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
    """The end of a source: by an error, or because there are no more items."""

    error: BaseException | None = None


def interruptible_call(call: Callable[[], T], interrupt: Callable[[], object]) -> T:
    """Returns the result of a call. In the main thread, it runs the call in another thread.

    Python handles Ctrl-C only in the main thread, and not while that thread runs native code.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    thread = worker()
    made = thread.submit(call)
    try:
        # the timeout lets a signal end the wait, even if a library retries the wait, as Polars does
        while not made.done():
            wait([made], SIGNALS_SECONDS)
        return made.result()
    finally:
        if made.done():
            _note_idle(thread)
        else:
            interrupt()
            thread.shutdown()


# Answers as users hold them: a stream of batches, which can be taken as one object of another library.


class Frames:
    """A base class of readers that can return all rows in one call. Each row is read once."""

    def arrow(self) -> pa.Table:
        """Returns the rows as an Arrow table."""
        reader: pa.RecordBatchReader = self
        return reader.read_all()

    def df(self) -> Any:
        """Returns the rows as a pandas DataFrame; raises `DependencyMissing` without pandas."""
        return pandas_of(lambda: self)

    def pl(self) -> Any:
        """Returns the rows as a Polars DataFrame; raises `DependencyMissing` without Polars."""
        return polars_of(lambda: self)


def shown_reader(schema: pa.Schema) -> str:
    """Returns a reader's `repr`: its columns, and how its rows are read."""
    named = shown_list([f"{field.name} {field.type}" for field in schema], COLUMNS_SHOWN)
    return f"Answer({named}; a reader, whose rows are read once: by batches, arrow(), df() or pl())"


def pandas_of(ask: Callable[[], pa.RecordBatchReader]) -> Any:
    """Returns all rows as a pandas DataFrame; raises `DependencyMissing` before `ask` runs the query."""
    if find_spec("pandas") is None:
        raise not_installed("pandas", "pandas")
    return ask().read_all().to_pandas()


def polars_of(ask: Callable[[], pa.RecordBatchReader]) -> Any:
    """Returns all rows as a Polars DataFrame; raises `DependencyMissing` before `ask` runs the query."""
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


class Answer(Frames):
    """A `pyarrow.RecordBatchReader` that also has `arrow()`, `df()` and `pl()`, which return all of its rows.

    Arrow's reader has no subclasses, so this class forwards to one, and counts as one for `isinstance`.
    """

    def __init__(self, reader: pa.RecordBatchReader) -> None:
        self._reader = reader

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        import pyarrow as pa

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
