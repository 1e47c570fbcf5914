"""Streams of batches: made ahead in a thread, interrupted by another, and ended when they are dropped."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
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
"""How long a signal may go unheard."""
AHEAD_BYTES = 4 * 1024 * 1024
"""Of batches that are made and not taken, before no more is made."""
BATCH_BYTES = 1_024
"""That a batch takes besides its values, of which it may have none."""
AGAIN_SECONDS = 0.01
ENDING_AT_ONCE = 4
IDLE_MAX = 16
EXIT_SECONDS_MAX = 1.0
_idle: deque[ThreadPoolExecutor] = deque()
# what is read is not the collector's: it would end the source of a dropped reader beside the reader
_read: set[Source[Any]] = set()


class Source(Generic[T]):
    """Items that are read, until the reader is done with them or is gone."""

    __slots__ = ("_interrupt", "items", "worker")

    def __init__(self, items: Iterator[T], interrupt: Callable[[], object] = lambda: None) -> None:
        self.items = items
        self.worker: ThreadPoolExecutor | None = None
        """The only thread that takes items, if there is one."""
        self._interrupt = interrupt
        _Ending.begin()
        _read.add(self)

    def drop(self) -> None:
        """Nothing more is wanted. Takes no lock, and does not wait."""
        if self.worker is None and getattr(self.items, "gi_frame", None) is None:
            _read.discard(self)  # it has ended by itself
        else:
            _Ending.dropped.put(self)

    def end(self, threads: ThreadPoolExecutor) -> None:
        """Ends what makes the items, when they are not being made any more."""
        _read.discard(self)
        worker, self.worker = self.worker, None
        if worker is not None:
            self._interrupt()
        try:
            if isinstance(self.items, Generator):
                (worker or threads).submit(self.items.close)
            if worker is not None:
                worker.submit(_note_idle, worker)
        except RuntimeError:  # at the end of the process there are no more threads
            with suppress(Exception):
                self.items.close()  # type: ignore[attr-defined]


def worker() -> ThreadPoolExecutor:
    """A thread for a source, one that another is done with if there is: a new one has no memory yet."""
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
    """The process's thread that ends the sources of dropped readers.

    Python's garbage collector may drop a reader anywhere: in any thread, also in one that holds a lock that
    the end of the reader's source needs, and would then wait for itself.
    """

    dropped: SimpleQueue[Source[Any] | None] = SimpleQueue()
    _lock = threading.Lock()
    _thread: threading.Thread | None = None

    @classmethod
    def anew(cls) -> None:
        """In a forked child, which has no such threads, and a queue that was waited for."""
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
        """What was dropped last still gives back what it holds."""
        if cls._thread is not None and cls._thread.is_alive():
            cls.dropped.put(None)
            cls._thread.join(EXIT_SECONDS_MAX)


os.register_at_fork(after_in_child=_Ending.anew)
atexit.register(_Ending.end)


class Interruption:
    """Ends what reads for a query, from any thread, and for good."""

    def __init__(self) -> None:
        # the collector may drop one of its readers while this thread holds it
        self._lock = threading.RLock()
        self._awaited: dict[object, Future[Any]] = {}
        self._ended: Callable[[], object] | None = None
        self.is_set = False

    def set(self) -> None:
        """What is computed now is given up."""
        with self._lock:
            self.is_set = True
            for upcoming in self._awaited.values():
                upcoming.cancel()
            ended = self._ended
        if ended is not None:
            threading.Thread(target=self._end, args=(ended,), name="dormouse-interrupt", daemon=True).start()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """While it is set in another thread, calls `end`, again and again, until what stands within ends."""
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
        # a call that has not begun does not hear the first
        while self._ended is end:
            with suppress(Exception):  # it may have ended, and be closed, a moment before
                end()
            time.sleep(AGAIN_SECONDS)

    def check(self) -> None:
        """`DormouseError` when it is set."""
        if self.is_set:
            raise DormouseError("the query was interrupted")

    def awaits(self, reader: object, upcoming: Future[Any] | None) -> None:
        """What one of the query's readers waits for now."""
        with self._lock:
            if upcoming is None:
                self._awaited.pop(reader, None)
                return
            self._awaited[reader] = upcoming
            if self.is_set:
                upcoming.cancel()


def first_rows(reader: pa.RecordBatchReader, limit: int) -> pa.RecordBatchReader:
    """The rows up to the limit; no batch is read beyond it."""
    import pyarrow as pa

    return pa.RecordBatchReader.from_batches(reader.schema, up_to(reader, limit))


def up_to(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """The rows up to a limit, if there is one; no batch is read beyond it."""
    if limit is None:
        yield from batches
        return
    while limit and (batch := next(batches, None)) is not None:
        part = batch.slice(0, limit)
        limit -= part.num_rows
        yield part


def without_first(reader: pa.RecordBatchReader, rows: int) -> pa.RecordBatchReader:
    """The rows after so many."""
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

    # `loops.ahead` is another, as its end waits for its thread: writers then delete what the thread read.
    # Here the end must not wait, as the garbage collector may call it in a thread that holds a lock.

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
            # a signal ends the wait even if a library has it begun anew, as Polars does
            while not made.done():
                wait([made], SIGNALS_SECONDS)
            return made.result()
        finally:
            if not made.done():
                interrupt()


# Answers as users hold them: a stream of batches, all of which other libraries take in one call.


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


class Answer(Frames):
    """A `pyarrow.RecordBatchReader`, with `arrow()`, `df()` and `pl()` for all of its rows.

    Arrow makes no readers of other classes than its own: this one passes on what it
    is asked, and counts as one for `isinstance`.
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
