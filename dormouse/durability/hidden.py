"""What a store keeps of objects that are deleted: in S3, where the bucket keeps versions, these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from dormouse.aws.versions import Version, Versions
from dormouse.objects.store import ObjectStore


@dataclass(frozen=True, slots=True)
class Hidden:
    """A version of a deleted object, as the store's `list` does not show it."""

    name: str
    byte_count: int
    version: Version


class HiddenVersions:
    """Those of a store; a folder has none. Raises `InstanceError` when S3 may not be asked for them."""

    def __init__(self, objects: ObjectStore) -> None:
        self._prefix = ""
        self._versions: Versions | None = None
        if objects.url.startswith("s3://"):
            bucket, _, prefix = objects.url.removeprefix("s3://").partition("/")
            self._prefix = f"{prefix}/" if prefix else ""
            self._versions = Versions(bucket, objects.options)

    def below(self, prefix: str) -> Iterator[Hidden]:
        """Of the objects whose names begin with a prefix."""
        if self._versions is None:
            return
        for one in self._versions.below(self._prefix + prefix):
            if one.byte_count is not None and not one.is_latest:
                yield Hidden(one.key.removeprefix(self._prefix), one.byte_count, one)

    def fetch(self, hidden: Hidden, path: Path) -> None:
        """Writes its bytes to a path."""
        if self._versions is not None:
            self._versions.fetch(hidden.version, path)

    def delete(self, names: Iterable[str]) -> int:
        """Deletes all that is kept of objects, which are deleted themselves; gives how many versions."""
        if self._versions is None:
            return 0
        found = [
            one
            for name in names
            for one in self._versions.below(self._prefix + name)
            if one.key == self._prefix + name
        ]
        # of an object that is there again, nothing is lost
        gone = [
            one for _, versions in groupby(found, attrgetter("key")) for one in _of_deleted(list(versions))
        ]
        self._versions.delete(gone)
        return sum(one.byte_count is not None for one in gone)

    def replicas(self) -> list[str]:
        """Where copies of the store's objects stay, whatever is deleted here."""
        return [] if self._versions is None else self._versions.replicas()


def _of_deleted(versions: list[Version]) -> list[Version]:
    """All versions of a key, but for the object that is there."""
    return [one for one in versions if not (one.is_latest and one.byte_count is not None)]
