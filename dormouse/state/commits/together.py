"""Group commit for callers: what threads ask for while one of them is asking is asked for at once."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T")
R = TypeVar("R")
CALLS_MAX = 100


@dataclass(slots=True, eq=False)
class _Call(Generic[T, R]):
    item: T
    woken: threading.Event | None = None
    """Of one that waits for another."""
    answer: list[R] = field(default_factory=list)
    """Of one item, once it is there."""
    served: list[_Call[T, R]] = field(default_factory=list)
    """Those that it asks for, when it leads."""
    is_over: bool = False


class Together(Generic[T, R]):
    """Does `work` for all callers that wait, at most `CALLS_MAX` at once; in the thread of the first of them.

    A caller that is alone does not wait. When it fails for several, each does its own alone: one that is
    refused harms no other, and errors are the caller's own.
    """

    def __init__(self, work: Callable[[Sequence[T]], Sequence[R]]) -> None:
        self._work = work
        self._begin()
        _made.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Call[T, R]] = deque()
        self._leader: _Call[T, R] | None = None

    def __call__(self, item: T) -> R:
        call: _Call[T, R] = _Call(item)
        try:
            with self._lock:
                self._waiting.append(call)
                if self._leader is None:
                    self._leader = call
                else:
                    call.woken = threading.Event()
            if call.woken is not None:
                call.woken.wait()
            if not call.is_over:
                self._lead(call)
        except BaseException:
            self._leave(call)
            raise
        return call.answer[0] if call.answer else self._work([item])[0]

    def _lead(self, call: _Call[T, R]) -> None:
        with self._lock:
            call.served = list(islice(self._waiting, CALLS_MAX))
            for _ in call.served:
                self._waiting.popleft()
        try:
            answers = self._work([each.item for each in call.served])
            for each, answer in zip(call.served, answers, strict=True):
                each.answer.append(answer)
        except Exception:
            if len(call.served) == 1:
                raise
        self._leave(call)

    def _leave(self, call: _Call[T, R]) -> None:
        """Leaves nobody waiting for the call. One that is interrupted, maybe in here, comes again."""
        with self._lock:
            for each in (call, *call.served):
                each.is_over = True
                if each.woken is not None:
                    each.woken.set()
            if self._waiting:
                self._waiting = deque(each for each in self._waiting if not each.is_over)
            if self._leader is call:
                following = self._waiting[0] if self._waiting else None
                if following is not None and following.woken is not None:
                    following.woken.set()  # it begins when this lock is free
                self._leader = following
            call.served = []


_made: WeakSet[Together[Any, Any]] = WeakSet()


def _begin_in_child() -> None:
    """The threads of the parent, which callers would wait for, are not in a forked child."""
    for together in _made:
        together._begin()


os.register_at_fork(after_in_child=_begin_in_child)
