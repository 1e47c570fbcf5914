"""What is known of every key in all processes: the versions that were sent, and those acknowledged.

A look-up that begins after version v was acknowledged must see v; none may see what was never sent. So stale
and wrong answers are told exactly, without a lock: each cell has one writer, and only grows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.processes import FORKSERVER
from dormouse.model.schema import Field, Schema
from dormouse.model.types import LONG, STRING

SCHEMA = Schema([Field("key", LONG)], [Field("version", LONG)], [Field("check", STRING)])
KEYS_PER_LEAF = 2
RECENT = 64

Row = tuple[int, int, str]


class Ledger:
    """Shared between processes; keys are known by their number."""

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self.keys = leaves * KEYS_PER_LEAF
        self.sent = FORKSERVER.RawArray("q", self.keys)
        self.acknowledged = FORKSERVER.RawArray("q", self.keys)
        self.recent = FORKSERVER.RawArray("q", RECENT)
        """Numbers of keys that were written last."""

    def split_points(self) -> list[int]:
        return [leaf * KEYS_PER_LEAF for leaf in range(1, self.leaves)]

    def some_key(self, chance: random.Random) -> int:
        """Every other one was written a moment ago."""
        return chance.choice(self.recent) if chance.random() < 0.5 else chance.randrange(self.keys)


def row(key: int, version: int) -> Row:
    return key, version, f"{key}/{version}"


def judge(key: int, found: Sequence[Row], version_min: int, version_max: int) -> str | None:
    """What is wrong with an answer: `stale`, `wrong`, or nothing."""
    versions = len(found)
    if sorted(found) != [row(key, version) for version in range(1, versions + 1)] or versions > version_max:
        return "wrong"
    return "stale" if versions < version_min else None


def rows_of(answer: Any) -> list[Row]:
    """The rows of a reader."""
    columns = answer.read_all().to_pydict()
    return list(zip(columns["key"], columns["version"], columns["check"], strict=True))
