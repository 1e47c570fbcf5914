"""How deep the conditions get that Spark is given: it walks down step by step, until its stack overflows."""

from __future__ import annotations

from typing import Any

from dormouse.spark.frames import SPARK


class Deep(int):
    """A condition, as deep as it is."""

    def __and__(self, other: int) -> Deep:
        return Deep(max(self, other) + 1)

    __or__ = __and__


def test_thousands_of_parts_are_no_chain_of_thousands() -> None:
    parts: Any = [Deep(0)] * 5_000
    depths: Any = SPARK.any_of(parts), SPARK.all_of(parts)
    assert depths == (13, 13)
