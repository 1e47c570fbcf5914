"""Which files of a keyed table may have the same keys, so that of their rows the newest must be told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dormouse.query.planner import Scan


def clusters(scans: Iterable[Scan]) -> Iterator[list[Scan]]:
    """Scans that may have keys of each other come together; each has its keys once.

    In the order of their keys; those of which the keys are not known are with all others.
    """
    listed = list(scans)
    if any(scan.min_key is None or scan.max_key is None for scan in listed):
        yield listed
        return
    found: list[Scan] = []
    reached = b""
    for scan in sorted(listed, key=lambda one: one.min_key or b""):
        if found and (scan.min_key or b"") > reached:
            yield found
            found, reached = [], b""
        found.append(scan)
        reached = max(reached, scan.max_key or b"")
    if found:
        yield found


def overlap(scans: Iterable[Scan]) -> bool:
    """Whether any two may have a key of each other."""
    return any(len(found) > 1 for found in clusters(scans))
