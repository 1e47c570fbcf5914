"""Streams cut into portions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def portions(items: Iterable[T], size_of: Callable[[T], int], size_min: int) -> Iterator[list[T]]:
    """As few items each as reach a size together; the last may be smaller."""
    held: list[T] = []
    size = 0
    for item in items:
        held.append(item)
        size += size_of(item)
        if size >= size_min:
            yield held
            held, size = [], 0
    if held:
        yield held
