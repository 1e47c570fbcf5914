"""One thread does the work of short queries; long ones do not hold up the next."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from dormouse.service import running
from dormouse.service.running import Turns

THREADS = 4


def run(functions: list[Callable[[], None]], threads_max: int = THREADS) -> list[BaseException | None]:
    """Runs functions in turns; returns the error of each."""

    async def all_of_them() -> list[BaseException | None]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(2 * threads_max) as pool:
            turns = Turns(lambda work: loop.run_in_executor(pool, work), threads_max)
            ended = [turns.run(function) for function in functions]
            async with asyncio.timeout(30):
                return await asyncio.gather(*ended, return_exceptions=True)

    return asyncio.run(all_of_them())


def test_short_work_is_done_in_order_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TURN_SECONDS", 60.0)
    order: list[tuple[int, int]] = []

    def numbered(number: int) -> Callable[[], None]:
        return lambda: order.append((number, threading.get_ident()))

    assert run([numbered(number) for number in range(100)]) == [None] * 100
    assert [number for number, _ in order] == list(range(100))
    assert len({thread for _, thread in order}) == 1


def test_work_that_waits_lets_others_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each but the last ends only after the last has begun."""
    monkeypatch.setattr(running, "TURN_SECONDS", 0.01)
    is_last = threading.Event()

    def wait() -> None:
        assert is_last.wait(30)

    assert run([wait] * (THREADS - 1) + [is_last.set]) == [None] * THREADS


def test_a_thread_goes_on_while_the_process_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread ends its work after the second has begun, and then does the work that wakes it."""
    monkeypatch.setattr(running, "TURN_SECONDS", 0.01)
    monkeypatch.setattr(running._Load, "share", lambda load: 0.0)
    has_second_begun, is_last = threading.Event(), threading.Event()

    def first() -> None:
        assert has_second_begun.wait(30)

    def second() -> None:
        monkeypatch.setattr(running, "TURN_SECONDS", 60.0)
        has_second_begun.set()
        assert is_last.wait(10)

    assert run([first, second, is_last.set], 2) == [None] * 3


def test_a_busy_process_is_told_from_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TURN_SECONDS", 60.0)
    load = running._Load()
    load.threads.add(threading.get_native_id())
    load.share()
    time.sleep(0.3)
    assert load.share() < running.BUSY_SHARE
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    assert load.share() >= running.BUSY_SHARE


def test_a_process_that_gets_no_processor_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process sleeps here; each of two threads has waited for a processor for half of the time."""
    monkeypatch.setattr(running, "TURN_SECONDS", 60.0)
    began = time.monotonic()
    delays = lambda _: dict.fromkeys((1, 2), (time.monotonic() - began) / 2)  # noqa: E731
    monkeypatch.setattr(running._Load, "_read", delays)
    load = running._Load()
    load.share()
    time.sleep(0.1)
    assert load.share() >= running.BUSY_SHARE


def test_threads_are_limited_and_later_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TURN_SECONDS", 0.001)
    at_once, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.02)
        with lock:
            at_once -= 1

    assert run([work] * 20, 3) == [None] * 20
    assert most == 3


def test_failed_work_does_not_end_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TURN_SECONDS", 60.0)
    done: list[int] = []

    def fail() -> None:
        raise ValueError("broken")

    found = run([fail, lambda: done.append(1), fail, lambda: done.append(2)])
    assert [type(error) for error in found] == [ValueError, type(None), ValueError, type(None)]
    assert done == [1, 2]


def test_an_idle_service_begins_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TURN_SECONDS", 60.0)

    async def one_after_the_other() -> int:
        loop, done = asyncio.get_running_loop(), list[int]()
        with ThreadPoolExecutor(THREADS) as pool:
            turns = Turns(lambda work: loop.run_in_executor(pool, work), THREADS)
            async with asyncio.timeout(30):
                for number in range(50):
                    await turns.run(partial(done.append, number))
        return len(done)

    assert asyncio.run(one_after_the_other()) == 50
