"""A store whose objects are deleted only as far as they may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from dormouse.objects.store import ObjectStore

ASKED_EVERY = 1_000
"""Objects: a long deletion must not outlive the right to it."""

Deleting = Callable[[], AbstractContextManager[object]]
"""Entered for each deletion, of so many objects at most; raises when nothing may be deleted."""


@dataclass(frozen=True)
class GuardedStore:
    """An `ObjectStore` that enters `deleting` for each deletion, and deletes nothing more when that raises.

    When pickled, it is the store alone: other processes have their own questions.
    """

    store: ObjectStore
    deleting: Deleting = field(repr=False, compare=False)

    def __reduce__(self) -> Any:
        return _alone, (self.store,)

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def options(self) -> dict[str, str]:
        return self.store.options

    def put(self, name: str, data: bytes) -> None:
        self.store.put(name, data)

    def staged(self, name: str) -> AbstractContextManager[Path]:
        return self.store.staged(name)

    def copy(self, source: str, name: str) -> None:
        self.store.copy(source, name)

    def get(self, name: str) -> bytes:
        return self.store.get(name)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        return self.store.get_range(name, start, length)

    def size(self, name: str) -> int:
        return self.store.size(name)

    def reader(self, name: str) -> BinaryIO:
        return self.store.reader(name)

    def delete(self, names: Iterable[str]) -> list[tuple[str, Exception]]:
        failed: list[tuple[str, Exception]] = []
        pending = iter(names)
        while batch := list(islice(pending, ASKED_EVERY)):
            with self.deleting():
                failed += self.store.delete(batch)
        return failed

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        return self.store.list(prefix)

    def list_dated(self, prefix: str = "") -> Iterator[tuple[str, int, datetime]]:
        return self.store.list_dated(prefix)

    def local_path(self, name: str) -> Path | None:
        return self.store.local_path(name)

    def pinned(self, names: Iterable[str]) -> AbstractContextManager[dict[str, Path]]:
        return self.store.pinned(names)

    def uri(self, name: str) -> str:
        return self.store.uri(name)

    def sweep_staging(self) -> int:
        return self.store.sweep_staging()


def _alone(store: ObjectStore) -> ObjectStore:
    return store
