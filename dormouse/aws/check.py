"""A check of the doctor: its result, what it found, and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Result = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Check:
    name: str
    result: Result
    found: str
    mend: str = ""
    """The remedy; empty if the check is fine."""

    @classmethod
    def of(cls, name: str, fine: str, trouble: str | None, mend: str, result: Result = "wrong") -> Check:
        """Returns a check. Its text is `fine`, or `trouble` with `result` if there is trouble."""
        return cls(name, result, trouble, mend) if trouble else cls(name, "ok", fine)


Look = tuple[str, Callable[[], Iterator[Check]]]
"""The name of a check, for the case that AWS refuses it, and the function that makes it."""
