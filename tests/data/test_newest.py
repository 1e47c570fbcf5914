"""The first row of each key, found in batches in key order that may be divided at any row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dormouse.data.newest import first_of_keys, laid_over

KEYS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", "a", "é"])), max_size=24)
SCHEMA = pa.schema([("k", pa.int64()), ("s", pa.string()), ("n", pa.int64())])


@given(KEYS, st.lists(st.integers(0, 24), max_size=6), st.integers(1, 2))
def test_the_first_rows_of_keys_match_a_dictionary(
    keys: list[tuple[int, str]], cuts: list[int], columns: int
) -> None:
    keys.sort()
    rows = [{"k": k, "s": s, "n": n} for n, (k, s) in enumerate(keys)]
    whole = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    batches = [whole.slice(start, end - start) for start, end in pairwise(sorted([0, *cuts, 24]))]
    names = ["k", "s"][:columns]
    found = [row for batch in first_of_keys(batches, names) for row in batch.to_pylist()]
    expected: dict[tuple[object, ...], dict[str, object]] = {}
    for row in rows:
        expected.setdefault(tuple(row[name] for name in names), row)
    assert found == [*expected.values()]


ROWS = st.dictionaries(st.integers(0, 40), st.booleans(), max_size=30)
CUTS = st.lists(st.integers(0, 30), max_size=8)


def cut(rows: Mapping[int, bool], cuts: list[int], value: str) -> Iterator[pa.RecordBatch]:
    """Yields the rows in batches, divided at the given positions."""
    keys = sorted(rows)
    whole = pa.record_batch(
        {"k": pa.array(keys, pa.int64()), "v": pa.array([value] * len(keys), pa.string())}
    )
    whole = whole.append_column("gone", pa.array([rows[key] for key in keys], pa.bool_()))
    for start, end in pairwise(sorted([0, *cuts, 30])):
        yield whole.slice(start, end - start)


@given(ROWS, CUTS, ROWS, CUTS)
def test_rows_of_a_small_stream_replace_rows_of_a_large_one(
    large: dict[int, bool], large_cuts: list[int], small: dict[int, bool], small_cuts: list[int]
) -> None:
    below = (batch.drop_columns(["gone"]) for batch in cut(large, large_cuts, "large"))
    found = laid_over(below, cut(small, small_cuts, "small"), ["k"], "gone")
    wanted = dict.fromkeys(large, "large") | dict.fromkeys(small, "small")
    there = sorted(key for key in wanted if not small.get(key, False))
    rows = [row for batch in found for row in batch.to_pylist()]
    assert rows == [{"k": key, "v": wanted[key]} for key in there]
