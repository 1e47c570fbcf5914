"""A record, shared by all processes, of the versions of each key that were sent and acknowledged.

A look-up that begins after version v was acknowledged must return v. No look-up may return a version that was
never sent. So stale and wrong answers are recognized exactly. No lock is needed, because each cell has one
writer and its value only grows.
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
    """The shared record. Keys are numbered from 0."""

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self.keys = leaves * KEYS_PER_LEAF
        self.sent = FORKSERVER.RawArray("q", self.keys)
        self.acknowledged = FORKSERVER.RawArray("q", self.keys)
        self.recent = FORKSERVER.RawArray("q", RECENT)
        """The keys that were written last."""

    def split_points(self) -> list[int]:
        return [leaf * KEYS_PER_LEAF for leaf in range(1, self.leaves)]

    def some_key(self, chance: random.Random) -> int:
        """Chooses a random key: in half of the calls one of the keys that were written last."""
        return chance.choice(self.recent) if chance.random() < 0.5 else chance.randrange(self.keys)


def row(key: int, version: int) -> Row:
    return key, version, f"{key}/{version}"


def judge(key: int, answer: Sequence[Row], version_min: int, version_max: int) -> str | None:
    """Judges the rows of an answer: `stale`, `wrong`, or None if it is correct.

    `version_min` was acknowledged before the look-up began, and `version_max` was sent before it ended.
    """
    versions = len(answer)
    if sorted(answer) != [row(key, version) for version in range(1, versions + 1)] or versions > version_max:
        return "wrong"
    return "stale" if versions < version_min else None


def rows_of(answer: Any) -> list[Row]:
    """Reads all rows of a query's answer."""
    columns = answer.read_all().to_pydict()
    return list(zip(columns["key"], columns["version"], columns["check"], strict=True))
