"""Concurrent calls of several threads are done together, and each gets its own answer."""

from __future__ import annotations

import itertools
import linecache
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from dormouse.state.commits import job_commits as module
from dormouse.state.commits.job_commits import CALLS_MAX, Together
from dormouse.state.commits.queue import SECONDS_MIN, Patience
from tests.stored import wait_until


def test_calls_that_arrive_during_a_call_are_done_together() -> None:
    begun, go_on, asked = threading.Event(), threading.Event(), []

    def work(items: Sequence[int]) -> list[int]:
        asked.append(sorted(items))
        begun.set()
        assert go_on.wait(60)
        return [2 * item for item in items]

    together = Together(work)
    with ThreadPoolExecutor(CALLS_MAX + 2) as pool:
        first = pool.submit(together, -1)
        assert begun.wait(60)
        others = [pool.submit(together, number) for number in range(CALLS_MAX + 1)]
        wait_until(lambda: len(together._waiting) == CALLS_MAX + 1)
        go_on.set()
        assert first.result(60) == -2
        assert [other.result(60) for other in others] == [2 * number for number in range(CALLS_MAX + 1)]
    assert [len(items) for items in asked] == [1, CALLS_MAX, 1]
    assert together(7) == 14


def test_a_call_that_fails_harms_no_other() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work(items: Sequence[int]) -> list[int]:
        begun.set()
        assert go_on.wait(60)
        if 3 in items:
            raise ValueError(f"{items} has a three")
        return list(items)

    together = Together(work)
    with ThreadPoolExecutor(10) as pool:
        first = pool.submit(together, 0)
        assert begun.wait(60)
        others = [pool.submit(together, number) for number in (2, 3, 4)]
        wait_until(lambda: len(together._waiting) == 3)
        go_on.set()
        assert [first.result(60), others[0].result(60), others[2].result(60)] == [0, 2, 4]
        with pytest.raises(ValueError, match=r"\[3\] has a three"):
            others[1].result(60)
    with pytest.raises(ValueError, match=r"\[3\]"):
        together(3)
    assert together(5) == 5


def test_an_interrupted_call_leaves_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work(items: Sequence[int]) -> list[int]:
        begun.set()
        assert go_on.wait(60)
        return list(items)

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            super().wait(60)
            raise KeyboardInterrupt

    together = Together(work)
    with ThreadPoolExecutor(10) as pool:
        first = pool.submit(together, 0)
        assert begun.wait(60)
        with monkeypatch.context() as patched:
            patched.setattr(module, "threading", SimpleNamespace(Event=Interrupted))
            interrupted = pool.submit(together, 1)
            wait_until(lambda: len(together._waiting) == 1)
        last = pool.submit(together, 2)
        wait_until(lambda: len(together._waiting) == 2)
        go_on.set()
        assert [first.result(60), last.result(60)] == [0, 2]
        assert isinstance(interrupted.exception(60), KeyboardInterrupt)
    assert together(3) == 3


def interrupted_at(number: int, *, leads: bool) -> str:
    """Interrupts one of four calls, and checks that the other three get answers.

    The interruption comes at the `number`th line that the call executes; returns the text of this line. With
    `leads`, the interrupted call works for the others. Otherwise it first waits for another call's work, and
    works for later calls.
    """
    line, seen, go_on = "", itertools.count(1), threading.Event()
    asked: set[int] = set()

    def work(items: Sequence[int]) -> list[int]:
        asked.update(items)
        assert go_on.wait(60)
        return list(items)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal line
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if frame.f_code.co_filename != module.__file__:
            return None
        # an interruption at `with` could leave the lock taken
        if event == "line" and not source.startswith("with ") and next(seen) == number:
            line = source
            raise KeyboardInterrupt
        return trace

    def interrupted() -> None:
        sys.settrace(trace)
        with suppress(KeyboardInterrupt):
            together(0)

    together = Together(work)
    threads = {item: threading.Thread(target=together, args=(item,), daemon=True) for item in (1, 2, 3)}
    threads[0] = threading.Thread(target=interrupted, daemon=True)
    for item in (0, 1, 2, 3) if leads else (1, 0, 2, 3):
        threads[item].start()
        wait_until(
            lambda item=item: (
                item in asked
                or any(call.item == item for call in list(together._waiting))
                or not threads[item].is_alive()
            )
        )
    go_on.set()
    threads[0].join(60)
    threads[4] = threading.Thread(target=together, args=(4,), daemon=True)
    threads[4].start()
    for thread in threads.values():
        thread.join(60)
        assert not thread.is_alive(), line
    return line


@pytest.mark.parametrize("leads", [True, False])
def test_a_call_interrupted_at_any_line_leaves_no_other_waiting(leads: bool) -> None:
    lines = list(itertools.takewhile(bool, (interrupted_at(n, leads=leads) for n in itertools.count(1))))
    assert "self._lead(call)" in lines
    assert "self._waiting.popleft()" in lines
    assert "each.is_over = True" in lines
    assert ("each.woken.set()" in lines) is not leads  # a call that leads from the start serves only itself


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work(items: Sequence[int]) -> list[int]:
        begun.set()
        assert os.getpid() != parent or go_on.wait(60)
        return list(items)

    parent, together = os.getpid(), Together(work)
    thread = threading.Thread(target=together, args=(1,))
    thread.start()
    assert begun.wait(60)
    if not (child := os.fork()):
        signal.alarm(60)
        os._exit(together(7))
    go_on.set()
    thread.join(60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_polling_learns_when_answers_usually_come() -> None:
    patience = Patience()
    for _ in range(200):
        pauses, waited = patience.pauses(), 0.0
        while waited < 0.05:
            waited += next(pauses)
    assert 0.02 < next(patience.pauses()) < 0.08
    for _ in range(200):
        next(patience.pauses())
    first, *others = islice(patience.pauses(), 30)
    assert first == SECONDS_MIN
    for looks in (2, 5) * 100:
        patience.learn(looks)
    assert patience.usual == 0.05
    for looks in (0, 1) * 100:
        patience.learn(looks)
    assert patience.usual == SECONDS_MIN
    assert sorted(others) == others
    assert others[-1] <= 0.5
