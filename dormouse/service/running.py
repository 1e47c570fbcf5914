"""The execution of requests: each takes a slot, works in a thread, and sends its answer piece by piece.

A query's thread makes the pieces of the answer, one piece ahead of the event loop, which sends them. The
thread makes the next piece when the client has taken most of the sent data. A query ends when it is complete,
fails, reaches its time limit, or its client disconnects or stalls. Its slot becomes free when its thread has
ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from dormouse.errors import DormouseError
from dormouse.service.metrics import Metrics
from dormouse.service.problems import ProblemDetails, Refused, problem_of
from dormouse.service.security import Place
from dormouse.service.work import Making, Work
from dormouse.settings.service import ServiceSettings

T = TypeVar("T")
SENT_BYTES_MAX = 64 * 1024
"""The number of bytes that are sent at once. It is small, so that the progress of a slow client is visible.
"""

STALL_LOOKS = 10
"""The number of times that a client's progress is checked within the time that it may stall."""

STOP_SECONDS_MAX = 3.0
TURN_SECONDS = 0.005
"""The time after which the next query begins in another thread, although the last one has not ended."""
BUSY_SHARE = 0.5
"""The share of time from which a process counts as busy."""

logger = logging.getLogger("dormouse.service")


class ClientGone(Exception):
    """An internal signal that the client has disconnected or stalled, so that no answer can be sent."""


class Slots:
    """The slots of an event loop. Each query that runs takes a slot, so their number limits concurrency.

    Further queries wait for a slot, in the order of their arrival, for at most `wait_seconds_max`.
    """

    def __init__(self, count: int, wait_seconds_max: float) -> None:
        self._free = asyncio.Semaphore(count)
        self._count = count
        self._wait_seconds_max = wait_seconds_max
        self.waiting = 0
        self.taken = 0

    async def took_free(self) -> bool:
        """Takes a free slot without waiting. Returns False if there is none."""
        if self._free.locked():
            return False
        await self._free.acquire()
        self.taken += 1
        return True

    async def take(self) -> None:
        """Takes a slot, waiting if necessary. Raises `Refused` if none becomes free in time."""
        self.waiting += 1
        try:
            await asyncio.wait_for(self._free.acquire(), self._wait_seconds_max)
        except TimeoutError:
            raise Refused(
                "too-many-queries",
                f"{self._count} queries run at once, and none ended within {self._wait_seconds_max:g} s; "
                "try again later",
            ) from None
        finally:
            self.waiting -= 1
        self.taken += 1

    def give_back(self) -> None:
        self.taken -= 1
        self._free.release()


