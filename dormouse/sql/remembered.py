"""What was found out of short statements: those of services and dashboards come again and again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
STATEMENTS_MAX = 256
CHARACTERS_MAX = 10_000
"""Longer ones are found out each time, so that what is remembered stays small."""


class Remembered(Generic[T]):
    """The last values by statements and what else tells them apart. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, statement: str, more: Hashable, make: Callable[[], T]) -> T:
        """The value, made when it is not here; what `make` raises is not remembered."""
        if not isinstance(statement, str) or len(statement) > CHARACTERS_MAX:
            return make()
        key = statement, more
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        found = make()
        with self._lock:
            self._found[key] = found
            if len(self._found) > STATEMENTS_MAX:
                self._found.popitem(last=False)
        return found
