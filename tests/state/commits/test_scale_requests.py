"""Repeated requests to change leaves: an id belongs to one request."""

from __future__ import annotations

from typing import Any

import pytest

from dormouse.errors import InvalidRange
from tests.state.partitions.test_scaling import NewTable, everything, ids
from tests.support.state import TableContext


@pytest.fixture
def halves(new_table: NewTable) -> TableContext:
    return new_table(split_points=[10, 20, 30])


@pytest.mark.parametrize("splits", [[8], [7, 3], [], [99], ["x"]])
def test_a_repeated_request_with_other_points_is_refused(halves: TableContext, splits: list[Any]) -> None:
    a, b, c, _ = ids(halves)
    scale, given = halves.partitions.scale, [("key", point) for point in splits]
    merged, divided = scale([a, b], [("key", 7)], "r1"), scale([c], [("key", 25)], "r2")
    for leaf, point in ((merged[0], 3), (divided[1], 27)):
        halves.partitions.split(leaf.partition_id, point)
    before = everything(halves)
    for sealed, request_id in (([a, b], "r1"), ([c], "r2")):
        with pytest.raises(
            InvalidRange, match=f"request id '{request_id}' .* at other points|alone cannot be"
        ):
            scale(sealed, given, request_id)
    assert scale([c], [("key", 25)], "r2") == divided
    assert scale([a, b], [("key", 7)], "r1") == merged
    assert everything(halves) == before
