"""Ranges of row versions compared with a dict of all rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dormouse.rows.batches import Ranges, replaced, runs, spans

State = tuple[int, bool]
ROWS = st.dictionaries(st.integers(1, 30), st.tuples(st.integers(1, 3), st.booleans()))


def of(rows: dict[int, State]) -> Ranges:
    ids = np.array(list(rows), np.int64)
    versions = np.array([version for version, _ in rows.values()], np.int64)
    return runs(ids, versions, np.array([deleted for _, deleted in rows.values()], np.bool_))


def rows_of(ranges: Ranges) -> dict[int, State]:
    found: dict[int, State] = {}
    for first, last, version, deleted in zip(*(column.tolist() for column in ranges), strict=True):
        for row_id in range(first, last + 1):
            assert row_id not in found
            found[row_id] = (version, deleted)
    return found


@given(ROWS, ROWS)
def test_changed_ranges_replace_old_ones(before: dict[int, State], changed: dict[int, State]) -> None:
    known, new = of(before), of(changed)
    made = replaced(known, new)
    assert rows_of(made) == {**before, **changed}
    assert made.first.tolist() == sorted(made.first.tolist())
    assert len(made.joined().first) == len(made.first)


@given(ROWS, st.lists(st.integers(0, 32)))
def test_each_row_is_found_in_its_range(rows: dict[int, State], ids: list[int]) -> None:
    ranges = of(rows)
    at = ranges.find(np.array(ids, np.int64))
    found = [None if n < 0 else (int(ranges.version[n]), bool(ranges.deleted[n])) for n in at]
    assert found == [rows.get(row_id) for row_id in ids]


@given(st.sets(st.integers(1, 60)), st.integers(1, 8))
def test_spans_cover_all_ids_and_are_limited_in_number(ids: set[int], most: int) -> None:
    ordered = sorted(ids)
    array = np.array(ordered, np.int64)
    found = spans(array, array, most)
    assert len(found) <= most
    assert all(any(first <= i <= last for first, last in found) for i in ordered)
    ends = [end for span in found for end in span]
    assert ends == sorted(ends) and {*ends} <= ids
    gaps = sum(b - a > 1 for a, b in pairwise(ordered))
    assert len(found) == (min(gaps + 1, most) if ids else 0)
