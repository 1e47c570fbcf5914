"""The first rows of their keys, of batches in key order that are cut anywhere."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dormouse.data.newest import first_of_keys

KEYS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", "a", "é"])), max_size=24)
SCHEMA = pa.schema([("k", pa.int64()), ("s", pa.string()), ("n", pa.int64())])


@given(KEYS, st.lists(st.integers(0, 24), max_size=6), st.integers(1, 2))
def test_they_are_those_of_a_naive_dict(keys: list[tuple[int, str]], cuts: list[int], columns: int) -> None:
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
