"""The depth of conditions for Spark. Spark processes them recursively, so deep ones overflow its stack."""

from __future__ import annotations

from typing import Any

from dormouse.spark.frames import SPARK


class Deep(int):
    """An engine that only measures the depth of conditions."""

    def __and__(self, other: int) -> Deep:
        return Deep(max(self, other) + 1)

    __or__ = __and__


def test_thousands_of_parts_make_a_shallow_condition() -> None:
    parts: Any = [Deep(0)] * 5_000
    depths: Any = SPARK.any_of(parts), SPARK.all_of(parts)
    assert depths == (13, 13)