class Turns:
    """The order in which threads do the work of queries. All public methods are for the event loop.

    Threads that are busy at the same time take Python's lock from each other at each of their system calls,
    so one thread does the work of short queries. Another one begins with the next query in two cases:

    - The process was not busy since the last look: the queries that run wait for PostgreSQL or for objects.
    - None has begun for TURN_SECONDS: those that run are then long.
    """

    def __init__(self, in_thread: Callable[[Callable[[], None]], object], threads_max: int) -> None:
        self._in_thread = in_thread
        self._threads_max = threads_max
        self._threads = 0
        self._waiting: deque[_Turn] = deque()
        self._newest: _Turn | None = None
        self._begun_at = -math.inf
        """The time at which the last query began, unless it has ended."""
        self._is_watched = False
        self._is_idle = False
        """True if the process was not busy before the last look, at which work waited."""
        self._lock = threading.Lock()
        self._load = _Load()

    def run(self, function: Callable[[], None]) -> asyncio.Future[None]:
        """Runs a function in a thread when its turn comes. Returns a future that is done at its end."""
        turn = function, asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._look()
        return turn[1]

    def _look(self, *, is_idle: bool = False) -> None:
        """Starts another thread if one may begin. Repeats this later if there is work that waits."""
        loop = asyncio.get_running_loop()
        with self._lock:
            may_begin = bool(self._waiting) and self._threads < self._threads_max
            may_begin = may_begin and (is_idle or self._is_due())
            if may_begin:
                self._threads += 1
                self._newest, self._begun_at = None, time.monotonic()
        if may_begin:
            self._in_thread(partial(self._work, loop))
        if self._waiting and not self._is_watched:
            self._is_watched = True
            loop.call_later(TURN_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._is_watched = False
        self._is_idle = bool(self._waiting) and self._load.share() < BUSY_SHARE
        self._look(is_idle=self._is_idle)

    def _is_due(self) -> bool:
        return time.monotonic() >= self._begun_at + TURN_SECONDS

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Does the work that waits, until there is none or another thread does it."""
        turn: _Turn | None = None
        self._load.threads.add(threading.get_native_id())
        while (turn := self._next(turn)) is not None:
            function, ended = turn
            error: BaseException | None = None
            try:
                function()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed when the process ends
                loop.call_soon_threadsafe(_end, ended, error)
        self._load.threads.discard(threading.get_native_id())

    def _next(self, done: _Turn | None) -> _Turn | None:
        """Returns the next turn of a thread; None if the thread has to end."""
        with self._lock:
            is_newest = done is self._newest
            if not self._waiting or not (is_newest or self._is_idle or self._is_due()):
                self._threads -= 1
                if is_newest:
                    self._begun_at = -math.inf
                return None
            self._newest, self._begun_at = self._waiting.popleft(), time.monotonic()
            return self._newest


class _Load:
    """The time in which threads of the process ran, or were ready to run but had no processor.

    A thread that waits for Python's lock is not counted, but the one that has the lock is. So the share of
    time is near 1 if Python's lock is in use, even if other processes use the processors.
    """

    def __init__(self) -> None:
        self.threads: set[int] = set()
        """The native ids of the threads that work."""
        self._last: tuple[float, float, dict[int, float]] = 0.0, 0.0, {}

    def share(self) -> float:
        """Returns the share of time since the last call; 1 if it is not known, or that was long ago."""
        at, used, delays = self._last
        now, used_now = time.monotonic(), time.process_time()
        seconds = now - at
        share = (used_now - used) / seconds
        # each file that is read gives Python's lock up, which a busy process must not do more often
        delays_now = self._read() if share < BUSY_SHARE else {}
        self._last = now, used_now, delays_now
        if not (delays and delays_now) or seconds > 2 * TURN_SECONDS:
            return 1.0
        return share + sum(delay - delays.get(one, delay) for one, delay in delays_now.items()) / seconds

    def _read(self) -> dict[int, float]:
        """Returns the seconds for which this thread and those that work had to wait for a processor."""
        found = {}
        for thread in (threading.get_native_id(), *tuple(self.threads)):
            with suppress(OSError, IndexError):  # the thread has ended, or the system has no such file
                text = Path(f"/proc/self/task/{thread}/schedstat").read_bytes()
                found[thread] = int(text.split()[1]) / 1e9
        return found


_Turn = tuple[Callable[[], None], asyncio.Future[None]]


def _end(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


class Runner:
    """The threads and slots of one place, in which the work of requests runs."""

    def __init__(
        self, settings: ServiceSettings, metrics: Metrics, count: int, seconds_max: float | None = None
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.seconds_max = settings.seconds_max if seconds_max is None else seconds_max
        self.slots = Slots(count, settings.queue_seconds_max)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="dormouse-serve")
        self._making: set[asyncio.Future[Any]] = set()
        self.turns = Turns(self._threads.submit, count)

    def in_thread(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def free(self, making: asyncio.Future[Any]) -> None:
        """Frees a slot as soon as the thread of `making` has ended. The request does not wait for it."""
        self._making.add(making)
        making.add_done_callback(self._freed)

    def _freed(self, making: asyncio.Future[Any]) -> None:
        self._making.discard(making)
        self.slots.give_back()
        if not making.cancelled() and (error := making.exception()) is not None:
            logger.error("the thread of a stopped query ended with an error", exc_info=error)

    async def close(self) -> None:
        """Waits up to STOP_SECONDS_MAX for stopped work. Slower threads may run until the process ends."""
        if self._making:
            await asyncio.wait(set(self._making), timeout=STOP_SECONDS_MAX)
        self._threads.shutdown(wait=False)


class Answer(Response):
    """The answer of one request. The work is done while the answer is sent.

    With a `kind`, metrics count it as a query.
    """

    runner: Runner
    _problem_of: Callable[[BaseException], ProblemDetails]

    def __init__(self, place: Place, kind: str | None, work: Work) -> None:
        super().__init__()
        self.place = place
        self.kind = kind
        self.work = work
        self.rows = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer or a problem document. If an answer fails after its start, it stays incomplete."""
        service = scope["app"].state.service
        self.runner, self._problem_of = service.runners[self.place], partial(problem_of, hide=service.hide)
        connection = Sending(scope, send, self.runner.settings.client_stall_seconds_max)
        gone = self._watched(receive)
        outcome = "cut_off"
        try:
            outcome = await self._run(connection, gone)
        except ClientGone:
            outcome = "client_gone"
        except asyncio.CancelledError:
            if not connection.begun:
                await connection.send_problem(
                    problem_of(Refused("service-ends", "the service is stopping; try again"))
                )
            raise
        finally:
            gone.cancel()
            scope["state"]["rows"] = self.rows
            if self.kind is not None:
                self._count(outcome, connection)

    def _watched(self, receive: Receive) -> asyncio.Future[None]:
        """Returns a future that is done when the client has disconnected."""
        return asyncio.ensure_future(disconnected(receive))

    def _count(self, outcome: str, connection: Sending) -> None:
        metrics = self.runner.metrics
        metrics.queries.labels(self.kind, outcome).inc()
        metrics.rows.labels(self.kind).inc(self.rows)
        metrics.bytes.labels(self.kind).inc(connection.byte_count)

    async def _run(self, connection: Sending, gone: asyncio.Future[None]) -> str:
        """Does the work and sends its answer. Returns the name of the outcome in metrics."""
        try:
            await self._admitted(gone)
        except DormouseError as error:
            await connection.send_problem(self._problem_of(error))
            return "refused"
        admitted_at = time.monotonic()
        making = Making(self.work.pieces())
        making.begin(self.runner.turns.run if self.place is Place.QUERIES else self.runner.in_thread)
        self.runner.free(making.ended)
        try:
            deadline = admitted_at + self._seconds_max
            while (piece := await _first(making.next(), gone, deadline)) is not None:
                if not connection.begun:
                    self._observe(admitted_at)
                    if (whole := making.whole(piece)) is not None:
                        self.rows = whole.rows
                        await connection.send_whole(self.work, bytes(whole.data))
                        break
                    await connection.begin(self.work)
                    if connection.is_head:
                        await connection.end()
                        break
                await connection.send_piece(piece.data, deadline)
                making.may_go_on()
                self.rows += piece.rows
            else:
                await connection.end()
        except ClientGone:
            raise
        except Exception as error:
            return await self._failed(error, connection)
        finally:
            self.work.interrupt()
            making.stop()
        if self.kind is not None:
            self.runner.metrics.whole.labels(self.kind).observe(time.monotonic() - admitted_at)
        return "answered"

    @property
    def _seconds_max(self) -> float:
        """The time limit of the work, in seconds."""
        return self.runner.seconds_max

    async def _admitted(self, gone: asyncio.Future[None]) -> None:
        slots = self.runner.slots
        if await slots.took_free():
            return
        taking = asyncio.ensure_future(slots.take())
        await asyncio.wait({taking, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():
            taking.cancel()
            await asyncio.wait({taking})
        if gone.done():
            if not taking.cancelled() and taking.exception() is None:
                slots.give_back()
            raise ClientGone
        taking.result()

    def _observe(self, admitted_at: float) -> None:
        if self.kind is None:
            return
        metrics = self.runner.metrics
        if self.work.planned_at is not None:
            metrics.planning.labels(self.kind).observe(self.work.planned_at - admitted_at)
        metrics.first_row.labels(self.kind).observe(time.monotonic() - admitted_at)

    async def _failed(self, error: Exception, connection: Sending) -> str:
        if isinstance(error, TimeoutError):
            what = "request" if self.kind is None else "query"
            error = Refused(
                "query-time-over", f"the {what} took longer than the {self._seconds_max:g} s that are allowed"
            )
        if not isinstance(error, DormouseError):
            logger.error("a request failed" if self.kind is None else "a query failed", exc_info=error)
        problem = self._problem_of(error)
        if not connection.begun:
            await connection.send_problem(problem)
        elif not connection.amid_piece:
            await connection.send_piece(self.work.broken_off(problem.text))
        return problem.kind


class Sending:
    """The sending side of one client's connection."""

    def __init__(self, scope: Scope, send: Send, stall_seconds_max: float) -> None:
        self._scope = scope
        self._send = send
        self._stall_seconds_max = stall_seconds_max
        self.is_head = bool(scope["state"].get("is_head"))
        """True for a HEAD request, whose answer has no body."""
        self.begun = False
        self.amid_piece = False
        """True while a piece is partly sent. The client would take other data for the rest of the piece."""
        self.byte_count = 0

    async def begin(self, work: Work, byte_count: int | None = None) -> None:
        headers = [(b"content-type", work.content_type.encode("ascii")), (b"cache-control", b"no-store")]
        headers += [(name.encode("ascii"), value.encode("ascii")) for name, value in work.headers.items()]
        if byte_count is not None and work.status != 304 and "content-length" not in work.headers:
            headers.append((b"content-length", b"%d" % byte_count))
        await self._send({"type": "http.response.start", "status": work.status, "headers": headers})
        self.begun = True

    async def send_whole(self, work: Work, data: bytes) -> None:
        """Sends headers and body of a short answer at once, which saves system calls."""
        await self.begin(work, len(data))
        await self._sent({"type": "http.response.body", "body": data, "more_body": False}, math.inf)
        self.byte_count += len(data)

    async def send_piece(self, data: Any, deadline: float = math.inf) -> None:
        """Sends a piece of the answer.

        Raises ClientGone if the client takes no data for `stall_seconds_max`, and TimeoutError if it has not
        taken the whole piece by `stall_seconds_max` after the deadline.
        """
        view = memoryview(data)
        self.amid_piece = True
        for start in range(0, len(view), SENT_BYTES_MAX):
            part = bytes(view[start : start + SENT_BYTES_MAX])
            message = {"type": "http.response.body", "body": part, "more_body": True}
            await self._sent(message, deadline + self._stall_seconds_max)
            self.byte_count += len(part)
        self.amid_piece = False

    async def end(self) -> None:
        await self._sent({"type": "http.response.body", "body": b"", "more_body": False}, math.inf)

    async def _sent(self, message: Message, deadline: float) -> None:
        """Sends a message, and waits as long as the client makes progress with earlier data."""
        connection = self._scope["state"].get("connection")
        if connection is not None and connection.is_taking and time.monotonic() < deadline:
            await self._send(message)
            return
        sending = asyncio.ensure_future(self._send(message))
        taken_at, before = time.monotonic(), math.inf
        try:
            while True:
                seconds = min(self._stall_seconds_max / STALL_LOOKS, deadline - time.monotonic())
                await asyncio.wait({sending}, timeout=max(seconds, 0))
                if sending.done():
                    sending.result()
                    return
                now, untaken = time.monotonic(), self._untaken()
                if now >= deadline:
                    raise TimeoutError
                taken_at = now if untaken < before else taken_at
                if now - taken_at >= self._stall_seconds_max:
                    self.abort()
                    raise ClientGone
                before = untaken
        finally:
            sending.cancel()

    def _untaken(self) -> int:
        connection = self._scope["state"].get("connection")
        return 0 if connection is None else int(connection.untaken_bytes)

    async def send_problem(self, problem: ProblemDetails) -> None:
        async def nothing() -> Any: ...

        await problem.response()(self._scope, nothing, self._send)

    def abort(self) -> None:
        """Closes the connection at once, and discards data that the client has not taken."""
        connection = self._scope["state"].get("connection")
        if connection is not None:
            connection.abort()


async def _first(wanted: asyncio.Future[T], gone: asyncio.Future[None], deadline: float) -> T:
    """Returns the result of `wanted`.

    Raises ClientGone if the client disconnects first, and TimeoutError if the deadline passes first.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    both: set[asyncio.Future[Any]] = {wanted, gone}
    await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if gone.done():
        raise ClientGone
    if not wanted.done():
        raise TimeoutError
    return wanted.result()


async def disconnected(receive: Receive) -> None:
    """Waits until the client has disconnected. Discards the data that the client still sends."""
    while (await receive())["type"] != "http.disconnect":
        pass
