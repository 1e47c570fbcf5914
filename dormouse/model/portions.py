"""Streams cut into portions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def portions(items: Iterable[T], size_of: Callable[[T], float], size_min: float) -> Iterator[list[T]]:
    """As few items each as reach a size together; the last may be smaller."""
    held: list[T] = []
    size = 0.0
    for item in items:
        held.append(item)
        size += size_of(item)
        if size >= size_min:
            yield held
            held, size = [], 0.0
    if held:
        yield held
